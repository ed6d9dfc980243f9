"""Makes members of LoRA adapters and the checkpoint of their base.

The weight of a member that an adapter changes is `base + left @ right`, computed in float64 and rounded once.
The left factor has the adapter's scale in it, in float32. With DoRA, each output is multiplied by a number.

`transposed_in_module` finds which weights of a model are stored transposed: `[in, out]`, as those of
transformers' Conv1D. `transposed_in_programs` finds them in its programs.

`adapter_config.json` has one setting for this, `fan_in_fan_out`. PEFT changes it at every layer, so the file
has that of the last one. Only the shape or the model tells how a weight is stored, and a square weight has no
shape that tells.

`FleetBase` records the base of a fleet in the artifact's provenance, and warns of adapters that name another
base.

`adapter_config.json` has the name of the base model that an adapter was trained on. The name is no proof: two
names or paths can be of one model. So another name is a warning, not an error.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from widepack_artifacts.correction import StackedFactors, rounded
from widepack_artifacts.errors import some
from widepack_artifacts.program import Ref
from widepack_artifacts.reader import Reader

from ..checkpoints.checkpoint import Checkpoint, is_floating
from ..checkpoints.differences import bit_equal
from ..checkpoints.discovery import LeftOut
from ..checkpoints.state_dict import TensorInfo
from ..errors import CheckpointError
from ..spec.dtypes import dtype_of
from .adapter import FILE, WEIGHTS, Adapter, LoraDelta, LowRankDifference, difference_of, read_adapter
from .factors import Factors, KeptStacked, Residual, stack_factors

Turned = Mapping[str, bool]
"""Whether a weight is stored transposed, by its name. Weights that are not in it are unknown."""
_SECOND = {"aten.mm.default": 1, "aten.matmul.default": 1, "aten.addmm.default": 2}
_TURNED = ("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.numpy_T.default")


def transposed_in_module(module: nn.Module) -> dict[str, bool]:
    """Returns which weights of linear layers a model stores transposed, by the class of each layer."""
    found = {}
    for name, part in module.named_modules(remove_duplicate=False):
        weight = getattr(part, "weight", None)
        if weight is None or getattr(weight, "ndim", 0) != 2:
            continue
        if isinstance(part, nn.Linear):
            found[f"{name}.weight".lstrip(".")] = False
        elif type(part).__name__ == "Conv1D":  # transformers' class; it is not imported for this
            found[f"{name}.weight".lstrip(".")] = True
    return found


def transposed_in_programs(artifact: Reader) -> dict[str, bool]:
    """Returns which weights member programs read as they are stored, in a product from the right."""
    found: dict[str, set[bool]] = {}
    for file in {f for e in artifact.manifest.entries.values() for f in e.member}:
        program = artifact.program(file)
        sources = {s.name: s.source for s in program.weights}
        for node in program.nodes:
            place = 1 if node.op == "aten.linear.default" else _SECOND.get(node.op, 0)
            if node.op in _TURNED and len(node.args):
                _add(found, sources, node.args[0], False)
            elif place and len(node.args) > place:
                _add(found, sources, node.args[place], node.op != "aten.linear.default")
    return {name: ways.pop() for name, ways in found.items() if len(ways) == 1}


def _add(found: dict[str, set[bool]], sources: Mapping[str, str], value: object, turned: bool) -> None:
    if isinstance(value, Ref) and value.name in sources:
        found.setdefault(sources[value.name], set()).add(turned)


BASE = "base"
"""The field of the provenance with the record of the base."""
_NAMED = "named"
_MOST_CHARACTERS = 200


@dataclass(frozen=True)
class FleetBase:
    """The base that a fleet was built with.

    checkpoint: of the base. named: the name of the base model in the settings of all adapters; "" if they
    name none, or several.
    """

    checkpoint: Checkpoint
    named: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the record for the provenance. Raises: CheckpointError if a file changed meanwhile."""
        return {
            "source": self.checkpoint.path,
            "sha256": self.checkpoint.sha256(),
            "bytes": self.checkpoint.bytes,
            **({_NAMED: self.named} if self.named else {}),
        }


