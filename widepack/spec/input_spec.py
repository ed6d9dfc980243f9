"""What a person types about inputs: specs, bounds of dims, model arguments, `widepack.toml`. Needs no torch.

| text | meaning |
|---|---|
| `x=float32[B,3,32,32]` | the input `x` of the member's forward; a letter is a dynamic dim, equal letters are equal sizes |
| `ids=int64[B,T]:0..30521` | whole numbers from 0 to 30521, both included |
| `img=float32[B,3,32*H,32*W]` | sizes that are multiples of 32 |
| `T=2..512`, `T=2..` | the bounds of a dim, both included; beside the inputs, or after one: `ids=int64[B,T];T=2..512` |
| `encode:x=float32[B,3]` | of several entries, for `encode` alone; what stands before no entry's name holds for every entry |

`str()` of a spec is its text again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ..errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The integers' bounds are those of their bits; None: the dtype holds no whole numbers that could be bounded.
DTYPES: dict[str, tuple[int, int] | None] = {
    "float16": None,
    "bfloat16": None,
    "float32": None,
    "float64": None,
    "complex64": None,
    "complex128": None,
    "bool": None,
    "uint8": (0, 2**8 - 1),
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}
# Weights may have these too; few ops take them, so no input does.
STORED_DTYPES = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
TOML_KEYS = ("model", "input", "key", "model_arg", "entry", "state")
EXAMPLE = "The right form: x=float32[B,3,32,32], or ids=int64[B,T]:0..30521, and T=2..512 for a dim's bounds."

_TOML_LISTS = {"input": "x=float32[B,3,32,32]", "entry": "encode", "state": "cache"}
_TOML_EXAMPLE = {"model": "pkg.mod:factory", "key": "state_dict"}
# What people type for a dtype in other places.
_SHORT = {"float": "float32", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "half": "float16", "double": "float64"}
_SHORT |= {"int": "int64", "long": "int64", "i8": "int8", "u8": "uint8", "i32": "int32", "i64": "int64", "short": "int16", "byte": "uint8"}
_SHORT |= {"boolean": "bool", "complex": "complex64"}
_NAME = re.compile(r"(?!z?uf?\d+\Z)[A-Za-z_][A-Za-z0-9_]*\Z")  # u0, u1, ... are sizes that are data, in the types of programs
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
    """One input of the member's forward: its parameter's name, dtype, dims, and for integers the range of its values, both ends included."""

    name: str
    dtype: str
    dims: Dims
    low: int | None = None
    high: int | None = None

    @property
    def letters(self) -> tuple[str, ...]:
        """The dynamic dims, each once, in order."""
        return tuple(dict.fromkeys(d.letter for d in self.dims if isinstance(d, DimExpr)))

    def __str__(self) -> str:
        return f"{self.name}={type_text(self)}" + ("" if self.low is None else f":{self.low}..{self.high}")


def type_text(spec: InputSpec) -> str:
    """The type alone, as the manifest holds it: `float32[B,3,32*H,W]`."""
    return f"{spec.dtype}[{','.join(map(str, spec.dims))}]"


def parse_type(text: str) -> tuple[str, Dims]:
    """Read `float32[B,3,32*H]`; returns dtype and dims. Raises: UsageError that points at the first mistake."""
    return _type(_Part(text, 0, len(text)), (*DTYPES, *STORED_DTYPES))


def parse_input(text: str) -> InputSpec:
    """Read one input spec, without bounds of dims. Raises: UsageError that points at the first mistake."""
    return _input(_Part(text, 0, len(text)))


def parse_inputs(texts: Iterable[str], entry: str = "", entries: Sequence[str] = ()) -> tuple[list[InputSpec], dict[str, Bounds]]:
    """Read input specs and bounds of dims, in any order; one text may hold several, with `;` or `,` between them.

    entry: whose inputs are wanted, of these entries: those before which it stands, and those before which none does. A name holds up to the next one or
    the end of its text.
    Returns: the inputs in order, and `{letter: (low, high or None)}` for the dims that have bounds.
    Raises: UsageError that points at the first mistake, or names an input given twice, or bounds of a dim that no input has.
    """
    if isinstance(texts, str):
        texts = [texts]
    inputs: dict[str, InputSpec] = {}
    bounds: dict[str, Bounds] = {}
    where: dict[str, tuple[str, _Part]] = {}
    everywhere: list[str] = []  # the dims of all entries
    for text in texts:
        of = ""
        for part in _Part(text, 0, len(text)).split(",;"):
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
            part.refuse(f"no input has the dim {letter}; " + (f"the dims are {', '.join(letters)}" if letters else "no input has a letter"))
    return list(inputs.values()), bounds


def _of_entry(part: _Part, of: str, entries: Sequence[str]) -> tuple[str, _Part]:
    """The entry's name before a spec, if there is one, and the spec without it; else the name that holds already."""
    found = _ENTRY.match(part.text)
    if not found:
        return of, part
    name, rest = part.cut(found.end() - 1)
    if name.text not in entries:
        name.refuse(f"no entry is called {name.text!r}; " + (f"the entries are {', '.join(entries)}" if entries else "name it with --entry"))
    return name.text, rest


