"""Checks that all members are one program up to their weights, by looking at the members' own modules.

Comparison (a) finds wrong numbers. It cannot find an eps of 1e-6 instead of 1e-5, which is within rounding,
or a clamp that no drawn input reaches. Therefore each module that a build makes is also compared with the
captured one (of members with its shapes):

1. Its plain attributes (`capture/attributes.py`). If they differ, this module is captured too and the
   programs are compared: ops, literals, conditions. If the programs are equal, the attributes have another
   purpose (a name, a date, a dropout probability). Each value of an attribute is captured once. After `TRIED`
   values that give equal programs, further values of the attribute are not captured.
2. The operations of one call (`Recorded`), compared with those of the first member of its shapes. If they
   differ, the member is captured too.

Only a different program makes the build refuse a member. Nothing is captured if nothing differs.

The programs of two captures are compared node by node (`difference`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from widepack_artifacts.program import Node, Ref, refs, substitute

from ..capture.attributes import Difference, attributes_of, differences, in_words
from ..capture.capture import Captured
from ..checkpoints.differences import bit_equal
from ..errors import CaptureError, MemberMismatch
from ..ir.torch_internals import aten_packet

Operation = tuple[str, tuple[str, ...]]
"""The name of an op, and the texts of its literals."""

_PLAIN = {type(None), bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format}
_RETURNS = "-> "  # before the number that an op returns to Python


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """A mode that records the ops of a module's call, in order, in `operations`: each with its literals, but
    without tensors, as torch's dispatcher sees it.

    Two members with inputs of one shape do the same, except for their weights. A number that differs is in
    one of the two records, even if it changes no output on these inputs. It may come from an attribute, a
    closure or a global. A tensor that the code makes of Python numbers counts as a literal.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            literals: tuple[str, ...] = (_numbers_text(args[0]),)
        else:
            literals = tuple(map(_text, [*args, *(kwargs or {}).items()]))
        result = func(*args, **(kwargs or {}))
        if func is aten_packet("_local_scalar_dense").default:
            literals = (*literals, f"{_RETURNS}{result!r}")  # a number that goes on in Python
        self.operations.append((str(func), literals))
        return result


def _numbers_text(value: torch.Tensor) -> str:
    """Returns the text of a tensor that is made of Python numbers; of a large one, its hash."""
    if value.numel() <= 1000:
        return repr(value.tolist())
    return f"{tuple(value.shape)} {hashlib.blake2b(repr(value.tolist()).encode()).hexdigest()[:12]}"


def _text(value: Any) -> str:
    """Returns the text of a literal. All tensors have one text, and so have all generators."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if type(value) in _PLAIN else type(value).__name__


def first_difference(one: Sequence[Operation], other: Sequence[Operation]) -> tuple[int, str]:
    """Returns the number of the first operation that differs, and a text of both; (-1, "") if the records are
    equal.

    Records without values are compared first. A value differs by member, and would hide a literal that does.
    """
    for key in (_without_values, lambda operation: operation):
        for i, (a, b) in enumerate(zip(one, other)):
            if key(a) != key(b):
                return i, f"{_operation_text(a)} and {_operation_text(b)}"
    if len(one) != len(other):
        return min(len(one), len(other)), f"{len(one)} ops and {len(other)}"
    return -1, ""


def _without_values(operation: Operation) -> Operation:
    return operation[0], tuple(text for text in operation[1] if not text.startswith(_RETURNS))


def _operation_text(operation: Operation) -> str:
    return f"{operation[0]}({', '.join(operation[1])})"[:200]


def difference(one: Captured, other: Captured, *, sizes: bool = False) -> str:
    """Returns how the program of another member differs from the captured one; "" if it does not.

    sizes: True allows integers, types and conditions to differ.
    """
    names: dict[str, str] = {}
    if words := _node_difference(one, other, names, sizes):
        return words
    if len(one.program.nodes) != len(other.program.nodes):
        return f"it has {len(other.program.nodes)} ops, the captured program {len(one.program.nodes)}"
    if words := _literal_tensor_difference(one, other):
        return words
    outputs = [replace(o, value=_under(o.value, names)) for o in other.program.outputs]
    if repr(list(one.program.outputs)) != repr(outputs) or repr(one.returned) != repr(other.returned):
        return f"it returns {other.returned}, the captured program {one.returned}"
    return "" if sizes else _interface_difference(one, other)


def _node_difference(one: Captured, other: Captured, names: dict[str, str], sizes: bool) -> str:
    """Returns how the first differing node differs.

    names: gets the names of the other's nodes in the captured program. The names may differ, because an op
    that changes its input in place may leave gaps in the numbering.
    """
    for x, y in zip(one.program.nodes, other.program.nodes):
        y = _renamed(y, names)
        where = f" ({y.source or x.source})" if y.source or x.source else ""
        if x.op != y.op:
            return f"it runs {y.op} where the captured program runs {x.op}{where}"
        if literal := _differing_literals(x, y, sizes):
            return f"{y.op}{where} has {literal[1]} in it, {literal[0]} in the captured program"
        if not sizes and x.out != y.out:
            return f"{y.op}{where} gives {y.out} in it, {x.out} in the captured program"
        names[y.name] = x.name
    return ""


def _literal_tensor_difference(one: Captured, other: Captured) -> str:
    """Returns how the first differing literal tensor differs."""
    ours, theirs = literals(one), literals(other)
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or not bit_equal(a, b):
            where = _first_read(other if b is not None else one, name)
            return (
                f"a tensor that the code makes of numbers{where} is {_tensor_text(b)} in it, "
                f"{_tensor_text(a)} in the captured program"
            )
    return ""


def _interface_difference(one: Captured, other: Captured) -> str:
    """Returns how weights, inputs, guards or dims differ."""

    def slots(which: Any) -> list[tuple[str, str]]:
        return [(s.source, s.type) for s in which]

    sides: list[tuple[str, Any, Any]] = [
        ("reads", slots(one.program.weights), slots(other.program.weights)),
        ("takes", one.signature, other.signature),
        ("takes", slots(one.program.inputs), slots(other.program.inputs)),
        ("holds under", sorted(str(g.expr) for g in one.guards), sorted(str(g.expr) for g in other.guards)),
        ("has dims", {d: v[:2] for d, v in one.dims.items()}, {d: v[:2] for d, v in other.dims.items()}),
    ]
    for what, mine, theirs in sides:
        if mine != theirs:
            return f"it {what} {_only_in(theirs, mine)}, the captured program {_only_in(mine, theirs)}"
    return ""


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Returns a node that reads values under other names."""
    return replace(node, args=_under(node.args, names), kwargs=_under(node.kwargs, names)) if names else node


