"""Defines the entries of a manifest: inputs, outputs, dims, guards, states and programs.

No torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from . import guards as guard_forms
from . import tree
from .errors import some
from .fields import (
    IDENTIFIER,
    MAX_NAME,
    MAX_RANK,
    check_unique,
    manifest_error,
    read_choice,
    read_count,
    read_list,
    read_map,
    read_name,
    read_object,
    read_optional_integer,
    read_range,
    read_text,
)
from .file_list import File, read_file_name
from .format_version import VERSION
from .literals import Literal, read_literal
from .manifest_weights import ITEM_BYTES, KINDS
from .wide_program import PATTERNS, WideProgram


@dataclass(frozen=True, slots=True)
class Rows:
    """Whether the rows of a batch are independent: no row changes the answer to another one.

    Attributes:
        dim: The dim of the rows; "" if no dim is dynamic.
        independent: Whether they are.
        proved: Whether this holds for all values of inputs and weights. False: trials found no dependence, or
            found one.
        reason: The op that mixes the rows, or that is not proved to keep them apart, with the user's line;
            "" if all ops are proved to.
    """

    dim: str
    independent: bool
    proved: bool
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "dim": self.dim,
            "independent": self.independent,
            "proved": self.proved,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, data: Any, where: str = "rows") -> Rows:
        d = read_object(data, where, ("dim", "independent", "proved", "reason"))
        for key in ("independent", "proved"):
            if type(d[key]) is not bool:
                raise manifest_error(f"{where}: {key}: expected true or false, got {str(d[key])[:40]}")
        return cls(
            read_text(d["dim"], f"{where}: dim", MAX_NAME),
            d["independent"],
            d["proved"],
            " ".join(read_text(d["reason"], f"{where}: reason").split()),  # one line in messages
        )

    def __str__(self) -> str:
        if not self.independent:
            return f"not independent: {self.reason}"
        along = f"independent along {self.dim}"
        return along if self.proved else f"{along} in trials; not proved: {self.reason}"


@dataclass(frozen=True, slots=True)
class Dim:
    """The inclusive bounds of a named dim.

    `source` is the user's line that a bound comes from, or empty. `example` is a size at which all guards
    hold.
    """

    min: int
    max: int | None = None
    source: str = ""
    example: int = 2

    def to_json(self) -> dict[str, Any]:
        return {"min": self.min, "max": self.max, "source": self.source, "example": self.example}

    @classmethod
    def from_json(cls, data: Any, where: str = "a dim") -> Dim:
        d = read_object(data, where, ("min", "max", "source", "example"))
        return cls(
            *read_range([d["min"], d["max"]], where),
            read_text(d["source"], f"{where}: source"),
            read_count(d["example"], f"{where}: example"),
        )


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition over named dims that every call must meet, and the user's line that it comes from."""

    expr: guard_forms.Expr
    source: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"expr": self.expr, "source": self.source}

    @classmethod
    def from_json(cls, data: Any, dims: Mapping[str, Dim], where: str = "a guard") -> Guard:
        d = read_object(data, where, ("expr", "source"))
        guard_forms.check(d["expr"], dims)
        return cls(d["expr"], read_text(d["source"], f"{where}: source"))


