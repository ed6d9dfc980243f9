"""Defines programs in widepack's own form: data only, readable without torch.

A `Program` is a list of nodes in execution order. Every op is named by its overload (`aten.linear.default`,
`operator.getitem`, `loop`) and must be in `opset.OPS`. Every value has a name of `[A-Za-z_][A-Za-z0-9_]*`.
Member programs (one member) and wide programs (all members) have the same form.

| class | content |
|---|---|
| `Ref(name)` | an argument: the value of an earlier node, a weight or an input |
| `Tag(kind, name)` | an argument: a dtype, layout, memory_format, or the program's device (`self`) |
| `Slot` | a weight or an input: its name, its source, its kind and its type |
| `Node` | one op, with its type, the user's line and the node of the member program |
| `Output` | one leaf of the result and its kind |
| `Program` | slots, nodes, outputs |

A `loop` node runs `body` once for each member. `args` are the body's inputs in order. A Shared input is the
value itself, a Stacked input is the slice `[i]`, and a Ragged input is the i-th value of a list. A Stacked
output is written into a preallocated `[N, ...]`, and a Ragged output is a list of N values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ArtifactError
from .opset import OF_ONE_MEMBER, allowed

FORMAT = "widepack.program/1"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
KINDS = ("shared", "stacked", "ragged")
TAGS = ("dtype", "device", "layout", "memory_format")
MAX_NODES = 1_000_000
MAX_DEPTH = 16

Kind = Literal["shared", "stacked", "ragged"]


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Tag:
    """A value of torch that is not a number, such as a dtype."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight or an input of a program.

    `name` is the value's name in the nodes. `source` is the weight's name in the manifest's table, or the
    input leaf's name. `type` is the type in one member, without the member axis, for example
    `float32[B,3,32]`.
    """

    name: str
    source: str
    kind: Kind
    type: str


@dataclass(frozen=True, slots=True)
class Node:
    """One op of a program. `body` is the program of a loop."""

    name: str
    op: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    out: str = ""
    source: str = ""
    member: str = ""
    body: Program | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A leaf of the result and its kind."""

    value: Any
    kind: Kind


