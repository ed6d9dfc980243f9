"""Changes one member's weights in bound programs.

All new values are computed first. Then they are written or exchanged at once, without further computation.

| what a program uses | what happens |
|---|---|
| a weight, or a view of one | The member's slice is written in place. Every view shows it. |
| a derived weight | It is computed again. The rows of axis 0 that differ are written in place. |
| a value that is prepacked, of another size, or overlapping | The new value replaces it. |
| a list of N prepacked values | The member's value is packed again, and replaces the old one. |
| a copy for a compiler (the weight's memory has gaps) | It is written like the weight. |
| a copy inside a backend (ONNX Runtime) | The session of the member's share is replaced. |

Rows are compared bit by bit, so no knowledge of the prologue is needed: rows that are not written are equal
already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.errors import some
from widepack_artifacts.program import Output, Program, Ref, refs
from widepack_artifacts.weights import Weights

from ... import backends
from ...backends.flat import Flat, dense
from ...errors import UsageError
from ...ir.edit import needed
from ...kernels.library import FUNCTIONS
from ...kernels.packed import PACKED_LISTS
from ...runtime.executable import Executable, storage
from ...runtime.graph_module import evaluate
from ..open_artifact import OpenArtifact
from ..programs.bound_program import BoundProgram, Runnable

Rebind = Callable[[BoundProgram, Mapping[str, Any], int], Runnable]
"""Binds a bound program to other weights of one member, given by name, and its place."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class WrittenWeights:
    """A part of memory to write.

    Attributes:
        into: The memory, which programs read.
        value: The new numbers.
        before: The numbers that are there now.
    """

    into: Tensor
    value: Tensor
    before: Tensor


