"""The manifest: what an artifact is, as frozen dataclasses <-> `manifest.json`. No torch is imported.

| class | what it says |
|---|---|
| `Manifest` | format version, members, weights, entries, probe, records, and name, size and SHA-256 of every other file |
| `Member` | a checkpoint: its name, where it came from, its hash |
| `Weight` | a row of the weights table: kind, dtype, shape of one member, role |
| `Entry` | a named program: inputs, calling convention, outputs, dims, guards, programs |
| `Input`, `Parameter`, `OutputLeaf` | a tensor leaf of a call; a parameter of the forward; a tensor leaf of the result |
| `State` | an input and an output of an entry that the caller carries from call to call |
| `Dim`, `Guard` | bounds of a named dim; a condition under which the programs hold |
| `WideProgram` | a wide program for one kind of device and one pattern, with its plan |
| `File` | size and hash of a file |

`from_json` takes exactly what `to_json` makes: unknown keys, other types and values out of bounds are refused with what was expected.
The rules are in FORMAT.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from . import guards as guard_forms
from . import strict_json
from . import tree
from .errors import ArtifactError

FORMAT = "widepack.artifact"
VERSION = (1, 1)
"""The newest that this package reads; it writes the lowest that an artifact needs."""
MAX_BYTES = 256 * 2**20
MAX_MEMBERS = 2**16
MAX_RANK = 64
KINDS = ("shared", "stacked", "ragged")
ROLES = ("parameter", "buffer", "constant")
PATTERNS = ("shared", "each")
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip  # a line a size
"""The dtypes that a weight may have, and the bytes of one element."""

_FILE_NAME = re.compile(r"(?:programs/)?[A-Za-z0-9_][A-Za-z0-9_.@-]*-([0-9a-f]{16})\.[a-z0-9]+\Z")
_DIM_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_TYPE = re.compile(r"([a-z][a-z0-9_]*)\[(.*)\]\Z")
_SIZE = re.compile(r"(?:[0-9]{1,19}|(?:[1-9][0-9]{0,17}\*)?([A-Za-z_][A-Za-z0-9_]*))\Z")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what could drive a terminal; tab and newline stay
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_PART = re.compile(r"(?:0|[1-9][0-9]{0,9})\Z")
_TEXT = 20_000  # characters
_NAME = 1_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Member:
    """name: unique in the artifact. source: the checkpoint as it was given. bytes, sha256: of that file."""

    name: str
    source: str
    sha256: str
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "source": self.source, "sha256": self.sha256, "bytes": self.bytes}

    @classmethod
    def from_json(cls, data: Any, where: str = "a member") -> Member:
        d = _object(data, where, ("name", "source", "sha256", "bytes"))
        return cls(
            _name(d["name"], f"{where}: name"),
            _text(d["source"], f"{where}: source"),
            _hash(d["sha256"], where),
            _count(d["bytes"], f"{where}: bytes"),
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """A row of the weights table.

    shape: of one member, without the member axis; for a ragged weight a list of N shapes of one rank. aliases: other names of the same value
    (tied weights). A shared or stacked weight is the tensor `name` of the weights files, `[*shape]` or `[N, *shape]`; a ragged one is N tensors,
    `name@0` to `name@N-1`.
    """

    name: str
    kind: str
    dtype: str
    shape: list[Any]
    role: str
    aliases: list[str] = field(default_factory=list)

    def of(self, member: int) -> list[int]:
        """The shape in one member."""
        return list(self.shape[member]) if self.kind == "ragged" else list(self.shape)

    def tensors(self, members: int) -> dict[str, list[int]]:
        """The tensors of the weights files that hold this weight, with their shapes."""
        return dict(self.each(members))

    def each(self, members: int) -> Iterator[tuple[str, list[int]]]:
        """The same one after the other: names are as long as a stranger likes, and there may be millions."""
        if self.kind == "ragged":
            yield from ((f"{self.name}@{i}", self.of(i)) for i in range(members))
        else:
            yield self.name, [members, *self.shape] if self.kind == "stacked" else list(self.shape)

    def bytes(self, members: int) -> int:
        """Its bytes on disk."""
        if self.kind == "ragged":
            count = sum(math.prod(shape) for shape in self.shape)
        else:
            count = math.prod(self.shape) * (members if self.kind == "stacked" else 1)
        return int(count) * ITEM_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "dtype": self.dtype, "shape": self.shape, "role": self.role, "aliases": self.aliases}

    @classmethod
    def from_json(cls, data: Any, members: int, where: str = "a weight") -> Weight:
        d = _object(data, where, ("name", "kind", "dtype", "shape", "role", "aliases"))
        name = _name(d["name"], f"{where}: name")
        where = f"weight {name[:200]}"
        kind = _one_of(d["kind"], KINDS, f"{where}: kind")
        dtype = _one_of(d["dtype"], tuple(ITEM_BYTES), f"{where}: dtype")
        if kind == "ragged":
            shape: list[Any] = _list(d["shape"], f"{where}: shape", _shape)
            if len(shape) != members or len({len(s) for s in shape}) != 1:
                raise _refuse(f"{where}: a ragged weight has one shape for each of the {members} members, all of one rank; got {str(shape)[:80]}")
        else:
            shape = _shape(d["shape"], f"{where}: shape")
        row = cls(name, kind, dtype, shape, _one_of(d["role"], ROLES, f"{where}: role"), _list(d["aliases"], f"{where}: aliases", _name))
        if row.bytes(members) >= 2**63:
            raise _refuse(f"{where}: {dtype}{d['shape']} for {members} members is past 64 bits of bytes")
        return row


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor leaf of a call. type: `float32[B,3,32*H,W]`. low, high: inclusive bounds of an integer input's values."""

    name: str
    type: str
    low: int | None = None
    high: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "type": self.type, "low": self.low, "high": self.high}

    @classmethod
    def from_json(cls, data: Any, dims: Mapping[str, Dim], where: str = "an input") -> Input:
        d = _object(data, where, ("name", "type", "low", "high"))
        low, high = (_maybe_int(d[k], f"{where}: {k}") for k in ("low", "high"))
        if low is not None and high is not None and low > high:
            raise _refuse(f"{where}: the bounds {low}..{high} hold no value")
        return cls(_name(d["name"], f"{where}: name"), _input_type(d["type"], dims, f"{where}: type"), low, high)