def _under(value: Any, names: Mapping[str, str]) -> Any:
    return substitute(value, lambda n: Ref(names.get(n, n)))


def literals(captured: Captured) -> dict[str, torch.Tensor]:
    """Returns the literal tensors of a capture by name.

    The code makes them of Python numbers. No attribute has them, and all members share one.
    """
    return {n: value for n, (_, value) in captured.weights.items() if is_literal(n)}


def is_literal(name: str) -> bool:
    """Returns whether a weight's name is that of a literal tensor."""
    return name.rpartition(".")[2].startswith("lifted_tensor")


def _first_read(captured: Captured, weight: str) -> str:
    """Returns the user's line that reads a weight first, in brackets."""
    slot = next((s.name for s in captured.program.weights if s.source == weight), "")
    source = next((n.source for n in captured.program.nodes if slot in refs((n.args, n.kwargs))), "")
    return f" ({source})" if source else ""


def _only_in(mine: Any, theirs: Any) -> str:
    """Returns the text of what one side has and the other has not."""
    if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
        mine = [m for m in mine if m not in theirs]
    return str(mine)[:200] if mine else "nothing of this"


def _tensor_text(value: torch.Tensor | None) -> str:
    if value is None:
        return "nothing"
    return str(value.tolist()) if value.numel() <= 8 else f"one of shape {list(value.shape)}"


def _operand_text(value: Any) -> str:
    return f"the value {value.name}" if isinstance(value, Ref) else repr(value)


def _differing_literals(x: Node, y: Node, sizes: bool) -> tuple[str, str] | None:
    """Returns the texts of the first literals in which two nodes differ; None if they are equal.

    Literals are compared as text: it tells 1, 1.0 and True apart, and NaN equals NaN.
    """

    def walk(a: Any, b: Any) -> tuple[str, str] | None:
        if (
            isinstance(a, (list, tuple))
            and isinstance(b, (list, tuple))
            and type(a) is type(b)
            and len(a) == len(b)
        ):
            return next((found for p, q in zip(a, b) if (found := walk(p, q))), None)
        if isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
            return next((found for k in a if (found := walk(a[k], b[k]))), None)
        if repr(a) == repr(b) or (sizes and type(a) is int and type(b) is int):
            return None
        if isinstance(a, Ref) or isinstance(b, Ref):
            return _operand_text(a), _operand_text(b)
        return repr(a), repr(b)

    return walk(list(x.args), list(y.args)) or walk(x.kwargs, y.kwargs)


TRIED = 6  # values of an attribute that were captured and gave equal programs: further ones are not captured
TRIED_LONG = 2  # the same for values longer than LONG characters: dates, paths, names of runs
LONG = 24
MOST = 6  # captures because of operations that differ
WAY_OUT = (
    "Members differ in weights only: give all of them one value (an argument of the factory, --model-arg),"
    " make it a buffer that is saved with each checkpoint, or build these members apart"
)


