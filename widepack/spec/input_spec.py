"""Parses input specs and bounds of dims, as a user writes them. It does not import torch.

| text | meaning |
|---|---|
| `x=float32[B,3,32,32]` | the input `x`; a letter is a dynamic dim, equal letters are equal sizes |
| `ids=int64[B,T]:0..30521` | whole numbers from 0 to 30521, both included |
| `img=float32[B,3,32*H,32*W]` | sizes that are multiples of 32 |
| `T=2..512`, `T=2..` | the inclusive bounds of a dim; alone, or after an input: `ids=int64[B,T];T=2..512` |
| `encode:x=float32[B,3]` | with several entries, for `encode` alone; without a name, for all entries |

`str()` of a spec returns its text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from ..errors import UsageError

# The bounds of the values of integer dtypes; None: values of this dtype cannot have bounds.
DTYPES: dict[str, tuple[int, int] | None] = {
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool")),
    "uint8": (0, 2**8 - 1),
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
}
# Weights may have these dtypes too. Few ops take them, so inputs may not.
STORED_DTYPES = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
EXAMPLE = "The right form: x=float32[B,3,32,32], or ids=int64[B,T]:0..30521, and T=2..512 for a dim's bounds."

_OTHER_NAMES = {
    "float16": "f16 fp16 half",
    "bfloat16": "bf16",
    "float32": "f32 fp32 float",
    "float64": "f64 fp64 double",
    "int8": "i8",
    "int16": "short",
    "int32": "i32",
    "int64": "i64 int long",
    "uint8": "u8 byte",
    "bool": "boolean",
    "complex64": "complex",
}
LONG_NAMES = {short: name for name, texts in _OTHER_NAMES.items() for short in texts.split()}
"""The names of dtypes by those of other libraries."""
NAME = re.compile(
    r"(?!z?uf?\d+\Z)[A-Za-z_][A-Za-z0-9_]*\Z"
)  # u0, u1, ... are sizes that are data, in the types of programs
_ENTRY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\s*:(?=\s*[A-Za-z_][A-Za-z0-9_]*\s*=)")
_INT = re.compile(r"-?[0-9]{1,19}\Z", re.ASCII)
_LIMIT = 2**63


@dataclass(frozen=True, slots=True)
class DimExpr:
    """A dynamic dim: `factor` times the size that `letter` names."""

    letter: str
    factor: int = 1

    def __str__(self) -> str:
        return self.letter if self.factor == 1 else f"{self.factor}*{self.letter}"


Dims = tuple[int | DimExpr, ...]
Bounds = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input: its parameter's name, dtype, dims, and for integers the inclusive bounds of its values."""

    name: str
    dtype: str
    dims: Dims
    low: int | None = None
    high: int | None = None

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters of the dynamic dims, each once, in order."""
        return tuple(dict.fromkeys(d.letter for d in self.dims if isinstance(d, DimExpr)))

    def __str__(self) -> str:
        return f"{self.name}={type_text(self)}" + ("" if self.low is None else f":{self.low}..{self.high}")


def type_text(spec: InputSpec) -> str:
    """Returns the type text, as the manifest stores it: `float32[B,3,32*H,W]`."""
    return f"{spec.dtype}[{','.join(map(str, spec.dims))}]"


def parse_type(text: str) -> tuple[str, Dims]:
    """Returns the dtype and the dims of `float32[B,3,32*H]`.

    Raises: UsageError that points at the first mistake.
    """
    return _type(_TextRange(text, 0, len(text)), (*DTYPES, *STORED_DTYPES))


def batch_letter(inputs: Iterable[Dims]) -> str:
    """Returns the letter of the dim that batch classes are made of: the first one of the first input that has
    one.

    Returns "" if no input has a dynamic dim. inputs: the dims of each input, in order.
    """
    return next((d.letter for dims in inputs for d in dims if isinstance(d, DimExpr)), "")


def parse_input(text: str) -> InputSpec:
    """Reads one input spec, without bounds of dims. Raises: UsageError that points at the first mistake."""
    return _input(_TextRange(text, 0, len(text)))


def parse_inputs(
    texts: Iterable[str], entry: str = "", entries: Sequence[str] = ()
) -> tuple[list[InputSpec], dict[str, Bounds]]:
    """Reads input specs and bounds of dims, in any order. One text may have several, separated by `;` or `,`.

    entry: the entry whose inputs are returned: specs after its name, and specs without the name of an entry.
    A name applies up to the next name or the end of its text. entries: all entries.
    Returns: the inputs in order, and `{letter: (low, high or None)}` for the dims with bounds.
    Raises: UsageError that points at the first mistake.
    """
    if isinstance(texts, str):
        texts = [texts]
    inputs: dict[str, InputSpec] = {}
    bounds: dict[str, Bounds] = {}
    where: dict[str, tuple[str, _TextRange]] = {}
    everywhere: list[str] = []  # the dims of all entries
    for text in texts:
        of = ""
        for part in _TextRange(text, 0, len(text)).split(",;"):
            of, part = _of_entry(part, of, entries)
            if "[" not in part.text and ".." in part.text and ":" not in part.text:
                letter, value = _bounds(part)
                if of not in ("", entry):
                    continue
                if letter in bounds:
                    part.refuse(f"the dim {letter} has bounds already")
                bounds[letter], where[letter] = value, (of, part)
                continue
            spec = _input(part)
            everywhere += spec.letters
            if of not in ("", entry):
                continue
            if spec.name in inputs:
                part.refuse(f"the input {spec.name} is given twice")
            inputs[spec.name] = spec
    letters = list(dict.fromkeys(letter for spec in inputs.values() for letter in spec.letters))
    for letter, (of, part) in where.items():
        if letter not in letters and not of and letter in everywhere:
            del bounds[letter]
        elif letter not in letters:
            part.refuse(
                f"no input has the dim {letter}; "
                + (f"the dims are {', '.join(letters)}" if letters else "no input has a letter")
            )
    return list(inputs.values()), bounds


def _of_entry(part: _TextRange, of: str, entries: Sequence[str]) -> tuple[str, _TextRange]:
    """Returns the entry of a spec, and the spec without its name. of: the entry of the spec before it."""
    match = _ENTRY.match(part.text)
    if not match:
        return of, part
    name, rest = part.cut(match.end() - 1)
    if name.text not in entries:
        name.refuse(
            f"no entry is called {name.text!r}; "
            + (f"the entries are {', '.join(entries)}" if entries else "name it with --entry")
        )
    return name.text, rest


def kind_of_text(value: object) -> str:
    """Returns the kind of a TOML value with its article: `a list`, `a table`."""
    return {list: "a list", dict: "a table", str: "a string", bool: "true or false"}.get(
        type(value), f"of type {type(value).__name__}"
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns `, did you mean X?` if a known word is close; else ""."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]}?" if close else ""


@dataclass(frozen=True, slots=True)
class _TextRange:
    """A part of the user's text with its position, so every error can point at it."""

    whole: str
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.whole[self.start : self.end]

    def strip(self) -> _TextRange:
        text = self.text
        left = len(text) - len(text.lstrip())
        return _TextRange(
            self.whole, self.start + left, max(self.start + left, self.start + len(text.rstrip()))
        )

    def cut(self, at: int, skip: int = 1) -> tuple[_TextRange, _TextRange]:
        """Returns the part before position `at`, and the part that begins `skip` characters after it."""
        return _TextRange(self.whole, self.start, self.start + at).strip(), _TextRange(
            self.whole, self.start + at + skip, self.end
        ).strip()

    def split(self, separators: str) -> list[_TextRange]:
        """Returns the parts between separators that are outside of brackets."""
        depth, start, parts = 0, self.start, []
        for i in range(self.start, self.end):
            char = self.whole[i]
            depth += (char == "[") - (char == "]")
            if char in separators and depth <= 0:
                parts.append(_TextRange(self.whole, start, i).strip())
                start = i + 1
        return [*parts, _TextRange(self.whole, start, self.end).strip()]

    def refuse(self, why: str) -> NoReturn:
        """Raises a UsageError with carets under this part."""
        # A line break in the text would misplace the carets, so each control character becomes a space.
        shown = "".join(c if c.isprintable() else " " for c in self.whole)
        carets = " " * self.start + "^" * max(1, self.end - self.start)
        raise UsageError(f"input spec: {why}\n    {shown}\n    {carets}\n{EXAMPLE}")