_KEYS = (
    "inputs",
    "signature",
    "outputs",
    "result",
    "dims",
    "guards",
    "fixed",
    "member",
    "signatures",
    "wide",
    "pt2",
)
_LATER_KEYS = {"state": (1, 1), "rows": (1, 2), "literals": (1, 5)}
"""The keys that an entry may have, and the version that added each."""
_TYPE = re.compile(r"([a-z][a-z0-9_]*)\[(.*)\]\Z")
_SIZE = re.compile(r"(?:[0-9]{1,19}|(?:[1-9][0-9]{0,17}\*)?([A-Za-z_][A-Za-z0-9_]*))\Z")


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor leaf of a call.

    An example of `type` is `float32[B,3,32*H,W]`. `low` and `high` are the inclusive bounds of an integer
    input's values.
    """

    name: str
    type: str
    low: int | None = None
    high: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "type": self.type, "low": self.low, "high": self.high}

    @classmethod
    def from_json(cls, data: Any, dims: Mapping[str, Dim], where: str = "an input") -> Input:
        d = read_object(data, where, ("name", "type", "low", "high"))
        low, high = (read_optional_integer(d[k], f"{where}: {k}") for k in ("low", "high"))
        if low is not None and high is not None and low > high:
            raise manifest_error(f"{where}: the bounds {low}..{high} contain no value")
        return cls(
            read_name(d["name"], f"{where}: name"),
            _read_input_type(d["type"], dims, f"{where}: type"),
            low,
            high,
        )


class Parameter(NamedTuple):
    """A parameter of the forward.

    `kind` is positional or keyword. `tree` is over the input leaves. `default` says whether a call may omit
    the parameter.
    """

    name: str
    kind: str
    tree: tree.Tree
    default: bool = False


def absent_inputs(signature: Iterable[Parameter]) -> tuple[str, ...]:
    """Returns the parameters that a sample left out, and whose default is None: an input could be given."""
    return tuple(p.name for p in signature if p.default and p.tree == {"const": None})


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """A tensor leaf of the result: its type in one member, and its kind in the wide program."""

    name: str
    type: str
    kind: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "type": self.type, "kind": self.kind}

    @classmethod
    def from_json(cls, data: Any, where: str = "an output") -> OutputLeaf:
        d = read_object(data, where, ("name", "type", "kind"))
        text = read_text(d["type"], f"{where}: type")
        if not _TYPE.match(text):
            raise manifest_error(f"{where}: {text[:60]!r} is not a type such as float32[B,10]")
        return cls(
            read_text(d["name"], f"{where}: name", MAX_NAME),
            text,
            read_choice(d["kind"], KINDS, f"{where}: kind"),
        )


@dataclass(frozen=True, slots=True)
class State:
    """A state: a value that the caller carries from call to call, one for each member in every pattern.

    `input` and `output` are the numbers of its leaves. The name of the input is the name of the state.
    `initial` is the weight that has its first value, or "" for zeros.
    """

    input: int
    output: int
    initial: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"input": self.input, "output": self.output, "initial": self.initial}

    @classmethod
    def from_json(cls, data: Any, where: str = "a state") -> State:
        d = read_object(data, where, ("input", "output", "initial"))
        return cls(
            read_count(d["input"], f"{where}: input"),
            read_count(d["output"], f"{where}: output"),
            read_text(d["initial"], f"{where}: initial", MAX_NAME),
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """A named program over the artifact's weights.

    inputs: the tensor leaves of a call, in order.
    signature: the parameters of the forward.
    outputs, result: the tensor leaves of the result, and their tree.
    dims, guards: the named dims, and the conditions on them that every call must meet.
    fixed: sentences about sizes that the member's code fixes.
    member: the files of the member programs, one for each shape signature.
    signatures: for each member its index into `member`.
    wide: the wide programs.
    pt2: for each pattern the file of the torch.export program.
    state: the states of the entry; format 1.0 has none.
    rows: whether the rows of a batch are independent; None in formats before 1.2.
    literals: what the members' code reads from their weights; formats before 1.5 have none.
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
    rows: Rows | None = None
    literals: tuple[Literal, ...] = ()

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
            **({"rows": self.rows.to_json()} if self.rows is not None else {}),
            **({"literals": [x.to_json() for x in self.literals]} if self.literals else {}),
        }

    @classmethod
    def from_json(
        cls,
        data: Any,
        members: int,
        files: Mapping[str, File],
        where: str = "an entry",
        version: tuple[int, int] = VERSION,
    ) -> Entry:
        later = [
            k for k, since in _LATER_KEYS.items() if version >= since and isinstance(data, dict) and k in data
        ]
        d = read_object(data, where, (*_KEYS, *later))
        dims = read_map(d["dims"], f"{where}: dims", Dim.from_json)
        for name in dims:
            if not IDENTIFIER.match(name):
                raise manifest_error(
                    f"{where}: dims: {name[:80]!r} is not a valid name of a dim; use letters, digits and _"
                )
        entry = cls(
            inputs=tuple(
                read_list(d["inputs"], f"{where}: inputs", lambda v, w: Input.from_json(v, dims, w))
            ),
            signature=read_list(d["signature"], f"{where}: signature", _read_parameter),
            outputs=tuple(read_list(d["outputs"], f"{where}: outputs", OutputLeaf.from_json)),
            result=d["result"],
            dims=dims,
            guards=tuple(
                read_list(d["guards"], f"{where}: guards", lambda v, w: Guard.from_json(v, dims, w))
            ),
            fixed=read_list(d["fixed"], f"{where}: fixed", read_text),
            member=read_list(d["member"], f"{where}: member", lambda v, w: read_file_name(v, files, w)),
            signatures=read_list(d["signatures"], f"{where}: signatures", read_count),
            wide=tuple(
                read_list(
                    d["wide"], f"{where}: wide", lambda v, w: WideProgram.from_json(v, files, w, version)
                )
            ),
            pt2=read_map(d["pt2"], f"{where}: pt2", lambda v, w: read_file_name(v, files, w)),
            state=tuple(read_list(d["state"], f"{where}: state", State.from_json)) if "state" in d else (),
            rows=Rows.from_json(d["rows"], f"{where}: rows") if "rows" in d else None,
            literals=tuple(read_list(d.get("literals", []), f"{where}: literals", read_literal)),
        )
        entry.check(members, where)
        return entry

    def check(self, members: int, where: str) -> None:
        """Checks the fields against each other. Raises: ArtifactError."""
        check_unique([i.name for i in self.inputs], f"{where}: inputs")
        check_unique([p.name for p in self.signature], f"{where}: signature")
        self._check_states(where)
        self._check_signature(where)
        self._check_result(where)
        if not self.member or len(self.signatures) != members or max(self.signatures) >= len(self.member):
            raise manifest_error(
                f"{where}: signatures must name, for each of the {members} members, "
                f"one of the {len(self.member)} member programs"
            )
        for pattern in self.pt2:
            read_choice(pattern, PATTERNS, f"{where}: pt2")
        for wide in self.wide:
            wide.check_part(members, f"{where}: wide")

    def _check_states(self, where: str) -> None:
        """Checks that each state names an input and an output of one type, and no input twice."""
        for s in self.state:
            if s.input >= len(self.inputs) or s.output >= len(self.outputs):
                raise manifest_error(
                    f"{where}: a state names input {s.input} and output {s.output}, "
                    f"but the entry has {len(self.inputs)} inputs and {len(self.outputs)} outputs"
                )
            before, after = self.inputs[s.input], self.outputs[s.output]
            if before.type != after.type:
                raise manifest_error(
                    f"{where}: the state {before.name[:80]} is {before.type[:80]} as input "
                    f"and {after.type[:80]} as output; a state keeps its type"
                )
        if len({s.input for s in self.state}) < len(self.state):
            raise manifest_error(f"{where}: state: an input occurs twice")

    def _check_signature(self, where: str) -> None:
        """Checks that the parameters contain each input leaf once.

        States may be absent from the parameters.
        """
        states = {s.input for s in self.state}
        leaves: list[int] = []
        for parameter in self.signature:
            tree.check(parameter.tree, len(self.inputs))
            own = tree.leaves(parameter.tree)
            if set(own) & states and not set(own) <= states:
                raise manifest_error(
                    f"{where}: the parameter {parameter.name[:80]} contains states and other inputs; "
                    "a parameter contains states only, or none"
                )
            leaves += own
        if sorted([*leaves, *(states - set(leaves))]) != list(range(len(self.inputs))):
            raise manifest_error(
                f"{where}: the signature must contain each of the {len(self.inputs)} input leaves once; "
                f"it contains {sorted(leaves)[:20]}"
            )

    def _check_result(self, where: str) -> None:
        """Checks that the result's tree contains each output leaf, except those of states."""
        tree.check(self.result, len(self.outputs))
        leaves = {*tree.leaves(self.result)}
        if sorted([*leaves, *(s.output for s in self.state)]) != list(range(len(self.outputs))):
            raise manifest_error(
                f"{where}: the result's tree must contain all {len(self.outputs)} output leaves"
                f"{' except those of states' if self.state else ''}"
            )

    @property
    def has_fields(self) -> bool:
        """Whether a parameter is an object with named fields, which formats before 1.5 do not have."""
        return any(tree.has_fields(p.tree) for p in self.signature)

    @property
    def states(self) -> list[str]:
        """The names of the states."""
        return [self.inputs[s.input].name for s in self.state]