class Parameter(NamedTuple):
    """A parameter of the forward. kind: positional or keyword. tree: over the input leaves. default: whether it may be left out."""

    name: str
    kind: str
    tree: tree.Tree
    default: bool = False


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """A tensor leaf of the result. type: of one member; kind: what the wide program gives."""

    name: str
    type: str
    kind: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "type": self.type, "kind": self.kind}

    @classmethod
    def from_json(cls, data: Any, where: str = "an output") -> OutputLeaf:
        d = _object(data, where, ("name", "type", "kind"))
        text = _text(d["type"], f"{where}: type")
        if not _TYPE.match(text):
            raise _refuse(f"{where}: {text[:60]!r} is no type such as float32[B,10]")
        return cls(_text(d["name"], f"{where}: name", _NAME), text, _one_of(d["kind"], KINDS, f"{where}: kind"))


@dataclass(frozen=True, slots=True)
class State:
    """A value that the caller carries: one a member in every pattern.

    input, output: numbers of its leaves; the input's name is the state's. initial: the weight that it begins as, or "" for zeros.
    """

    input: int
    output: int
    initial: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"input": self.input, "output": self.output, "initial": self.initial}

    @classmethod
    def from_json(cls, data: Any, where: str = "a state") -> State:
        d = _object(data, where, ("input", "output", "initial"))
        return cls(_count(d["input"], f"{where}: input"), _count(d["output"], f"{where}: output"), _text(d["initial"], f"{where}: initial", _NAME))