def _input(part: _TextRange) -> InputSpec:
    part = part.strip()
    at = part.text.find("=")
    if at < 0:
        part.refuse("there is no NAME= in it" if part.text else "it is empty")
    name, rest = part.cut(at)
    if not NAME.match(name.text):
        name.refuse(
            f"{name.text!r} is not the name of a parameter" if name.text else "the name before = is missing"
        )
    close = rest.text.rfind("]")
    head, tail = (rest, None) if close < 0 else rest.cut(close + 1, 0)
    dtype, dims = _type(head, DTYPES)
    for dim, where in zip(dims, _dim_parts(head)):
        if dim == 0:
            where.refuse("a size must be at least 1")
    low, high = _values(tail, dtype) if tail is not None and tail.text else (None, None)
    return InputSpec(name.text, dtype, dims, low, high)


def _dim_parts(part: _TextRange) -> list[_TextRange]:
    at = part.text.find("[")
    inner = _TextRange(part.whole, part.start + at + 1, part.start + part.text.rfind("]"))
    return inner.split(",") if inner.text.strip() else []


def _type(part: _TextRange, known: Collection[str]) -> tuple[str, Dims]:
    part = part.strip()
    at = part.text.find("[")
    dtype = part.strip() if at < 0 else part.cut(at)[0]
    if dtype.text not in known:
        name = LONG_NAMES.get(dtype.text)
        hint = f", did you mean {name}?" if name else did_you_mean(dtype.text, known)
        dtype.refuse(f"unknown dtype {dtype.text!r}{hint or '; known: ' + ', '.join(known)}")
    if at < 0:
        part.refuse(f"the shape is missing; write {dtype.text}[B,3], or {dtype.text}[] for a single number")
    if not part.text.endswith("]") or part.text.count("]") > 1 or part.text.count("[") > 1:
        _TextRange(part.whole, part.start + at, part.end).refuse(
            "the shape must be one pair of brackets: [B,3,32,32]"
        )
    return dtype.text, tuple(_dim(p) for p in _dim_parts(part))


