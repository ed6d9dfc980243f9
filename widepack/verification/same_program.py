"""Whether members are one program up to their weights, where their own modules hold or do something else.

Comparison (a) sees wrong numbers. It cannot see an eps of 1e-6 instead of 1e-5 within rounding, nor a bound that no drawn input reaches. So every module that is
built for it is also held to the one that was captured (of members of its shapes):

1. its plain attributes (attributes.py): where they differ, that very module is captured too, and the programs are compared: ops, literals, conditions.
   Equal programs mean that the attributes are for something else (a name, a date, a dropout probability): a value is captured once, and after TRIED values of
   an attribute that make one program its further values are left alone.
2. what it does in one call (recorded.py), beside the first member of its shapes: where that differs, the member is captured too.

Only another program refuses a member; nothing is captured where nothing differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from widepack_artifacts.program import Node, Ref, refs, substitute

from ..capture.attributes import Difference, attributes_of, differences, in_words
from ..capture.capture import Captured
from ..errors import CaptureError, MemberMismatch
from ..checkpoints.alignment import bit_equal
from .op_record import Did, first_difference

TRIED = 6  # values of an attribute of which the captures gave one program: it is for something else
TRIED_LONG = 2  # the same of values longer than LONG characters: dates, paths, names of runs
LONG = 24
MOST = 6  # captures for records that differ
WAY_OUT = (
    "Members differ in weights only: give all of them one value (an argument of the factory, --model-arg), make it a buffer that is saved with each "
    "checkpoint, or build these members apart"
)


class Alike:
    """The members' modules beside what was captured.

    names, signatures: the members' and their shapes'. captured: one a shape signature. again(i, module): the capture of member i as the first was made; of this
    module where one is given, which is used up.
    """

    def __init__(
        self, names: Sequence[str], signatures: Sequence[int], captured: Sequence[Captured], again: Callable[[int, nn.Module | None], Captured]
    ) -> None:
        self.names, self.signatures, self.captured, self.again = names, signatures, captured, again
        self.differ: dict[int, tuple[Difference, ...]] = {}  # member -> attributes
        self.other: dict[int, str] = {}  # member -> how its program is another, "" where it is not
        self._harmless: dict[str, set[str]] = {}  # attribute -> values that make the captured program
        self._first: dict[int, list[Did]] = {}  # signature -> the record of its first member
        self._parted: dict[int, tuple[int, str]] = {}  # member -> where its record leaves the first member's

    def see(self, i: int, module: nn.Module) -> bool:
        """Note a fresh module of member i, before it runs. Returns: whether it was used up, so that another has to be built."""
        held = self.captured[self.signatures[i]].attributes
        found = differences(held, attributes_of(module)) if held is not None else ()
        if found:
            self.differ[i] = found
        if all(self._known(d) for d in found):
            return False
        if any(self.other.values()):  # one refuses the build
            return False
        self._capture(i, module)
        return True

    def hear(self, i: int, did: Sequence[Did] | None) -> None:
        """Note what member i's module did in the first call, the same for all; None where it could not be recorded."""
        if did is None:
            return
        first = self._first.setdefault(self.signatures[i], list(did))
        parted = first_difference(first, did)
        if parted[1]:
            self._parted[i] = parted

    def settle(self) -> None:
        """Refuse a member whose program is another. Raises: MemberMismatch that names the attributes and the literal."""
        kinds: Counter[tuple[int, str]] = Counter()
        for i, (at, what) in self._parted.items():
            kind = at, what.partition("(")[0]
            if not any(self.other.values()) and kinds[kind] < 2 and kinds.total() < MOST:
                kinds[kind] += 1
                self._capture(i, None)
        i = next((i for i, words in self.other.items() if words), -1)
        if i >= 0:
            raise MemberMismatch(f"{self._sides(i)}: {self.other[i]}. {self._where(i)}. {WAY_OUT}")

    def why(self, i: int) -> str:
        """In what member i differs from the captured one, in words for the error of comparison (a); empty where nothing tells."""
        if i not in self.other and (i in self.differ or i in self._parted):
            self._capture(i, None)
        if i in self.differ:
            return f"{self._where(i)} ({self.other[i] or 'though its own capture gives the same program'})"
        return f"{self.other[i]}. {self._where(i)}" if self.other.get(i) else ""

    def _known(self, d: Difference) -> bool:
        """Whether an attribute's value is known, or taken, to make no other program."""
        tried = self._harmless.get(d.path, set())
        return d.other in tried or len(tried) >= (TRIED_LONG if len(d.other) > LONG else TRIED)

    def _capture(self, i: int, module: nn.Module | None) -> None:
        try:
            other = self.again(i, module)
        except CaptureError as e:
            self.other[i] = f"it cannot be captured as the other was, {e}"
            return
        self.other[i] = difference(self.captured[self.signatures[i]], other)
        if not self.other[i]:
            for d in self.differ.get(i, ()):
                self._harmless.setdefault(d.path, set()).add(d.other)

    def _original(self, i: int) -> int:
        return list(self.signatures).index(self.signatures[i])

    def _sides(self, i: int) -> str:
        first = self._original(i)
        if first == i:
            return f"member {self.names[i]} is another program each time that it is built"
        return f"member {self.names[i]} is another program than member {self.names[first]}, from which the program was captured"

    def _where(self, i: int) -> str:
        """The attributes that differ: first those that have the texts of the literals that differ, without those that are known to be for something else."""
        differ = self.differ.get(i, ())
        literal = set(self.other.get(i, "").replace(",", " ").split())
        found = sorted([d for d in differ if not self._harmless.get(d.path)] or differ, key=lambda d: -len({d.one, d.other} & literal))
        first = self._original(i)
        if found and first == i:
            return f"The factory is not deterministic: {in_words(found, 'the module that was captured', 'the next one of the same checkpoint')}"
        if found:
            return f"The modules differ in {in_words(found, f'member {self.names[first]}', f'member {self.names[i]}')}"
        return "No plain attribute of the modules that differs is in it: look in the code, a global, or what the factory leaves elsewhere"