@dataclass(frozen=True, slots=True)
class Dim:
    """Bounds of a named dim, inclusive. source: the user's line that a bound comes from, or empty. example: a size at which all guards hold."""

    min: int
    max: int | None = None
    source: str = ""
    example: int = 2

    def to_json(self) -> dict[str, Any]:
        return {"min": self.min, "max": self.max, "source": self.source, "example": self.example}

    @classmethod
    def from_json(cls, data: Any, where: str = "a dim") -> Dim:
        d = _object(data, where, ("min", "max", "source", "example"))
        return cls(*_range([d["min"], d["max"]], where), _text(d["source"], f"{where}: source"), _count(d["example"], f"{where}: example"))


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition over named dims that every call is held to, and the user's line that it comes from."""

    expr: guard_forms.Expr
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"expr": self.expr, "source": self.source}

    @classmethod
    def from_json(cls, data: Any, dims: Mapping[str, Dim], where: str = "a guard") -> Guard:
        d = _object(data, where, ("expr", "source"))
        guard_forms.check(d["expr"], dims)
        return cls(d["expr"], _text(d["source"], f"{where}: source"))


@dataclass(frozen=True, slots=True)
class WideProgram:
    """A wide program. batch: the sizes of the batch that its plan is for, (least, most or None), counted at the example's sizes of the other dims. plan: as `widepack.planning.plan.Plan` writes it."""

    device: str
    pattern: str
    file: str
    batch: tuple[int, int | None] = (1, None)
    plan: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"device": self.device, "pattern": self.pattern, "file": self.file, "batch": list(self.batch), "plan": self.plan}

    @classmethod
    def from_json(cls, data: Any, files: Mapping[str, File], where: str = "a wide program") -> WideProgram:
        d = _object(data, where, ("device", "pattern", "file", "batch", "plan"))
        device = _text(d["device"], f"{where}: device", 32)
        if not re.fullmatch(r"[a-z]+", device):
            raise _refuse(f"{where}: {device[:40]!r} is no kind of device such as cpu or cuda")
        pattern, file = _one_of(d["pattern"], PATTERNS, f"{where}: pattern"), _named_file(d["file"], files, f"{where}: file")
        return cls(device, pattern, file, _range(d["batch"], f"{where}: batch"), _free(d["plan"], f"{where}: plan"))


