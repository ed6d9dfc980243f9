"""What bound programs hold of their weights, changed for one member: everything is made aside first, and then written or exchanged without computing anything.

| what a program holds | what happens |
|---|---|
| a weight, or a view of one | the member's slice is written in place; every view shows it |
| a value that the prologue made (a folded weight, a reordered one) | it is made anew aside; the rows of axis 0 that differ from those that are there are written in place |
| one that cannot be written into (oneDNN's packed weights, a value of another size, memory that several elements share) | the new one takes its place |
| a copy that a compiler asked for (a weight whose memory has gaps) | written as the value that it is a copy of |
| what a backend keeps out of sight (ONNX Runtime reorders weights for itself) | the program is bound anew aside, and the whole of it takes its place |

Rows are compared by their bits, so nothing hangs on knowing what the prologue does: what is not written is equal already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Output, Program, Ref, refs

from .. import backends
from ..backends.flat import Flat, dense
from .programs import Bound
from ..errors import UsageError
from .open_artifact import Answers, Held
from ..runtime.graph_module import Executable, evaluate, needed, storage

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Written:
    """into: a part of memory that programs read. value: what is to stand there. before: what stands there now."""

    into: Tensor
    value: Tensor
    before: Tensor


@dataclass
class Changes:
    """All that has to happen at once. bytes: that are written. exchanged: how many values take the place of others. before: what stood for the member's answers in the
    probe where it had been swapped before."""

    written: list[Written] = field(default_factory=list)
    values: list[tuple[Executable, dict[int, Any], dict[int, Any]]] = field(default_factory=list)
    bound: list[tuple[Bound, Executable, Executable]] = field(default_factory=list)
    before: Answers | None = None

    @property
    def bytes(self) -> int:
        return sum(w.value.numel() * w.value.element_size() for w in self.written)

    @property
    def exchanged(self) -> int:
        return sum(len(new) for _, new, _ in self.values) + len(self.bound)

    def apply(self) -> None:
        """Raises: what writing raises, after everything was put back."""
        try:
            self._do(lambda w: w.value, lambda new, old: new)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put back what stood there before."""
        self._do(lambda w: w.before, lambda new, old: old)

    def _do(self, value: Callable[[Written], Tensor], which: Callable[[Any, Any], Any]) -> None:
        with torch.inference_mode():
            for w in self.written:
                w.into.copy_(value(w))
        for run, new, old in self.values:
            run.exchange(which(new, old))
        for bound, new_run, old_run in self.bound:
            bound.become(which(new_run, old_run))