def difference(one: Captured, other: Captured, *, sizes: bool = False) -> str:
    """How the program of another member differs from the captured one, in words; empty where it does not. sizes: integers, types and conditions may differ."""
    names: dict[str, str] = {}  # of the other's nodes in the captured program: an op that changes in place may leave other ones behind
    for x, y in zip(one.program.nodes, other.program.nodes):
        y = _renamed(y, names)
        where = f" ({y.source or x.source})" if y.source or x.source else ""
        if x.op != y.op:
            return f"it runs {y.op} where the captured program runs {x.op}{where}"
        if literal := _literal(x, y, sizes):
            return f"{y.op}{where} has {literal[1]} in it, {literal[0]} in the captured program"
        if not sizes and x.out != y.out:
            return f"{y.op}{where} gives {y.out} in it, {x.out} in the captured program"
        names[y.name] = x.name
    if len(one.program.nodes) != len(other.program.nodes):
        return f"it has {len(other.program.nodes)} ops, the captured program {len(one.program.nodes)}"
    lifted, others = (literals(c) for c in (one, other))
    for name in dict.fromkeys([*lifted, *others]):
        a, b = lifted.get(name), others.get(name)
        if a is None or b is None or not bit_equal(a, b):
            where = _read_at(other if b is not None else one, name)
            return f"a tensor that the code makes of numbers{where} is {_tensor(b)} in it, {_tensor(a)} in the captured program"
    outputs = [replace(o, value=_under(o.value, names)) for o in other.program.outputs]
    if repr(list(one.program.outputs)) != repr(outputs) or repr(one.returned) != repr(other.returned):
        return f"it returns {other.returned}, the captured program {one.returned}"
    if sizes:
        return ""
    sides: list[tuple[str, Any, Any]] = [
        ("reads", [(s.source, s.type) for s in one.program.weights], [(s.source, s.type) for s in other.program.weights]),
        ("takes", one.signature, other.signature),
        ("takes", [(s.source, s.type) for s in one.program.inputs], [(s.source, s.type) for s in other.program.inputs]),
        ("holds under", sorted(str(g.expr) for g in one.guards), sorted(str(g.expr) for g in other.guards)),
        ("has dims", {d: v[:2] for d, v in one.dims.items()}, {d: v[:2] for d, v in other.dims.items()}),
    ]
    for what, mine, theirs in sides:
        if mine != theirs:
            return f"it {what} {_parts(theirs, mine)}, the captured program {_parts(mine, theirs)}"
    return ""


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    """A node that reads values under other names."""
    return replace(node, args=_under(node.args, names), kwargs=_under(node.kwargs, names)) if names else node


def _under(value: Any, names: Mapping[str, str]) -> Any:
    return substitute(value, lambda n: Ref(names.get(n, n)))


def literals(captured: Captured) -> dict[str, torch.Tensor]:
    """Tensors that the code makes of numbers, by name: they are in no attribute, and are one for all members."""
    return {n: value for n, (_, value) in captured.weights.items() if is_literal(n)}


def is_literal(name: str) -> bool:
    return name.rpartition(".")[2].startswith("lifted_tensor")


def _read_at(captured: Captured, weight: str) -> str:
    """The user's line that reads a weight first, in brackets."""
    slot = next((s.name for s in captured.program.weights if s.source == weight), "")
    source = next((n.source for n in captured.program.nodes if slot in refs((n.args, n.kwargs))), "")
    return f" ({source})" if source else ""


def _parts(mine: Any, theirs: Any) -> str:
    """What is in one alone, in words."""
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        mine = [m for m in mine if m not in theirs]
    return str(mine)[:200] if mine else "nothing of this"


def _tensor(value: torch.Tensor | None) -> str:
    return "nothing" if value is None else str(value.tolist()) if value.numel() <= 8 else f"one of shape {list(value.shape)}"


def _read(value: Any) -> str:
    return f"the value {value.name}" if isinstance(value, Ref) else repr(value)


def _literal(x: Node, y: Node, sizes: bool) -> tuple[str, str] | None:
    """The first literals in which two calls of an op differ, as text; None where they agree. Texts tell 1, 1.0 and True apart, and NaN equals itself."""

    def walk(a: Any, b: Any) -> tuple[str, str] | None:
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
            return next((found for p, q in zip(a, b) if (found := walk(p, q))), None)
        if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
            return next((found for k in a if (found := walk(a[k], b[k]))), None)
        if repr(a) == repr(b) or (sizes and type(a) is int and type(b) is int):
            return None
        if isinstance(a, Ref) or isinstance(b, Ref):
            return _read(a), _read(b)
        return repr(a), repr(b)

    return walk(list(x.args), list(y.args)) or walk(x.kwargs, y.kwargs)