@dataclass
class WeightChanges:
    """All changes that have to be made at once.

    Attributes:
        written: The memory to write.
        replaced: What puts a value in its place, the new value, and the one that is there now.
        exchanged: How many values and programs are replaced as a whole.
    """

    written: list[WrittenWeights] = field(default_factory=list)
    replaced: list[tuple[Callable[[Any], object], Any, Any]] = field(default_factory=list)
    exchanged: int = 0

    @property
    def bytes(self) -> int:
        """How many bytes are written."""
        return sum(w.value.numel() * w.value.element_size() for w in self.written)

    def replace(self, put: Callable[[Any], object], new: Any, old: Any, count: int) -> None:
        """Adds a value to replace. put: puts it in its place. count: how many values it is."""
        self.replaced.append((put, new, old))
        self.exchanged += count

    def apply(self) -> None:
        """Makes the changes. If that fails, everything is undone before the error is raised."""
        try:
            self._put(True)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restores what was there before."""
        self._put(False)

    def _put(self, new: bool) -> None:
        with torch.inference_mode():
            for w in self.written:
                w.into.copy_(w.value if new else w.before)
        for put, value, old in self.replaced:
            put(value if new else old)


class MemberUpdate:
    """New weights of one loaded member.

    Args:
        artifact: The open artifact.
        place: The member's place among the loaded ones.
        values: The stored weights that differ from the present ones, by name, on the device.
        products: The factored weights that differ, in the files' dtype.
        factors: The ranks and corrections of these.
    """

    def __init__(
        self,
        artifact: OpenArtifact,
        place: int,
        values: Mapping[str, Tensor],
        products: Mapping[str, Tensor] | None = None,
        factors: Mapping[str, tuple[int, bytes]] | None = None,
    ) -> None:
        self.artifact, self.place, self.values = artifact, place, values
        self.products, self.factors = dict(products or {}), dict(factors or {})

    def weight(self, name: str) -> Any:
        """Returns a weight of all members after the change. It is a copy if this member's part changes."""
        whole = self.artifact.weights.get(name)
        if name not in self.values:
            return whole
        if isinstance(whole, list):
            return [self.values[name] if i == self.place else w for i, w in enumerate(whole)]
        with torch.inference_mode():
            whole = whole.clone()
            whole[self.place].copy_(self.values[name])
        return whole

    def canonical(self, mapped: Mapping[str, Tensor]) -> list[WrittenWeights]:
        """Returns the changes of the weights themselves: in the mapped files, and in their copies.

        The mapping is private: written pages become this process's own. mapped: the values in the files'
        dtype.
        """
        found = []
        for name in self.values:
            into = self.artifact.weights.part(name, self.artifact.chosen[self.place])
            found.append(_write(into, mapped[name]))
            # The same bits are written, so that the pages become private now and not while calls wait.
            into.copy_(found[-1].before)
        return found + self.copies(found)

    def replace_factors(self, changes: WeightChanges) -> None:
        """Adds the changes of the ranks and corrections of factored weights."""
        files, number = self.artifact.weights.files, self.artifact.chosen[self.place]
        for name, new in self.factors.items():
            put = partial(_put_factors, files, name, number)
            changes.replace(put, new, files.factors_of(name, number), 0)

    def _computed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the members' values of factored weights that somebody uses, with the new ones."""
        weights, number = self.artifact.weights, self.artifact.chosen[self.place]
        for name, value in self.products.items():
            if (own := weights.files.computed(name, number)) is not None:
                yield own, value
            if (copy := weights.member_copy(name, self.place)) is not None:
                yield copy, weights.place(value, f"weight {name}")

    def copies(self, known: Sequence[WrittenWeights]) -> list[WrittenWeights]:
        """Returns the changes of copies that are not among the known ones.

        Under the artifact's lock no new copy is made meanwhile.
        """
        weights, found = self.artifact.weights, []
        # The known changes keep their memory alive, so no other tensor has the same address.
        there = {(w.into.data_ptr(), w.into.shape) for w in known}
        for name, value in self.values.items():
            tensors = []
            if (copies := weights.copies(name)) is not None:
                ragged = weights.row(name).kind == "ragged"
                tensors.append(copies[self.place] if ragged else copies[0][self.place])
            if (copy := weights.member_copy(name, self.place)) is not None:
                tensors.append(copy)
            found += [_write(into, value) for into in tensors if (into.data_ptr(), into.shape) not in there]
        used = [(into, v) for into, v in self._computed() if (into.data_ptr(), into.shape) not in there]
        return found + [_write(into, value) for into, value in used]

    def changes(self, bound: BoundProgram, into: WeightChanges, rebind: Rebind) -> None:
        """Adds what changes in a bound program beside the weights themselves.

        into: gets the changes. Raises: UsageError if a compiled program cannot take another member.
        """
        if backends.backend(bound.backend).COPIES:
            if any(s.source in self.values for s in bound.program.weights):
                weights = {s.source: self.weight(s.source) for s in bound.program.weights}
                into.replace(bound.replace_runnable, rebind(bound, weights, self.place), bound.runnable, 1)
            return
        run, function = bound.executable, bound.runnable.function
        flat = function.flat if function is not None else None
        homes = {storage(t) for name in self.values for t in _tensors(self.artifact.weights.get(name))}
        exchanged: dict[int, Any] = {}
        for number, (old, read) in enumerate(zip(run.given, run.reads)):
            if read.isdisjoint(self.values):
                continue
            targets = _compiled_copies(flat, number, old)
            if not (tensors := _tensors(old)) or not all(storage(t) in homes for t in tensors):
                targets.append((old, -1))
            new = self._derived(run, number) if targets else None
            for target, part in targets:
                written, instead = _difference(
                    target, new if part < 0 and target is old else dense(_part(new, part))
                )
                into.written += written
                exchanged.update({} if instead is None else {number: instead})
        if not exchanged:
            return
        if flat is not None:
            names = some((run.names[n] for n in exchanged), 3)
            raise UsageError(
                f"backend {bound.backend!r} has values that depend on the weights and have other "
                f"sizes for this member, or are numbers in its code ({names}): it cannot exchange a "
                "member; load with backend='eager', or load again after `widepack update`"
            )
        into.replace(run.exchange, exchanged, {n: run.given[n] for n in exchanged}, len(exchanged))

    def _derived(self, run: Executable, number: int) -> Any:
        """Returns one of a program's weights or derived weights after the change."""
        name, old = run.names[number], run.given[number]
        pack = None if run.prologue is None else next((n for n in run.prologue.nodes if n.name == name), None)
        if pack is None or pack.op not in PACKED_LISTS or not isinstance(pack.args[0], Ref):
            return self._evaluated(run, name)
        whole = self._evaluated(run, pack.args[0].name)
        with torch.inference_mode():
            (new,) = FUNCTIONS[pack.op](whole[self.place : self.place + 1], *pack.args[1:])
        return [new if i == self.place else packed for i, packed in enumerate(old)]

    def _evaluated(self, run: Executable, name: str) -> Any:
        """Returns a value of all members, which depends on weights only, after the change."""
        part = _program_of(run, name)
        with torch.inference_mode():
            return evaluate(part, [self.weight(s.source) for s in part.weights], run.device)[0]