@dataclass(frozen=True, slots=True)
class Program:
    """A member program or a wide program."""

    weights: tuple[Slot, ...]
    inputs: tuple[Slot, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    members: int = 0  # 0 for a member program

    def check(self, depth: int = 0, extra: Container[str] | None = None) -> None:
        """Refuses a program that no writer makes: unknown ops, bad names, a value that is used before it
        exists.

        Args:
            depth: The number of loops around this program.
            extra: The allowed ops of other libraries, as in `opset.allowed`.

        Raises:
            ArtifactError: The message names the node.
        """
        if depth > 2:
            raise ArtifactError(
                "program: loop regions are nested more than twice; widepack never writes that"
            )
        if len(self.nodes) > MAX_NODES:
            raise ArtifactError(f"program: {len(self.nodes)} nodes, the limit is {MAX_NODES}")
        known: set[str] = set()
        for slot in (*self.weights, *self.inputs):
            _add_name(slot.name, known, "slot")
            if slot.kind not in KINDS:
                raise ArtifactError(
                    f"program: slot {slot.name} has the unknown kind {slot.kind[:40]!r}; known: "
                    f"{', '.join(KINDS)}"
                )
        for node in self.nodes:
            _add_name(node.name, known, "node")
            self._check_op(node, depth, extra)
            _check_arguments(node, known)
            if node.body is not None:
                self._check_body(node, node.body)
                node.body.check(depth + 1, extra)
        for output in self.outputs:
            for ref in refs(output.value):
                if ref not in known:
                    raise ArtifactError(f"program: an output reads {ref[:80]!r}, which does not exist")
            if output.kind not in KINDS:
                raise ArtifactError(
                    f"program: an output has the unknown kind {str(output.kind)[:40]!r}; known: "
                    f"{', '.join(KINDS)}"
                )

    def _check_op(self, node: Node, depth: int, extra: Container[str] | None) -> None:
        """Refuses an op that is not allowed, or not allowed here."""
        if not allowed(node.op, extra):
            raise ArtifactError(
                f"program: node {node.name[:80]} asks for the op {node.op[:80]!r}, "
                "which is not on the list of allowed ops; "
                "if you have imported its library and trust it with data of artifacts, "
                "name the op in load(allow_ops=)"
            )
        own = node.op.startswith("widepack.") and node.op not in OF_ONE_MEMBER
        if own and not self.members and not depth:
            raise ArtifactError(
                f"program: node {node.name[:80]} asks for {node.op}, which only wide programs may use"
            )
        if (node.op == "loop") != (node.body is not None):
            raise ArtifactError(f"program: node {node.name}: a loop has a body, and no other op has one")

    def _check_body(self, node: Node, body: Program) -> None:
        """Refuses the body of a loop if it has weights, or its inputs or its N differ from the node's."""
        if body.weights or len(body.inputs) != len(node.args):
            raise ArtifactError(
                f"program: loop {node.name} passes {len(node.args)} values to {len(body.inputs)} inputs"
            )
        if body.members not in (0, self.members):
            raise ArtifactError(
                f"program: loop {node.name[:80]} has a body for {body.members} members, "
                f"the program is for {self.members}"
            )

    @property
    def node_count(self) -> int:
        """The number of nodes, with those of loops."""
        return sum(1 + (n.body.node_count if n.body is not None else 0) for n in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """Returns the program as JSON values, from which `from_json` makes an equal program."""
        return {
            "format": FORMAT,
            "members": self.members,
            "weights": [[s.name, s.source, s.kind, s.type] for s in self.weights],
            "inputs": [[s.name, s.source, s.kind, s.type] for s in self.inputs],
            "nodes": [_node_out(n) for n in self.nodes],
            "outputs": [[_out(o.value), o.kind] for o in self.outputs],
        }

    @classmethod
    def from_json(cls, data: Any, extra: Container[str] | None = None) -> Program:
        """Reads and checks a program. `extra` is as in `opset.allowed`.

        Raises: ArtifactError if the data is not exactly a program of this format.
        """
        program = cls.from_unchecked(data, 0)
        program.check(extra=extra)
        return program

    @classmethod
    def from_unchecked(cls, data: Any, depth: int) -> Program:
        """Reads the form of a program without `check`. `depth` is the number of loops around it."""
        if depth > 3:
            raise ArtifactError("program: loop regions are nested too deep")
        fields = {"format", "members", "weights", "inputs", "nodes", "outputs"}
        if not isinstance(data, dict) or set(data) != fields:
            raise ArtifactError(f"program: expected an object with the keys {', '.join(sorted(fields))}")
        if data["format"] != FORMAT:
            raise ArtifactError(
                f"program: format {str(data['format'])[:60]!r}, this widepack reads {FORMAT!r}"
            )
        members = data["members"]
        if type(members) is not int or not 0 <= members < 2**31:
            raise ArtifactError("program: members is not a count")
        return cls(
            weights=tuple(_slot(s) for s in _list(data["weights"], "weights")),
            inputs=tuple(_slot(s) for s in _list(data["inputs"], "inputs")),
            nodes=tuple(_node_in(n, depth) for n in _list(data["nodes"], "nodes")),
            outputs=tuple(_output(o) for o in _list(data["outputs"], "outputs")),
            members=members,
        )


def _check_arguments(node: Node, known: Container[str]) -> None:
    """Refuses arguments that read unknown values, and keywords that are not names."""
    for ref in refs((node.args, node.kwargs)):
        if ref not in known or ref == node.name:
            raise ArtifactError(
                f"program: node {node.name[:80]} reads {ref[:80]!r}, which does not exist before the node"
            )
    for key in node.kwargs:
        if not NAME.match(key):
            raise ArtifactError(
                f"program: node {node.name} has the keyword {key[:80]!r}, which is not a valid name"
            )


def refs(value: Any) -> Iterator[str]:
    """Yields the names of all values that an argument reads, in order."""
    if isinstance(value, Ref):
        yield value.name
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from refs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from refs(item)
    elif isinstance(value, slice):
        yield from refs((value.start, value.stop, value.step))


def substitute(value: Any, to: Any) -> Any:
    """Returns an argument in which `to(name)` replaces every `Ref`. Lists, tuples and dicts are rebuilt."""
    if isinstance(value, Ref):
        return to(value.name)
    if isinstance(value, tuple):
        return tuple(substitute(v, to) for v in value)
    if isinstance(value, list):
        return [substitute(v, to) for v in value]
    if isinstance(value, dict):
        return {k: substitute(v, to) for k, v in value.items()}
    return value


def _add_name(name: str, known: set[str], what: str) -> None:
    if not NAME.match(name):
        raise ArtifactError(f"program: {what} {name[:80]!r} has a name that is not valid")
    if name in known:
        raise ArtifactError(f"program: two values have the name {name[:80]!r}")
    known.add(name)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ArtifactError(f"program: {what} is not a list")
    return value


def _strings(value: Any, count: int, what: str) -> list[str]:
    if not isinstance(value, list) or len(value) != count or not all(isinstance(v, str) for v in value):
        raise ArtifactError(f"program: {what} needs {count} strings, got {str(value)[:80]}")
    return value


def _slot(value: Any) -> Slot:
    name, source, kind, type_ = _strings(value, 4, "a slot")
    return Slot(name, source, kind, type_)  # type: ignore[arg-type]  # check() refuses other kinds


def _output(value: Any) -> Output:
    if not isinstance(value, list) or len(value) != 2:
        raise ArtifactError("program: an output is [value, kind]")
    return Output(_in(value[0], 0), value[1])


def _node_out(node: Node) -> dict[str, Any]:
    row: dict[str, Any] = {"name": node.name, "op": node.op, "args": _out(list(node.args))}
    if node.kwargs:
        row["kwargs"] = {k: _out(v) for k, v in node.kwargs.items()}
    for key in ("out", "source", "member"):
        if getattr(node, key):
            row[key] = getattr(node, key)
    if node.body is not None:
        row["body"] = node.body.to_json()
    return row


def _node_in(row: Any, depth: int) -> Node:
    if not isinstance(row, dict) or not {"name", "op", "args"} <= set(row) <= {
        "name",
        "op",
        "args",
        "kwargs",
        "out",
        "source",
        "member",
        "body",
    }:
        raise ArtifactError(f"program: {str(row)[:80]} is not a node")
    texts = [row.get(k, "") for k in ("name", "op", "out", "source", "member")]
    if not all(isinstance(t, str) for t in texts) or not isinstance(row.get("kwargs", {}), dict):
        raise ArtifactError(f"program: {str(row)[:80]} is not a node")
    name, op, out, source, member = texts
    args = tuple(_in(a, 0) for a in _list(row["args"], "args"))
    kwargs = {k: _in(v, 0) for k, v in row.get("kwargs", {}).items()}
    body = Program.from_unchecked(row["body"], depth + 1) if "body" in row else None
    return Node(name, op, args, kwargs, out, source, member, body)


def _out(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, Tag):
        return {value.kind: value.name}
    if isinstance(value, str):
        return {"str": value}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [_out(value.real), _out(value.imag)]}
    if isinstance(value, (tuple, list)):
        return [_out(v) for v in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ArtifactError(f"program: an argument of type {type(value).__name__} cannot be written to a file")


def _in(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ArtifactError("program: an argument is nested too deep")
    if isinstance(value, list):
        return [_in(v, depth + 1) for v in value]
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ArtifactError("program: an integer is outside 64 bits")
        return value
    if isinstance(value, dict) and len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "ref" and isinstance(inner, str):
            return Ref(inner)
        if kind == "str" and isinstance(inner, str):
            return inner
        if kind == "float" and inner in ("inf", "-inf", "nan"):
            return float(inner)
        if kind == "complex" and isinstance(inner, list) and len(inner) == 2:
            parts = [_in(v, depth + 1) for v in inner]
            if all(type(p) in (int, float) for p in parts):
                return complex(*parts)
        if kind in TAGS and isinstance(inner, str):
            return Tag(kind, inner)
    raise ArtifactError(f"program: {str(value)[:60]!r} is not an argument")