def base_of(checkpoint: Checkpoint, adapters: Sequence[Adapter]) -> FleetBase:
    """Returns the base of adapters, and warns if they name several base models."""
    first: dict[str, str] = {}
    for adapter in adapters:
        if adapter.config.base_model:
            first.setdefault(_shown(adapter.config.base_model), adapter.path)
    if len(first) > 1:
        (one, one_path), (other, other_path) = list(first.items())[:2]
        warnings.warn(
            f"the adapters name {len(first)} base models: {one_path} names {one!r}, and {other_path} names"
            f" {other!r}. All of them get the base {checkpoint.path}; if these are different models, build"
            " one artifact for each",
            stacklevel=2,
        )
    return FleetBase(checkpoint, next(iter(first)) if len(first) == 1 else "")


def warn_of_other_base(provenance: Mapping[str, Any], adapter: Adapter) -> None:
    """Warns if an adapter names another base model than the adapters of an artifact.

    provenance: of the artifact. It is a free record, so any value in it is accepted.
    """
    record = provenance.get(BASE)
    named = record.get(_NAMED) if isinstance(record, dict) else None
    mine = _shown(adapter.config.base_model)
    if not mine or not isinstance(named, str) or not named or mine == _shown(named):
        return
    warnings.warn(
        f"adapter {adapter.path} names the base model {mine!r}, and the adapters of the artifact name"
        f" {_shown(named)!r}. Its answers are computed over the artifact's base; if these are different"
        " models, build an artifact with the other base",
        stacklevel=7,  # the caller of `swap`
    )


def _shown(name: str) -> str:
    return name.rstrip("/")[:_MOST_CHARACTERS]


_MOST_NAMED = 5
OF_ARTIFACT = "of the artifact"
"""The path of a base that is read from an artifact."""


class AdapterMember:
    """A LoRA adapter over a base.

    Args:
        base: The checkpoint of the base model, under the names of the model.
        adapter: The adapter.
        turned: Which weights the model stores transposed, as far as it is known.

    Attributes:
        checkpoint: The member, as a checkpoint with the merged weights. They are computed when they are read.

    Raises:
        CheckpointError: The adapter changes a weight that the base does not have.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter, turned: Turned | None = None) -> None:
        self._base, self.adapter, self._turned = base, adapter, turned or {}
        known = base.tensors()
        if unknown := [name for name in adapter.deltas if name not in known]:
            names = some(unknown, _MOST_NAMED)
            if base.path == OF_ARTIFACT:
                raise CheckpointError(
                    f"adapter {adapter.path}: the artifact does not have the base's {names}, since its"
                    " members have weights of their own there; give the base to `widepack append` or `update`"
                    " with --base, or build again"
                )
            raise CheckpointError(
                f"adapter {adapter.path}: the base {base.path} has no {names}; give the base model that the"
                " adapter was trained on"
            )
        infos = dict(known)
        for name, value in adapter.replaced.items():
            dtype = str(value.dtype).removeprefix("torch.")
            if name in known and is_floating(known[name].dtype) and is_floating(dtype):
                dtype = known[name].dtype
            infos[name] = TensorInfo(dtype, tuple(value.shape))
        self._infos = infos
        files = [Path(adapter.path, FILE), *(Path(adapter.path, name) for name in WEIGHTS)]
        found = [(str(file), os.stat(file)) for file in files if file.is_file()]
        self.checkpoint = Checkpoint(
            adapter.path,
            infos,
            self._read,
            found,
            versions=base.versions(),
            extra=base.extra_state(),
        )

    def replaces(self, name: str) -> bool:
        """Returns whether the adapter has a whole tensor in place of the base's."""
        return name in self.adapter.replaced

    def difference(self, name: str, base: Tensor) -> LowRankDifference | None:
        """Returns how the adapter changes a weight of the base; None if it does not, or replaces it.

        base: the weight. Raises: CheckpointError for another shape.
        """
        delta = self.adapter.deltas.get(name)
        return None if delta is None or self.replaces(name) else self._changed(name, base, delta)

    def _changed(self, name: str, weight: Tensor, delta: LoraDelta) -> LowRankDifference:
        """Returns how a delta changes a weight. Raises: CheckpointError for another shape."""
        try:
            return difference_of(weight, delta, self._turned.get(name))
        except CheckpointError as error:
            raise CheckpointError(f"adapter {self.adapter.path}: {name[:200]}: {error}") from None

    def _read(self, name: str) -> Tensor:
        delta, replaced = self.adapter.deltas.get(name), self.adapter.replaced.get(name)
        value = self._base.get(name) if replaced is None else replaced.to(dtype_of(self._infos[name].dtype))
        if delta is None:
            return value
        left, right, scale = self._changed(name, value, delta)
        scales = None if scale is None else scale.unsqueeze(0)
        return rounded(
            StackedFactors(value, left.unsqueeze(0), right.unsqueeze(0), [left.shape[1]], scales), 0
        )