def _put_factors(files: Weights, name: str, number: int, value: tuple[int, bytes]) -> None:
    files.replace_factors(name, number, *value)


def _compiled_copies(flat: Flat | None, number: int, old: Any) -> list[tuple[Any, int]]:
    """Returns the copies of a value that a compiled program uses, each with the part that it copies."""
    if flat is None:
        return []
    parts = [(w, p) for w, (n, p) in zip(flat.weights, flat.parts) if n == number]
    return [(w, p) for w, p in parts if not storage(w) == storage(_part(old, p)) != 0]


def _program_of(run: Executable, name: str) -> Program:
    """Returns the program that computes one value from weights only."""
    if run.prologue is None:
        return replace(
            run.main,
            weights=tuple(s for s in run.main.weights if s.name == name),
            inputs=(),
            nodes=(),
            outputs=(Output(Ref(name), "shared"),),
        )
    nodes = needed(run.prologue.nodes, [name])
    read = {name, *(r for n in nodes for r in refs((n.args, n.kwargs)))}
    return replace(
        run.prologue,
        weights=tuple(s for s in run.prologue.weights if s.name in read),
        nodes=tuple(nodes),
        outputs=(Output(Ref(name), "shared"),),
    )


def _write(into: Tensor, value: Tensor) -> WrittenWeights:
    with torch.inference_mode():
        return WrittenWeights(into, value.clone(), into.clone())


def _tensors(value: Any) -> list[Tensor]:
    """Returns the tensors of a value that are not empty."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [t for t in values if isinstance(t, Tensor) and t.numel()]


def _part(value: Any, number: int) -> Any:
    return value if number < 0 else value[number]


def _difference(old: Any, new: Any) -> tuple[list[WrittenWeights], Any]:
    """Returns what to write to make `old` equal to `new`, and what replaces `old`, or None."""
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)) and len(old) == len(new):
        pairs = [_difference(a, b) for a, b in zip(old, new)]
        instead = None
        if any(i is not None for _, i in pairs):
            instead = [a if i is None else i for a, (_, i) in zip(old, pairs)]
        return [w for written, _ in pairs for w in written], instead
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return [], None if type(old) is type(new) and old == new else new
    fits = old.layout == new.layout == torch.strided and old.shape == new.shape and old.dtype == new.dtype
    # 0: no two elements share memory
    if not fits or torch._debug_has_internal_overlap(old) != 0:  # torch has no public name for it
        return [], new
    with torch.inference_mode():
        rows = differing(old, new)
        if rows is None:
            return [], None
        return [_write(old[rows] if old.dim() else old, new[rows] if new.dim() else new)], None


def differing(a: Tensor, b: Tensor) -> slice | None:
    """Returns the rows of axis 0 from the first to the last that differs by a bit; None if none does.

    a, b: of one shape and dtype.
    """
    if not a.numel():
        return None
    if not a.dim():
        return None if torch.equal(_bits(a), _bits(b)) else slice(None)
    other = (_bits(a) != _bits(b)).reshape(a.shape[0], -1).any(1).nonzero()
    return slice(int(other[0]), int(other[-1]) + 1) if len(other) else None


def _bits(t: Tensor) -> Tensor:
    t = t.detach().resolve_conj().resolve_neg()
    t = torch.view_as_real(t) if t.is_complex() else t
    return t.view(_INTEGERS[t.element_size()])
