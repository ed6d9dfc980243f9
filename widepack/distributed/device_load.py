"""Loads an artifact on one device or on several: `widepack.load`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast, overload

import torch

from widepack_artifacts.reader import Reader, opened

from ..errors import UsageError
from ..inference.load import check_expected, chosen_members
from ..inference.load import load as load_here
from ..inference.model import WideModel
from ..ir import ops
from ..runtime.admission import guarded
from ..spec.member_parts import divided, member_bytes
from ..spec.names import path_of
from ..system.gate import Gate
from ..system.progress import Report

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .device_model import DeviceModel

T = TypeVar("T")


class LoadArguments(TypedDict, total=False):
    """The options of `widepack.load`, except the device."""

    dtype: str | torch.dtype | None
    members: Sequence[int | str] | None
    strategies: str | Sequence[str] | None
    simplify: bool
    backend: str
    verify: str
    expect: str | None
    prologue: bool
    warmup: bool
    threads: int | None
    compile: str | None
    cache: str | PathLike[str] | None
    progress: Report | None
    limit: float | None
    allow_ops: Sequence[Any]
    memory: str
    weights: str | None
    max_error: float | None
    graph: bool | str


@overload
def load(
    path: str | PathLike[str], *, device: str | torch.device | None = None, **options: Unpack[LoadArguments]
) -> WideModel: ...
@overload
def load(
    path: str | PathLike[str],
    *,
    device: list[str] | list[torch.device] | tuple[str | torch.device, ...],
    **options: Unpack[LoadArguments],
) -> DeviceModel: ...
def load(
    path: str | PathLike[str],
    *,
    device: str | torch.device | Sequence[str | torch.device] | None = None,
    dtype: str | torch.dtype | None = None,
    members: Sequence[int | str] | None = None,
    strategies: str | Sequence[str] | None = None,
    simplify: bool = True,
    backend: str = "auto",
    verify: str = "sizes",
    expect: str | None = None,
    prologue: bool = True,
    warmup: bool = True,
    threads: int | None = None,
    compile: str | None = None,
    cache: str | PathLike[str] | None = None,
    progress: Report | None = None,
    limit: float | None = 1.0,
    allow_ops: Sequence[Any] = (),
    memory: str = "auto",
    weights: str | None = None,
    max_error: float | None = None,
    graph: bool | str = False,
) -> WideModel | DeviceModel:
    """Loads an artifact and returns a model that runs all members in one call.

    The first load on a machine, and the first after a change of the files, runs the artifact's probe: a few
    inputs with every member's float64 answers.

    Args:
        path: The folder that `widepack.build` wrote.
        device: Where to run, for example `"cpu"` or `"cuda:0"`. A list of devices divides the members into
            adjacent parts of about equal bytes of weights, one for each device, and returns a `DeviceModel`:
            inputs and answers are on the first device. Default: the CPU.
        dtype: `bf16`, `fp16`, `fp32` or the name of another floating dtype. Weights are cast on the device,
            and programs are lowered again for it. Inputs must have it. Answers are checked against what the
            members' own programs compute in it. The files do not change. Default: the artifact's dtype.
        members: The members to load, by number or name, in this order. Answers have the form of the whole
            artifact. Default: all.
        strategies: What `build --strategy` takes. The programs are lowered again then. Default: the
            artifact's plans.
        simplify: False lowers the programs again as they were captured, which shows what simplification
            gains.
        backend: `auto` (what the plan names if it can run here, else a compiled program that is in the cache
            and was measured to be faster, else `eager`), `eager`, `compile`, `aot` or `onnxruntime`.
        verify: `sizes` checks the sizes of all files, `hashes` checks their hashes, `off` neither, and no
            probe. The digest of the manifest and the hashes of the programs are always checked.
        expect: The digest of the manifest, `sha256:...`. It pins a deployment to one artifact. Who gives it
            vouches for the artifact: ONNX Runtime may read its ONNX graphs.
        prologue: True computes derived weights once, now. False keeps every weight in the mapped file.
        warmup: True binds the programs of pattern `shared` and runs the probe now. False does so at the first
            call.
        threads: The number of threads of torch, for the process, and of ONNX Runtime. Default: unchanged.
        compile: `"now"` compiles what is not in the cache, at load and when another pattern is first called.
            Default: nothing is compiled.
        cache: The folder of compiled programs. Default: `WIDEPACK_CACHE`, else a folder in the user's cache.
        progress: Is called with (stage, done, total) while something compiles.
        limit: How many times the memory and work that its files justify a load may take. None allows any
            amount, for artifacts from makers that you trust.
        allow_ops: Ops of other libraries (`mylib::op`) that the artifact's programs may use. The op of a
            library may do anything with values from a file, so name only ops that are safe with any input.
        memory: For an artifact of fine-tunes that stores a base and low-rank factors. `auto` computes each
            member's whole weights when a call first has so many rows that this is faster, if memory for N
            models is available. `least` never does, and `most` does at load, so that no call waits for it.
            With `weights="int8"` it says in the same way when the programs of large batches are bound.
        weights: `"int8"` runs calls of few rows over int8 weights, with one scale for each row of a weight,
            on a CPU. The files do not change. Answers differ from the members' by more than rounding:
            `weight_errors` says by how much. Default: the weights as they are stored.
        max_error: With `weights="int8"`: the largest error of an answer to the probe's inputs, as a part of
            the answer's rms. A larger one is refused. Default: any.
        graph: True runs calls by CUDA graphs: a graph is captured at the first call of a batch size, and then
            replayed, so that the host starts one graph and not each kernel. Calls that have no graph, and
            programs that no graph can run, run without one: see `WideModel.graph_use`. `auto` does so only on
            CUDA, and only where a graph is measured to be faster. False does not.

    Returns:
        A `WideModel`; a `DeviceModel` for a list of devices. Call it with the member's inputs; each output
        leaf is `[N, *shape]`.

    Raises:
        ArtifactError: The folder is no artifact, a file is damaged or does not match the manifest, or a
            program takes more than the limit.
        ProbeError: The answers on this machine are out of bounds. It is an `ArtifactError` too.
        VerificationError: int8 weights change an answer by more than `max_error`.
        UsageError: An argument is not valid, or there are more devices than members.

    Example:
        >>> ens = widepack.load("ens.wide")
        >>> y = ens(x)  # x: [B, 8], y: [N, B, 3]
        >>> halves = widepack.load("ens.wide", device=["cuda:0", "cuda:1"])
    """
    given = dict(locals())
    options = cast("LoadArguments", {name: given[name] for name in LoadArguments.__annotations__})
    if isinstance(device, (list, tuple)):
        return load_parts(path, list(device), options)
    return load_here(path, device=device, **options)  # type: ignore[arg-type]  # it refuses what is no device


def load_parts(
    path: str | PathLike[str], devices: Sequence[str | torch.device], options: LoadArguments
) -> DeviceModel:
    """Loads the members in parts, one on each device. Raises: as `load`."""
    if not devices:
        raise UsageError("device=[] names no device; give at least one, or leave it out for the CPU")
    path = path_of(path)

    from .device_model import DeviceModel  # imports the walk over rows, which other loads do not need

    def opening(reader: Reader) -> DeviceModel:
        """Opens every part from the files of one digest."""
        chosen, parts = divided_members(reader, options, len(devices), "devices")
        pinned: LoadArguments = {**options, "expect": reader.manifest.digest}
        trusted = options.get("expect") is not None
        gate = Gate()
        models: list[WideModel] = []
        for device, places in zip(devices, parts):
            part: LoadArguments = {**pinned, "members": [chosen[i] for i in places]}
            if models and options.get("verify") == "hashes":
                part["verify"] = "sizes"  # the first part has read every file
            models.append(load_here(path, device=device, gate=gate, trusted=trusted, **part))
        again: LoadArguments = {**pinned, "warmup": False, "threads": None, "progress": None}
        return DeviceModel(models, parts, gate, partial(load_parts, Path(path).absolute(), devices, again))

    return opened_in_parts(path, options, opening)


def opened_in_parts(path: str | PathLike[str], options: LoadArguments, opening: Callable[[Reader], T]) -> T:
    """Opens an artifact whose members are loaded in parts. Raises: as `load`."""
    if options.get("weights") is not None or options.get("max_error") is not None:
        raise UsageError(
            "weights and max_error are for a load on one device; leave them out, or load without a list of"
            " devices and in one process"
        )
    expect = options.get("expect")
    check_expected(expect)
    path = path_of(path)
    with guarded(str(path)):
        return opened(path, opening, expect, ops.allow(options.get("allow_ops", ())))[1]


def divided_members(
    reader: Reader, options: LoadArguments, count: int, what: str
) -> tuple[list[int], list[range]]:
    """Returns the numbers of the members to load, and the places of each part among them.

    The parts are of about equal bytes of weights. what: messages call the parts so. Raises: UsageError.
    """
    chosen = chosen_members(reader.manifest, options.get("members"))
    sizes = member_bytes(reader.manifest.weights, len(reader.manifest.members))
    return chosen, divided([sizes[i] for i in chosen], count, what)