def parse_model_args(items: Sequence[str]) -> dict[str, Any]:
    """Read `width=64`, `name=small`, `sizes=[1,2]`: a value that is JSON is that value, any other a string. Raises: UsageError."""
    found: dict[str, Any] = {}
    for item in items:
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals or not _NAME.match(name):
            raise UsageError(f"model argument {item!r}: write NAME=VALUE, for example width=64")
        if name in found:
            raise UsageError(f"model argument {name} is given twice: {found[name]!r} and {value!r}")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


_SIZES = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]i?)?B?\Z", re.ASCII | re.IGNORECASE)


def parse_size(size: int | str) -> int:
    """Bytes of `5GB`, `500 MB`, `2GiB`, or a number. Raises: UsageError."""
    found = _SIZES.match(size.strip()) if isinstance(size, str) else None
    number = 0.0 if found is None else float(found[1]) * _unit(found[2] or "")
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    if not 1 <= number < 2**63:
        raise UsageError(f"size {size!r}: write bytes as a number from 1, or with a unit, for example 5GB or 500MB")
    return int(number)


def _unit(name: str) -> int:
    power = "kmgt".find(name[:1].lower()) + 1 if name else 0
    return int((1024 if name.endswith(("i", "I")) else 1000) ** power)


def read_toml(folder: str | Path) -> dict[str, Any]:
    """Read `widepack.toml` of a folder: `model`, `input`, `entry` and `state` (always returned as lists), `key`, `model_arg` (a table).

    Returns: the keys that it has; nothing where there is no such file. Raises: UsageError, for an unknown key or a value of another type too.
    """
    path = Path(folder) / "widepack.toml"
    try:
        found = tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    for key in found:
        if key not in TOML_KEYS:
            raise UsageError(f"{path}: unknown key {key!r}{_nearest(key, TOML_KEYS) or '.'} Known keys: {', '.join(TOML_KEYS)}")
    for key in ("model", "key"):
        if not isinstance(found.get(key, ""), str):
            raise UsageError(f'{path}: {key} is {_kind(found[key])}; it must be a string, for example {key} = "{_TOML_EXAMPLE[key]}"')
    for key, text in _TOML_LISTS.items():
        if key in found:
            rows = [found[key]] if isinstance(found[key], str) else found[key]
            if not isinstance(rows, list) or not all(isinstance(row, str) for row in rows):
                raise UsageError(f'{path}: {key} must be a string or a list of strings, for example {key} = ["{text}"]')
            found[key] = rows
    if not isinstance(found.get("model_arg", {}), dict):
        raise UsageError(f"{path}: model_arg is {_kind(found['model_arg'])}; it must be a table: [model_arg], then width = 64")
    return dict(found)


def _kind(value: object) -> str:
    return {list: "a list", dict: "a table", str: "a string", bool: "true or false"}.get(type(value), f"of type {type(value).__name__}")


def _nearest(word: str, known: Iterable[str]) -> str:
    close = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]}?" if close else ""


@dataclass(frozen=True, slots=True)
class _Part:
    """A stretch of what was typed, which knows where it stands, so that every error can point at it."""

    whole: str
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.whole[self.start : self.end]

    def strip(self) -> _Part:
        text = self.text
        left = len(text) - len(text.lstrip())
        return _Part(self.whole, self.start + left, max(self.start + left, self.start + len(text.rstrip())))

    def cut(self, at: int, skip: int = 1) -> tuple[_Part, _Part]:
        """The part before position `at` and the one after it, `skip` characters left out."""
        return _Part(self.whole, self.start, self.start + at).strip(), _Part(self.whole, self.start + at + skip, self.end).strip()

    def split(self, separators: str) -> list[_Part]:
        """The parts between the separators that stand outside of brackets."""
        depth, start, parts = 0, self.start, []
        for i in range(self.start, self.end):
            char = self.whole[i]
            depth += (char == "[") - (char == "]")
            if char in separators and depth <= 0:
                parts.append(_Part(self.whole, start, i).strip())
                start = i + 1
        return [*parts, _Part(self.whole, start, self.end).strip()]

    def refuse(self, why: str) -> NoReturn:
        # A caret under a line that breaks would point at nothing: control characters become spaces, one for one.
        shown = "".join(c if c.isprintable() else " " for c in self.whole)
        raise UsageError(f"input spec: {why}\n    {shown}\n    {' ' * self.start}{'^' * max(1, self.end - self.start)}\n{EXAMPLE}")


