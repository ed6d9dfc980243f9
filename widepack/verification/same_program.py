"""Checks that all members are one program up to their weights, by looking at the members' own modules.

Comparison (a) finds wrong numbers. It cannot find an eps of 1e-6 instead of 1e-5, which is within rounding,
or a clamp that no drawn input reaches. Therefore each module that a build makes is also compared with the
captured one (of members with its shapes):

1. Its plain attributes (`capture/attributes.py`). If they differ, this module is captured too and the
   programs are compared: ops, literals, conditions. If the programs are equal, the attributes have another
   purpose (a name, a date, a dropout probability). Each value of an attribute is captured once. After `TRIED`
   values that give equal programs, further values of the attribute are not captured.
2. The operations of one call (`op_record.py`), compared with those of the first member of its shapes. If they
   differ, the member is captured too.

Only a different program makes the build refuse a member. Nothing is captured if nothing differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from ..capture.attributes import Difference, attributes_of, differences, in_words
from ..capture.capture import Captured
from ..errors import CaptureError, MemberMismatch
from .op_record import Operation, first_difference
from .program_difference import difference

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