def _dim(part: _TextRange) -> int | DimExpr:
    text = part.text
    if not text:
        part.refuse("a size is missing")
    if "*" not in text:
        return DimExpr(text) if NAME.match(text) else _size(part)
    left, right = part.cut(text.find("*"))
    if NAME.match(left.text):
        left, right = right, left
    if not NAME.match(right.text):
        part.refuse(f"{text!r} is not a size; a product is a number times a letter: 32*H")
    factor = _size(left)
    if factor < 1:
        left.refuse("the factor of a dim must be at least 1")
    return DimExpr(right.text, factor)


def _size(part: _TextRange) -> int:
    if not _INT.match(part.text):
        part.refuse(f"{part.text!r} is not a size; a size is a number, a letter, or a number times a letter")
    value = int(part.text)
    if value < 0 or value >= _LIMIT:
        part.refuse(f"{value} is not a size: it must be from 0 to 2**63 - 1")
    return value


def _ends(part: _TextRange, what: str) -> tuple[_TextRange, _TextRange]:
    at = part.text.find("..")
    if at < 0:
        part.refuse(f"{what} are written low..high, both included")
    return part.cut(at, 2)


def _end(part: _TextRange) -> int:
    if not _INT.match(part.text):
        part.refuse(f"{part.text!r} is not an integer" if part.text else "a number is missing at one end")
    return int(part.text)


def _values(part: _TextRange, dtype: str) -> tuple[int, int]:
    if not part.text.startswith(":"):
        part.refuse(
            f"{part.text!r} after the shape has no meaning; the range of integers is written :0..30521"
        )
    low, high = _ends(part.cut(0)[1], "values")
    limits = DTYPES[dtype]
    if limits is None:
        part.refuse(f"a range of values is for integers; {dtype} has none")
    first, last = _end(low), _end(high)
    if first > last:
        part.refuse(f"the range is empty: {first} is over {last}")
    if first < limits[0] or last > limits[1]:
        part.refuse(f"{dtype} holds {limits[0]} to {limits[1]} only")
    return first, last


def _bounds(part: _TextRange) -> tuple[str, Bounds]:
    at = part.text.find("=")
    if at < 0:
        part.refuse("bounds without a letter")
    letter, rest = part.cut(at)
    if not NAME.match(letter.text):
        letter.refuse(f"{letter.text!r} is not the name of a dim")
    low, high = _ends(rest, "bounds")
    first, last = _size(low), _size(high) if high.text else None
    if last is not None and first >= last:
        part.refuse(
            f"{letter.text} can have one size only; write {first} in the shape"
            if first == last
            else f"the bounds are empty: {first} is over {last}"
        )
    return letter.text, (first, last)
