"""Matches names of modules against the patterns of an adapter, in time that is linear in the name.

PEFT takes a pattern as a regular expression for the end of a module's name, behind a dot or at the start:
`re.match(rf"(.*\\.)?({pattern})$", name)`. Python's `re` needs exponential time for some patterns, and a
pattern comes with an untrusted file. Here a pattern becomes a list of instructions, and all ways through it
are followed at once (Thompson, "Regular expression search algorithm", 1968).

Patterns have names, `.`, `|`, groups, `[...]`, `*`, `+`, `?`, `^`, `$`, `\\d`, `\\w` and escaped signs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache

LONGEST = 200
"""The most characters of a pattern."""

_PLAIN = re.compile(r"[A-Za-z0-9_.\-]*")
"""A name of fixed length, for which `re` takes linear time too. `.` stands for any character."""
_SPECIAL = frozenset("*+?{}[]()|^$\\.")
_MOST_STATES = 10_000

Test = Callable[[str], bool]


class NamePattern:
    """A pattern for the end of a module's name.

    Args:
        text: The pattern.

    Raises:
        ValueError: It has another construct of regular expressions, or is none.
    """

    def __init__(self, text: str) -> None:
        if len(text) > LONGEST:
            raise ValueError(f"it has {len(text)} characters; at most {LONGEST} are read")
        self._plain = re.compile(rf"(?:.*\.)?{text}$") if _PLAIN.fullmatch(text) else None
        self._code = _Parser(text).program()
        self._next: dict[tuple[frozenset[int], str], frozenset[int]] = {}

    def matches(self, name: str) -> bool:
        """Returns whether PEFT's expression matches a name."""
        if self._plain is not None:
            return self._plain.match(name) is not None
        states, last, line = self._closed({0}, len(name) == 0, at_start=True), len(name) - 1, True
        for place, char in enumerate(name):
            line = line and char != "\n"
            states = self._step(states, char, place == last, line and char == ".")
        return len(self._code) - 1 in states

    def _step(self, states: frozenset[int], char: str, end: bool, begins: bool) -> frozenset[int]:
        """Returns the places after one more character. begins: whether the pattern may begin after it."""
        if end or (char == "." and not begins):
            return self._after(states, char, end, begins)
        key = states, char
        if key not in self._next:
            if len(self._next) >= _MOST_STATES:
                self._next.clear()
            self._next[key] = self._after(states, char, end, begins)
        return self._next[key]

    def _after(self, states: frozenset[int], char: str, end: bool, begins: bool) -> frozenset[int]:
        places = {at + 1 for at in states if callable(test := self._code[at]) and test(char)}
        return self._closed(places | {0} if begins else places, end, at_start=False)

    def _closed(self, places: set[int], end: bool, at_start: bool) -> frozenset[int]:
        """Returns all places that can be reached without a character."""
        seen, left = set(places), list(places)
        while left:
            at = left.pop()
            step = self._code[at]
            if callable(step) or (isinstance(step, str) and step == "match"):
                continue
            if step == "^":
                targets = [at + 1] if at_start else []
            elif step == "$":
                targets = [at + 1] if end else []
            else:
                assert not isinstance(step, str)
                targets = [at + shift for shift in step]
            for target in targets:
                if target not in seen:
                    seen.add(target)
                    left.append(target)
        return frozenset(seen)


Code = list["Test | str | tuple[int, ...]"]
"""A test of one character, `^`, `$`, `match`, or how far the next places are."""


class _Parser:
    """Reads a pattern. text: the pattern."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def program(self) -> Code:
        """Returns the instructions of the whole pattern. Raises: ValueError."""
        code = self._choice()
        if self._at < len(self._text):
            raise ValueError(f"it has a ')' without '(' at {self._at}")
        return [*code, "match"]

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _choice(self) -> Code:
        code = self._sequence()
        while self._peek() == "|":
            self._at += 1
            other = self._sequence()
            code = [(1, len(code) + 2), *code, (len(other) + 1,), *other]
        return code

    def _sequence(self) -> Code:
        code: Code = []
        while self._peek() not in ("", "|", ")"):
            code += self._repeated()
        return code

    def _repeated(self) -> Code:
        begin = self._at
        code = self._atom()
        sign = self._peek()
        if sign not in ("*", "+", "?"):
            return code
        if self._text[begin] in "^$":
            raise ValueError(f"it repeats {self._text[begin]!r}")
        self._at += 1
        if self._peek() == "?":  # the shortest way first, which leads to the same names
            self._at += 1
        if self._peek() in ("*", "+", "?"):
            raise ValueError(f"it repeats a repetition at {self._at}")
        if sign == "?":
            return [(1, len(code) + 1), *code]
        again = (1, -len(code))
        if sign == "+":
            return [*code, again]
        return [(1, len(code) + 2), *code, again]

    def _atom(self) -> Code:
        char = self._peek()
        self._at += 1
        if char == "(":
            if self._text.startswith("?:", self._at):
                self._at += 2
            code = self._choice()
            if self._peek() != ")":
                raise ValueError("it has a '(' without ')'")
            self._at += 1
            return code
        if char in ("^", "$"):
            return [char]
        if char == ".":
            return [_any]
        if char == "[":
            return [self._one_of()]
        if char == "\\":
            return [self._escaped()]
        if char in _SPECIAL:
            raise ValueError(f"it has {char!r} at {self._at - 1}, which is not read")
        return [_literal(char)]

    def _escaped(self) -> Test:
        char = self._peek()
        self._at += 1
        if char == "d":
            return str.isdecimal
        if char == "w":
            return _word
        if not char or char.isalnum():
            raise ValueError(f"it has '\\{char}', which is not read")
        return _literal(char)

    def _one_of(self) -> Test:
        """Returns the test of `[...]`, in which are single characters, ranges, `\\d` and `\\w`."""
        end = self._text.find("]", self._at + 1)
        inside = self._text[self._at : end] if end > 0 else ""
        if not inside or any(c in inside for c in "[^&~|") or "--" in inside:
            raise ValueError("it has a '[...]' that is not read")
        tests: list[Test] = []
        while self._at < end:
            char = self._peek()
            self._at += 1
            if char == "\\":
                tests.append(self._escaped())
                continue
            last = char
            if self._peek() == "-" and self._at + 1 < end:
                last = self._text[self._at + 1]
                self._at += 2
            if last < char or last == "\\":
                raise ValueError(f"it has the range {char}-{last}, which is not read")
            tests.append(_between(char, last))
        if self._at != end:
            raise ValueError("it has a '[...]' that is not read")
        self._at += 1
        return lambda c: any(test(c) for test in tests)


def _any(char: str) -> bool:
    return char != "\n"


def _word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _between(first: str, last: str) -> Test:
    return lambda char: first <= char <= last


@cache
def _literal(wanted: str) -> Test:
    return lambda char: char == wanted


@lru_cache(maxsize=4096)
def name_pattern(text: str) -> NamePattern:
    """Returns a pattern, which is read once. Raises: ValueError."""
    return NamePattern(text)