@dataclass(frozen=True, slots=True)
class Entry:
    """A named program over the artifact's weights.

    inputs: tensor leaves in order. signature: the forward's parameters. outputs, result: the result's leaves and their tree. fixed: sentences about
    sizes that the member's code fixes. member: files of the member programs, one a shape signature; signatures: for each member the index into
    `member`. wide: the wide programs. pt2: pattern -> file of the torch.export program. state: what the caller carries; none in 1.0.
    """

    inputs: tuple[Input, ...]
    signature: list[Parameter]
    outputs: tuple[OutputLeaf, ...]
    result: tree.Tree
    dims: dict[str, Dim]
    guards: tuple[Guard, ...]
    fixed: list[str]
    member: list[str]
    signatures: list[int]
    wide: tuple[WideProgram, ...]
    pt2: dict[str, str] = field(default_factory=dict)
    state: tuple[State, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": [i.to_json() for i in self.inputs],
            "signature": [list(p) for p in self.signature],
            "outputs": [o.to_json() for o in self.outputs],
            "result": self.result,
            "dims": {n: d.to_json() for n, d in self.dims.items()},
            "guards": [g.to_json() for g in self.guards],
            "fixed": self.fixed,
            "member": self.member,
            "signatures": self.signatures,
            "wide": [w.to_json() for w in self.wide],
            "pt2": self.pt2,
            **({"state": [s.to_json() for s in self.state]} if self.state else {}),
        }

    @classmethod
    def from_json(cls, data: Any, members: int, files: Mapping[str, File], where: str = "an entry", version: tuple[int, int] = VERSION) -> Entry:
        keys = ("inputs", "signature", "outputs", "result", "dims", "guards", "fixed", "member", "signatures", "wide", "pt2")
        carries = version >= (1, 1) and isinstance(data, dict) and "state" in data
        d = _object(data, where, (*keys, "state") if carries else keys)
        dims = _map(d["dims"], f"{where}: dims", Dim.from_json)
        for name in dims:
            if not _DIM_NAME.match(name):
                raise _refuse(f"{where}: dims: {name[:80]!r} is no name of a dim; letters, digits and _ are")
        entry = cls(
            inputs=tuple(_list(d["inputs"], f"{where}: inputs", lambda v, w: Input.from_json(v, dims, w))),
            signature=_list(d["signature"], f"{where}: signature", _parameter),
            outputs=tuple(_list(d["outputs"], f"{where}: outputs", OutputLeaf.from_json)),
            result=d["result"],
            dims=dims,
            guards=tuple(_list(d["guards"], f"{where}: guards", lambda v, w: Guard.from_json(v, dims, w))),
            fixed=_list(d["fixed"], f"{where}: fixed", _text),
            member=_list(d["member"], f"{where}: member", lambda v, w: _named_file(v, files, w)),
            signatures=_list(d["signatures"], f"{where}: signatures", _count),
            wide=tuple(_list(d["wide"], f"{where}: wide", lambda v, w: WideProgram.from_json(v, files, w))),
            pt2=_map(d["pt2"], f"{where}: pt2", lambda v, w: _named_file(v, files, w)),
            state=tuple(_list(d["state"], f"{where}: state", State.from_json)) if carries else (),
        )
        entry._check(members, where)
        return entry

    def _check(self, members: int, where: str) -> None:
        """What holds between the fields: every leaf stands in its tree, every member has a program."""
        for what, names in (("inputs", [i.name for i in self.inputs]), ("signature", [p.name for p in self.signature])):
            _unique(names, f"{where}: {what}")
        found: list[int] = []
        carried = self._check_state(where)
        for parameter in self.signature:
            tree.check(parameter.tree, len(self.inputs))
            leaves = tree.leaves(parameter.tree)
            if set(leaves) & carried and not set(leaves) <= carried:
                raise _refuse(f"{where}: the parameter {parameter.name[:80]} is a state in part; a parameter is one or none")
            found += leaves
        if sorted([*found, *(carried - set(found))]) != list(range(len(self.inputs))):
            raise _refuse(f"{where}: the signature must hold each of the {len(self.inputs)} input leaves once; it holds {sorted(found)[:20]}")
        tree.check(self.result, len(self.outputs))
        if sorted([*set(tree.leaves(self.result)), *(s.output for s in self.state)]) != list(range(len(self.outputs))):
            raise _refuse(f"{where}: the result's tree must hold all {len(self.outputs)} output leaves{' but those of states' if self.state else ''}")
        if not self.member or len(self.signatures) != members or max(self.signatures) >= len(self.member):
            raise _refuse(f"{where}: signatures must name, for each of the {members} members, one of the {len(self.member)} member programs")
        for pattern in self.pt2:
            _one_of(pattern, PATTERNS, f"{where}: pt2")

    def _check_state(self, where: str) -> set[int]:
        """The numbers of the inputs that are states, once they are held to the inputs and outputs."""
        for s in self.state:
            if s.input >= len(self.inputs) or s.output >= len(self.outputs):
                raise _refuse(f"{where}: a state names input {s.input} and output {s.output} of {len(self.inputs)} and {len(self.outputs)}")
            one, other = self.inputs[s.input], self.outputs[s.output]
            if one.type != other.type:
                raise _refuse(f"{where}: the state {one.name[:80]} is {one.type[:80]} and comes out as {other.type[:80]}; a state keeps its type")
        carried = {s.input for s in self.state}
        if len(carried) < len(self.state):
            raise _refuse(f"{where}: state: an input stands twice")
        return carried

    @property
    def states(self) -> list[str]:
        """The names of what the caller carries."""
        return [self.inputs[s.input].name for s in self.state]