def check_ties(adapter: Adapter, tied: Iterable[Collection[str]]) -> None:
    """Refuses an adapter that changes one name of a tied weight and not the others.

    PEFT computes a tied layer without the difference, and merges it into both.

    Args:
        adapter: The adapter.
        tied: The names of each tied weight.

    Raises:
        CheckpointError: The adapter has a difference of a tied weight, or replaces it under some names only.
    """
    for names in tied:
        changed = [name for name in names if name in adapter.deltas]
        replaced = [adapter.replaced[name] for name in names if name in adapter.replaced]
        whole = len(replaced) == len(names) and all(bit_equal(replaced[0], v) for v in replaced[1:])
        if changed or (replaced and not whole):
            raise CheckpointError(
                f"adapter {adapter.path}: it changes {changed[0] if changed else min(names)}, and the model"
                f" ties {some(sorted(names), 4)} to one weight; merge the adapter into its base with"
                " PEFT, and build from the merged checkpoints"
            )


def fleet_factors(name: str, base: Tensor, members: Sequence[AdapterMember]) -> Factors | KeptStacked:
    """Returns the factors of one weight of all members, or why it stays Stacked."""
    if base.ndim < 2:
        return KeptStacked(f"it has {base.ndim} dims; factored are matrices and filters")
    if any(m.replaces(name) for m in members):
        return KeptStacked("an adapter replaces it")
    found = [m.difference(name, base) for m in members]
    dtype = torch.float64 if base.dtype == torch.float64 else torch.float32
    pairs = [None if d is None else (d.left, d.right) for d in found]
    left, right, ranks = stack_factors(pairs, base, dtype)
    shapes = {d.scale.shape for d in found if d is not None and d.scale is not None}
    if len(shapes) > 1:
        return KeptStacked("the adapters have scales of different dims (DoRA)")
    scale = torch.ones(len(members), *shapes.pop(), dtype=dtype) if shapes else None
    for i, d in enumerate(found):
        if scale is not None and d is not None and d.scale is not None:
            scale[i] = d.scale
    return Factors(base, left, right, ranks, Residual(0.0, 0.0), "given", scale)


def read_adapters(paths: Sequence[str]) -> tuple[list[Adapter], list[LeftOut]]:
    """Reads the folders of adapters, in order, and returns why the others are left out."""
    found: list[Adapter] = []
    bad: list[LeftOut] = []
    for i, path in enumerate(paths):
        try:
            found.append(read_adapter(path))
        except CheckpointError as error:
            bad.append(LeftOut(i, path, str(error).removeprefix(f"adapter {path}: ")))
    return found, bad