class Member:
    """New weights of one loaded member. place: of the member among the loaded ones. values: by name, on the device, those that differ from what is there."""

    def __init__(self, held: Held, place: int, values: Mapping[str, Tensor]) -> None:
        self.held, self.place, self.values = held, place, values

    def weight(self, name: str) -> Any:
        """A weight of all members as it will be: a copy where this member's part changes."""
        whole = self.held.weight(name)
        if name not in self.values:
            return whole
        if isinstance(whole, list):
            return [self.values[name] if i == self.place else w for i, w in enumerate(whole)]
        with torch.inference_mode():
            whole = whole.clone()
            whole[self.place].copy_(self.values[name])
        return whole

    def canonical(self, mapped: Mapping[str, Tensor]) -> list[Written]:
        """The weights themselves: in the mapped files, whose pages become this process's own, and their copies. mapped: the values as the files have them."""
        made = []
        for name in self.values:
            into = self.held.part(name, self.held.chosen[self.place])
            made.append(_written(into, mapped[name]))
            into.copy_(made[-1].before)  # the same bits: the pages are made private now, and not while calls wait
        return made + self.copies(made)

    def copies(self, known: Sequence[Written]) -> list[Written]:
        """The copies of the weights that are not among those that are known. Under the lock of what is held none is made meanwhile."""
        held, made = self.held, []
        there = {(w.into.data_ptr(), w.into.shape) for w in known}  # which hold their memory: no other tensor has it
        for name, value in self.values.items():
            found = []
            if (copies := held.copies(name)) is not None:
                found.append(copies[self.place] if held.row(name).kind == "ragged" else copies[0][self.place])
            if (alone := held.alone(name, self.place)) is not None:
                found.append(alone)
            made += [_written(into, value) for into in found if (into.data_ptr(), into.shape) not in there]
        return made

    def changes(self, bound: Bound, into: Changes, anew: Callable[[Bound, Mapping[str, Any]], Executable]) -> None:
        """What changes in a bound program beside the weights themselves. anew: binds a program to other weights. Raises: UsageError for what a compiled program does not let go of."""
        run = bound.executable
        if backends.backend(bound.backend).COPIES:
            if any(s.source in self.values for s in bound.program.weights):
                into.bound.append((bound, anew(bound, {s.source: self.weight(s.source) for s in bound.program.weights}), run))
            return
        flat: Flat | None = getattr(run.call, "flat", None)
        homes = {storage(t) for name in self.values for t in _tensors(self.held.weight(name))}
        exchanged: dict[int, Any] = {}
        for number, (old, read) in enumerate(zip(run.given, run.reads)):
            if read.isdisjoint(self.values):
                continue
            held = _copies(flat, number, old)
            if not (tensors := _tensors(old)) or not all(storage(t) in homes for t in tensors):
                held.append((old, -1))
            if not held:
                continue
            new = self._made(run, number)
            for place, part in held:
                written, instead = _pair(place, new if part < 0 and place is old else dense(_part(new, part)))
                into.written += written
                exchanged.update({} if instead is None else {number: instead})
        if not exchanged:
            return
        if flat is not None:
            raise UsageError(
                f"backend {bound.backend!r} holds values that are made of the weights and would have other sizes, or are numbers in its code "
                f"({', '.join(run.names[n] for n in list(exchanged)[:3])}): it cannot take another member while it runs; load with backend='eager', or load again after `widepack update`"
            )
        into.values.append((run, exchanged, {n: run.given[n] for n in exchanged}))

    def _made(self, run: Executable, number: int) -> Any:
        """One of the values that a program is given, as it will be."""
        part = _makes(run, number)
        with torch.inference_mode():
            return evaluate(part, [self.weight(s.source) for s in part.weights], run.device)[0]


def _copies(flat: Flat | None, number: int, old: Any) -> list[tuple[Any, int]]:
    """The copies of a value, or of its parts, that a compiled program holds, and of which part each is."""
    if flat is None:
        return []
    parts = [(w, p) for w, (n, p) in zip(flat.weights, flat.parts) if n == number]
    return [(w, p) for w, p in parts if not storage(w) == storage(_part(old, p)) != 0]


def _makes(run: Executable, number: int) -> Program:
    """The program that makes one value from weights alone."""
    name = run.names[number]
    if run.prologue is None:
        return replace(run.main, weights=(run.main.weights[number],), inputs=(), nodes=(), outputs=(Output(Ref(name), "shared"),))
    nodes = needed(run.prologue, [name])
    read = {name, *(r for n in nodes for r in refs((n.args, n.kwargs)))}
    return replace(
        run.prologue, weights=tuple(s for s in run.prologue.weights if s.name in read), nodes=tuple(nodes), outputs=(Output(Ref(name), "shared"),)
    )


def _written(into: Tensor, value: Tensor) -> Written:
    with torch.inference_mode():
        return Written(into, value.clone(), into.clone())


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of a value that hold anything."""
    return [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor) and t.numel()]


def _part(value: Any, number: int) -> Any:
    return value if number < 0 else value[number]


def _pair(old: Any, new: Any) -> tuple[list[Written], Any]:
    """What has to be written so that `old` is as `new`; and what has to take its place, or None."""
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)) and len(old) == len(new):
        pairs = [_pair(a, b) for a, b in zip(old, new)]
        instead = [a if i is None else i for a, (_, i) in zip(old, pairs)] if any(i is not None for _, i in pairs) else None
        return [w for written, _ in pairs for w in written], instead
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return [], None if type(old) is type(new) and old == new else new
    fits = old.layout == new.layout == torch.strided and old.shape == new.shape and old.dtype == new.dtype
    if not fits or torch._debug_has_internal_overlap(old) != 0:
        return [], new
    with torch.inference_mode():
        rows = differing(old, new)
        if rows is None:
            return [], None
        return [_written(old[rows] if old.dim() else old, new[rows] if new.dim() else new)], None


def differing(a: Tensor, b: Tensor) -> slice | None:
    """The rows of axis 0 between the first and the last in which two tensors of one shape and dtype differ by a bit; None where they do not."""
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


__all__: Sequence[str] = ["Changes", "Member", "Written", "differing"]