@dataclass(frozen=True, slots=True)
class File:
    """bytes: its size. sha256: hex of its content."""

    bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, data: Any, where: str = "a file") -> File:
        d = _object(data, where, ("bytes", "sha256"))
        return cls(_count(d["bytes"], f"{where}: bytes"), _hash(d["sha256"], where))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an artifact is.

    files: every other file of the folder. digest: `sha256:<hex>` over the canonical JSON without the key `digest`; empty until `sealed`.
    verification and provenance are records for people and tools; no reader acts on them. state: the names of all entries' states; none in 1.0.
    """

    version: tuple[int, int] = (1, 0)
    members: tuple[Member, ...]
    weights: tuple[Weight, ...]
    entries: dict[str, Entry]
    probe: str = ""
    verification: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    state: list[str] = field(default_factory=list)
    files: dict[str, File] = field(default_factory=dict)
    digest: str = ""

    @property
    def entry(self) -> str:
        """The entry that is meant where none is named: `forward`, or the first where there is none."""
        return "forward" if "forward" in self.entries else next(iter(self.entries))

    def sealed(self, files: Mapping[str, File]) -> Manifest:
        """This manifest over these files, with its digest."""
        states = _states(self.entries)
        version = max(self.version, (1, 1)) if states else self.version
        filled = replace(self, version=version, state=states or self.state, files=dict(sorted(files.items())), digest="")
        body = filled.to_json()
        del body["digest"]
        return replace(filled, digest=strict_json.digest(body))

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": list(self.version),
            "members": [m.to_json() for m in self.members],
            "weights": [w.to_json() for w in self.weights],
            "entries": {n: e.to_json() for n, e in self.entries.items()},
            "probe": self.probe,
            "verification": self.verification,
            "provenance": self.provenance,
            "state": self.state,
            "files": {n: f.to_json() for n, f in self.files.items()},
            "digest": self.digest,
        }

    def to_bytes(self) -> bytes:
        """The content of `manifest.json`: the canonical JSON and a newline."""
        return strict_json.canonical(self.to_json()) + b"\n"

    @classmethod
    def from_json(cls, data: Any) -> Manifest:
        """Read and check a manifest: format and version, then the digest, then every field.

        Raises: ArtifactError for whatever is not exactly a manifest of this version.
        """
        _version(data)
        keys = ("format", "version", "members", "weights", "entries", "probe", "verification", "provenance", "state", "files", "digest")
        d = _object(data, "the top level", keys)
        if not isinstance(d["digest"], str) or not _DIGEST.match(d["digest"]):
            raise _refuse(f"digest: expected sha256: and 64 hex digits, got {str(d['digest'])[:80]!r}")
        actual = strict_json.digest({k: v for k, v in d.items() if k != "digest"})
        if actual != d["digest"]:
            raise _refuse(
                f"it says that its digest is {d['digest']}, its content has {actual}; "
                "it was changed or damaged after it was written: copy or build the artifact again"
            )
        files = _map(d["files"], "files", File.from_json)
        for name, file in files.items():
            _file_name(name, file)
        members = tuple(_list(d["members"], "members", Member.from_json))
        if not 1 <= len(members) <= MAX_MEMBERS:
            raise _refuse(f"{len(members)} members; an artifact has 1 to {MAX_MEMBERS}")
        _unique([m.name for m in members], "members")
        count = len(members)
        weights = tuple(_list(d["weights"], "weights", lambda v, w: Weight.from_json(v, count, w)))
        _unique([name for w in weights for name in (w.name, *w.aliases)], "weights")
        _unique_parts(weights, count)
        version: tuple[int, int] = (d["version"][0], d["version"][1])
        entries = _map(d["entries"], "entries", lambda v, w: Entry.from_json(v, count, files, w, version))
        for name in entries:
            if not _DIM_NAME.match(name):
                raise _refuse(f"entries: {name[:80]!r} is no name of an entry; letters, digits and _ are")
        if not entries:
            raise _refuse("entries: an artifact has at least one")
        _initials(entries, weights)
        if version >= (1, 1) and d["state"] != (named := _states(entries)):
            raise _refuse(f"state: the entries carry {guard_forms.some(named) or 'nothing'}; got {str(d['state'])[:80]}")
        probe = d["probe"] if d["probe"] == "" else _named_file(d["probe"], files, "probe")
        return cls(
            version=version,
            members=members,
            weights=weights,
            entries=entries,
            probe=probe,
            verification=_free(d["verification"], "verification"),
            provenance=_free(d["provenance"], "provenance"),
            state=_list(d["state"], "state", _name),
            files=files,
            digest=d["digest"],
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Read `manifest.json`. Raises: ArtifactError."""
        return cls.from_json(strict_json.parse(data, "manifest"))