def _input(part: _Part) -> InputSpec:
    part = part.strip()
    at = part.text.find("=")
    if at < 0:
        part.refuse("there is no NAME= in it" if part.text else "it is empty")
    name, rest = part.cut(at)
    if not _NAME.match(name.text):
        name.refuse(f"{name.text!r} is no parameter's name" if name.text else "the name before = is missing")
    close = rest.text.rfind("]")
    head, tail = (rest, None) if close < 0 else rest.cut(close + 1, 0)
    dtype, dims = _type(head, DTYPES)
    for dim, where in zip(dims, _dim_parts(head)):
        if dim == 0:
            where.refuse("a size must be at least 1")
    low, high = _values(tail, dtype) if tail is not None and tail.text else (None, None)
    return InputSpec(name.text, dtype, dims, low, high)


def _dim_parts(part: _Part) -> list[_Part]:
    at = part.text.find("[")
    inner = _Part(part.whole, part.start + at + 1, part.start + part.text.rfind("]"))
    return inner.split(",") if inner.text.strip() else []


def _type(part: _Part, known: Collection[str]) -> tuple[str, Dims]:
    part = part.strip()
    at = part.text.find("[")
    dtype = part.strip() if at < 0 else part.cut(at)[0]
    if dtype.text not in known:
        short = _SHORT.get(dtype.text)
        hint = f", did you mean {short}?" if short else _nearest(dtype.text, known)
        dtype.refuse(f"unknown dtype {dtype.text!r}{hint or '; known: ' + ', '.join(known)}")
    if at < 0:
        part.refuse(f"the shape is missing; write {dtype.text}[B,3], or {dtype.text}[] for a single number")
    if not part.text.endswith("]") or part.text.count("]") > 1 or part.text.count("[") > 1:
        _Part(part.whole, part.start + at, part.end).refuse("the shape must be one pair of brackets: [B,3,32,32]")
    return dtype.text, tuple(_dim(p) for p in _dim_parts(part))


def _dim(part: _Part) -> int | DimExpr:
    text = part.text
    if not text:
        part.refuse("a size is missing")
    if "*" not in text:
        return DimExpr(text) if _NAME.match(text) else _size(part)
    left, right = part.cut(text.find("*"))
    if _NAME.match(left.text):
        left, right = right, left
    if not _NAME.match(right.text):
        part.refuse(f"{text!r} is no size; a product is a number times a letter: 32*H")
    factor = _size(left)
    if factor < 1:
        left.refuse("the factor of a dim must be at least 1")
    return DimExpr(right.text, factor)


def _size(part: _Part) -> int:
    if not _INT.match(part.text):
        part.refuse(f"{part.text!r} is no size; a size is a number, a letter, or a number times a letter")
    value = int(part.text)
    if value < 0 or value >= _LIMIT:
        part.refuse(f"{value} is no size: it must be from 0 to 2**63 - 1")
    return value


def _ends(part: _Part, what: str) -> tuple[_Part, _Part]:
    at = part.text.find("..")
    if at < 0:
        part.refuse(f"{what} are written low..high, both included")
    return part.cut(at, 2)


def _end(part: _Part) -> int:
    if not _INT.match(part.text):
        part.refuse(f"{part.text!r} is no whole number" if part.text else "a number is missing at one end")
    return int(part.text)


def _values(part: _Part, dtype: str) -> tuple[int, int]:
    if not part.text.startswith(":"):
        part.refuse(f"{part.text!r} after the shape means nothing; the range of integers is written :0..30521")
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


def _bounds(part: _Part) -> tuple[str, Bounds]:
    at = part.text.find("=")
    if at < 0:
        part.refuse("bounds without a letter")
    letter, rest = part.cut(at)
    if not _NAME.match(letter.text):
        letter.refuse(f"{letter.text!r} is no dim's name")
    low, high = _ends(rest, "bounds")
    first, last = _size(low), _size(high) if high.text else None
    if last is not None and first >= last:
        part.refuse(
            f"{letter.text} can have one size only; write {first} in the shape" if first == last else f"the bounds are empty: {first} is over {last}"
        )
    return letter.text, (first, last)