def _read_input_type(value: Any, dims: Mapping[str, Dim], where: str) -> str:
    """Reads the type of an input, such as `float32[B,3,32*H,W]`, and checks its dtype and its dims."""
    match = _TYPE.match(read_text(value, where))
    sizes = [_SIZE.match(s) for s in match[2].split(",")] if match and match[2] else []
    if not match or len(sizes) > MAX_RANK or not all(sizes):
        raise manifest_error(f"{where}: {value[:60]!r} is not a type such as float32[B,3,32*H,W]")
    if match[1] not in ITEM_BYTES:
        raise manifest_error(f"{where}: {value[:60]!r} has an unknown dtype; known: {', '.join(ITEM_BYTES)}")
    if any(int(size) >= 2**63 for size in match[2].split(",") if size.isdecimal()):
        raise manifest_error(f"{where}: {value[:60]!r} has a size of more than 63 bits")
    for size in sizes:
        if size and size[1] and size[1] not in dims:
            raise manifest_error(
                f"{where}: {value[:60]!r} names the dim {size[1][:60]!r}; "
                f"known: {some(n[:60] for n in dims) or 'none'}"
            )
    return str(value)


def _read_parameter(value: Any, where: str) -> Parameter:
    if not isinstance(value, list) or len(value) != 4 or type(value[3]) is not bool:
        raise manifest_error(f"{where}: expected [name, kind, tree, default], got {str(value)[:60]}")
    kind = read_choice(value[1], ("positional", "keyword"), where)
    return Parameter(read_name(value[0], where), kind, value[2], value[3])  # the entry checks the tree