class SameProgram:
    """Compares the members' modules with the captured ones.

    Args:
        names: The members' names.
        signatures: For each member the number of its shapes.
        captured: For each shape signature what was captured.
        again: Captures member i again, as the first capture was made. The second argument is a module to
            capture, which cannot be used afterwards; None makes a new one.
    """

    def __init__(
        self,
        names: Sequence[str],
        signatures: Sequence[int],
        captured: Sequence[Captured],
        again: Callable[[int, nn.Module | None], Captured],
    ) -> None:
        self.names, self.signatures, self.captured, self.again = names, signatures, captured, again
        self._attributes: dict[int, tuple[Difference, ...]] = {}  # member -> attributes that differ
        self._programs: dict[int, str] = {}  # member -> how its program differs, "" if it is equal
        self._harmless: dict[str, set[str]] = {}  # attribute -> values that give the captured program
        self._first: dict[int, list[Operation]] = {}  # signature -> operations of its first member
        self._operations: dict[int, tuple[int, str]] = {}  # member -> first operation that differs

    def note_module(self, i: int, module: nn.Module) -> bool:
        """Compares the attributes of a new module of member i, before it runs.

        Returns:
            whether the module was captured, so that the caller needs another one.
        """
        attributes = self.captured[self.signatures[i]].attributes
        found = differences(attributes, attributes_of(module)) if attributes is not None else ()
        if found:
            self._attributes[i] = found
        if all(self._harmless_value(d) for d in found):
            return False
        if self._any_differs():  # one is enough to refuse the build
            return False
        self._capture(i, module)
        return True

    def note_operations(self, i: int, operations: Sequence[Operation] | None) -> None:
        """Compares the operations of the first call of member i. None: they could not be recorded."""
        if operations is None:
            return
        first = self._first.setdefault(self.signatures[i], list(operations))
        at = first_difference(first, operations)
        if at[1]:
            self._operations[i] = at

    def check(self) -> None:
        """Refuses a member with another program.

        Raises:
            MemberMismatch, which names the attributes and the literal.
        """
        kinds: Counter[tuple[int, str]] = Counter()
        for i, (at, what) in self._operations.items():
            kind = at, what.partition("(")[0]
            if not self._any_differs() and kinds[kind] < 2 and kinds.total() < MOST:
                kinds[kind] += 1
                self._capture(i, None)
        i = next((i for i, words in self._programs.items() if words), -1)
        if i >= 0:
            raise MemberMismatch(f"{self._sides(i)}: {self._programs[i]}. {self._where(i)}. {WAY_OUT}")

    def explain(self, i: int) -> str:
        """Returns how member i differs from the captured one, for the error of comparison (a); "" if nothing
        is known.
        """
        if i not in self._programs and (i in self._attributes or i in self._operations):
            self._capture(i, None)
        if i in self._attributes:
            program = self._programs[i] or "though its own capture gives the same program"
            return f"{self._where(i)} ({program})"
        return f"{self._programs[i]}. {self._where(i)}" if self._programs.get(i) else ""

    def _any_differs(self) -> bool:
        return any(self._programs.values())

    def _harmless_value(self, d: Difference) -> bool:
        """Returns whether an attribute's value gives the captured program, as far as captures of other values
        tell.
        """
        tried = self._harmless.get(d.path, set())
        return d.other in tried or len(tried) >= (TRIED_LONG if len(d.other) > LONG else TRIED)

    def _capture(self, i: int, module: nn.Module | None) -> None:
        try:
            other = self.again(i, module)
        except CaptureError as e:
            self._programs[i] = f"it cannot be captured as the other was, {e}"
            return
        self._programs[i] = difference(self.captured[self.signatures[i]], other)
        if not self._programs[i]:
            for d in self._attributes.get(i, ()):
                self._harmless.setdefault(d.path, set()).add(d.other)

    def _captured_member(self, i: int) -> int:
        """Returns the number of the member from which the program of member i was captured."""
        return list(self.signatures).index(self.signatures[i])

    def _sides(self, i: int) -> str:
        first = self._captured_member(i)
        if first == i:
            return f"member {self.names[i]} becomes another program each time that it is built"
        return (
            f"member {self.names[i]} has another program than member {self.names[first]}, from which "
            "the program was captured"
        )

    def _where(self, i: int) -> str:
        """Returns a sentence that names the attributes that differ.

        Attributes whose values are in the literals that differ come first. Harmless attributes are left out.
        """
        differ = self._attributes.get(i, ())
        literals = set(self._programs.get(i, "").replace(",", " ").split())
        found = sorted(
            [d for d in differ if not self._harmless.get(d.path)] or differ,
            key=lambda d: -len({d.one, d.other} & literals),
        )
        first = self._captured_member(i)
        if found and first == i:
            words = in_words(found, "the module that was captured", "the next one of the same checkpoint")
            return f"The factory is not deterministic: {words}"
        if found:
            words = in_words(found, f"member {self.names[first]}", f"member {self.names[i]}")
            return f"The modules differ in {words}"
        return (
            "The plain attributes of the modules do not explain it: look at the code, at globals, and "
            "at what the factory stores elsewhere"
        )