def _states(entries: Mapping[str, Entry]) -> list[str]:
    """The names of all entries' states, each once, entries by name."""
    return list(dict.fromkeys(name for _, entry in sorted(entries.items()) for name in entry.states))


def _initials(entries: Mapping[str, Entry], weights: tuple[Weight, ...]) -> None:
    """Every state begins as a weight of its own type, or as zeros."""
    table = {w.name: w for w in weights}
    for name, entry in entries.items():
        for state in entry.state:
            if not state.initial:
                continue
            row, one = table.get(state.initial), entry.inputs[state.input]
            if row is None or row.kind == "ragged" or f"{row.dtype}[{','.join(map(str, row.shape))}]" != one.type:
                has = "is not in the table" if row is None else f"is {row.kind} {row.dtype}{row.shape}"
                raise _refuse(
                    f"entries: {name}: the state {one.name[:80]} is {one.type[:80]} and begins as the weight {state.initial[:80]!r}, which {has}"
                )


def _refuse(message: str) -> ArtifactError:
    return ArtifactError(f"manifest: {message}")


def _version(data: Any) -> None:
    """The version comes first: what a later one has changed must not be read as damage."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _refuse(f'this is no widepack manifest: the key "format" should be {FORMAT!r}')
    found = data.get("version")
    if not (isinstance(found, list) and len(found) == 2 and all(type(v) is int and 0 <= v < 2**31 for v in found)):
        raise _refuse(f"version: expected two numbers such as [1, 0], got {str(found)[:40]}")
    if tuple(found) > VERSION:
        raise _refuse(f"format {found[0]}.{found[1]} is newer than {VERSION[0]}.{VERSION[1]}, the newest that this widepack reads; update widepack")
    if tuple(found) < (1, 0):
        raise _refuse(f"format {found[0]}.{found[1]} was never published; build the artifact again")


def _object(value: Any, where: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(f"{where}: expected an object with {', '.join(keys)}; got {str(value)[:60]}")
    unknown, missing = sorted(set(value) - set(keys)), [k for k in keys if k not in value]
    if unknown:
        raise _refuse(f"{where}: unknown {', '.join(u[:40] for u in unknown[:5])}; known: {', '.join(keys)}")
    if missing:
        raise _refuse(f"{where}: {', '.join(missing)} missing")
    return value


def _list(value: Any, where: str, item: Callable[[Any, str], T]) -> list[T]:
    if not isinstance(value, list):
        raise _refuse(f"{where}: expected a list, got {str(value)[:60]}")
    return [item(v, f"{where}[{i}]") for i, v in enumerate(value)]


def _map(value: Any, where: str, item: Callable[[Any, str], T]) -> dict[str, T]:
    if not isinstance(value, dict):
        raise _refuse(f"{where}: expected an object, got {str(value)[:60]}")
    return {k: item(v, f"{where}: {k[:80]}") for k, v in value.items()}


def _text(value: Any, where: str, limit: int = _TEXT) -> str:
    if not isinstance(value, str) or len(value) > limit or _CONTROL.search(value):
        raise _refuse(f"{where}: expected text of at most {limit} characters without control characters, got {str(value)[:60]!r}")
    return value


def _name(value: Any, where: str) -> str:
    if not _text(value, where, _NAME) or "\n" in value or "\t" in value:
        raise _refuse(f"{where}: expected a name, got {value[:60]!r}")
    return str(value)


def _one_of(value: Any, known: tuple[str, ...], where: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise _refuse(f"{where}: {str(value)[:40]!r} is unknown; known: {', '.join(known)}")
    return value


def _maybe_int(value: Any, where: str) -> int | None:
    if value is not None and (type(value) is not int or not -(2**63) <= value < 2**63):
        raise _refuse(f"{where}: expected an integer of 64 bits or null, got {str(value)[:40]}")
    return value


def _count(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise _refuse(f"{where}: expected a count of at most 63 bits, got {str(value)[:40]}")
    return value


def _hash(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _SHA256.match(value):
        raise _refuse(f"{where}: sha256: expected 64 hex digits, got {str(value)[:80]!r}")
    return value


def _range(value: Any, where: str) -> tuple[int, int | None]:
    """`[least, most or null]`."""
    if not isinstance(value, list) or len(value) != 2:
        raise _refuse(f"{where}: expected [least, most or null], got {str(value)[:40]}")
    least, most = _count(value[0], where), None if value[1] is None else _count(value[1], where)
    if most is not None and most < least:
        raise _refuse(f"{where}: from {least} to {most} there is nothing")
    return least, most


def _shape(value: Any, where: str) -> list[int]:
    shape = _list(value, where, _count)
    if len(shape) > MAX_RANK:
        raise _refuse(f"{where}: {len(shape)} dims, the limit is {MAX_RANK}")
    return shape


def _input_type(value: Any, dims: Mapping[str, Dim], where: str) -> str:
    found = _TYPE.match(_text(value, where))
    sizes = [_SIZE.match(s) for s in found[2].split(",")] if found and found[2] else []
    if not found or len(sizes) > MAX_RANK or not all(sizes):
        raise _refuse(f"{where}: {value[:60]!r} is no type such as float32[B,3,32*H,W]")
    if found[1] not in ITEM_BYTES:
        raise _refuse(f"{where}: {value[:60]!r} has an unknown dtype; known: {', '.join(ITEM_BYTES)}")
    if any(int(size) >= 2**63 for size in found[2].split(",") if size.isdecimal()):
        raise _refuse(f"{where}: {value[:60]!r} has a size past 63 bits")
    for size in sizes:
        if size and size[1] and size[1] not in dims:
            raise _refuse(f"{where}: {value[:60]!r} names the dim {size[1][:60]!r}; known: {guard_forms.some(dims) or 'none'}")
    return str(value)


def _parameter(value: Any, where: str) -> Parameter:
    if not isinstance(value, list) or len(value) != 4 or type(value[3]) is not bool:
        raise _refuse(f"{where}: expected [name, kind, tree, default], got {str(value)[:60]}")
    return Parameter(_name(value[0], where), _one_of(value[1], ("positional", "keyword"), where), value[2], value[3])  # the entry checks the tree


def _free(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _refuse(f"{where}: expected an object, got {str(value)[:60]}")
    return value


def _unique(names: list[str], where: str) -> None:
    if len(set(names)) != len(names):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise _refuse(f"{where}: the name {name[:80]!r} stands twice")
            seen.add(name)


def _unique_parts(weights: Iterable[Weight], members: int) -> None:
    """Refuse a name that is also the tensor `name@<i>` of a ragged weight; without writing those out."""
    ragged = {w.name for w in weights if w.kind == "ragged"}
    for name in (name for w in weights if ragged for name in (w.name, *w.aliases)):
        of, at, number = name.rpartition("@")
        if at and of in ragged and _PART.match(number) and int(number) < members:
            raise _refuse(f"weights: the name {name[:80]!r} stands twice: it is also that of a tensor of the ragged weight {of[:80]!r}")


def file_name(stem: str, suffix: str, sha256: str) -> str:
    """`programs/member.forward-0123456789abcdef.json`: a file's name from its content's hash. Raises: ArtifactError for a stem that is no name."""
    name = f"{stem}-{sha256[:16]}.{suffix}"
    if not _FILE_NAME.match(name):
        raise _refuse(f"files: {name[:80]!r} is no name of a file: letters, digits and _ . @ -, in the folder programs or in none")
    return name


def _file_name(name: str, file: File) -> None:
    found = _FILE_NAME.match(name)
    if not found or len(name) > 200 or ".." in name:
        raise _refuse(f"files: {name[:80]!r} is no name of a file of an artifact, [programs/]stem-<16 hex digits>.suffix")
    if found[1] != file.sha256[:16]:
        raise _refuse(f"files: {name} should carry {file.sha256[:16]}, the start of its SHA-256, in its name")


def _named_file(value: Any, files: Mapping[str, File], where: str) -> str:
    if not isinstance(value, str) or value not in files:
        raise _refuse(f"{where}: {str(value)[:80]!r} is not in the list of files")
    return value
