"""Makes an ONNX Runtime session of a file whose weights it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
_WITHOUT_NUMPY = "tensor(bfloat16)"


def options(onnxruntime: Any, threads: int = 0) -> Any:
    """The options of every session. threads: of an op; 0 for as many as torch's ops have."""
    made = onnxruntime.SessionOptions()
    made.intra_op_num_threads = threads or torch.get_num_threads()
    # its threads sleep between calls: spinning ones take processors from torch's threads and other sessions
    made.add_session_config_entry("session.force_spinning_stop", "1")
    made.log_severity_level = 3
    return made


def session(
    model: Path | bytes,
    booleans: Sequence[bool] | None,
    weights: Mapping[str, torch.Tensor],
    onnxruntime: Any,
    made: Any,
) -> Run:
    """Makes a session.

    Args:
        model: The file, or its content.
        booleans: Which outputs are boolean; None for a session that never runs.
        weights: The weights that are not in the file, by name.
        onnxruntime: The package.
        made: From `options`.

    Returns:
        A function from the inputs to the outputs, in the order of the file.

    Raises: ValueError for a file with other outputs, and whatever ONNX Runtime raises.
    """
    tensors = [_value(w, onnxruntime) for w in weights.values()]
    if tensors:
        made.add_external_initializers(list(weights), tensors)
    content = model if isinstance(model, bytes) else str(model)
    opened = onnxruntime.InferenceSession(content, made, providers=["CPUExecutionProvider"])
    names, takes = [o.name for o in opened.get_outputs()], [i.name for i in opened.get_inputs()]
    booleans = [False] * len(names) if booleans is None else booleans
    if len(names) != len(booleans):
        raise ValueError("the outputs are not those of the record")

    def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arrays = {name: x.detach().numpy() for name, x in zip(takes, given, strict=True)}
        return [torch.from_numpy(a) for a in opened.run(names, arrays)]

    def run_by_dlpack(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values = {name: _value(x, onnxruntime) for name, x in zip(takes, given, strict=True)}
        answers = [from_dlpack(v) for v in opened.run_with_ort_values(names, values)]
        return [a.view(torch.bool) if b and a.dtype != torch.bool else a for a, b in zip(answers, booleans)]

    types = [v.type for v in (*opened.get_inputs(), *opened.get_outputs())]
    chosen = run_by_dlpack if _WITHOUT_NUMPY in types else run  # numpy's way in and out takes less time
    chosen.keeps = tensors  # type: ignore[attr-defined]  # the session reads their memory
    return chosen


def _value(tensor: torch.Tensor, onnxruntime: Any) -> Any:
    if tensor.dtype == torch.bool:  # ONNX Runtime 1.31 does not know the bool of DLPack
        return onnxruntime.OrtValue.ortvalue_from_numpy(tensor.detach().contiguous().numpy())
    return onnxruntime.OrtValue.from_dlpack(tensor.detach())
