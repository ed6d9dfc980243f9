"""Programs in widepack's own small form: data only, readable without torch.

A `Program` is a list of nodes in execution order. Every op is named by its overload (`aten.linear.default`, `operator.getitem`, `loop`) and must be
in `opset.OPS`; every value has a name of `[A-Za-z_][A-Za-z0-9_]*`. The same form holds the member program (one member) and wide programs (all members).

| class | what it is |
|---|---|
| `Ref(name)` | an argument that is the value of an earlier node, weight or input |
| `Tag(kind, name)` | an argument that is no number: dtype, device, layout, memory_format. The device is `self`: wherever the program runs |
| `Slot` | a weight or an input: value name, where it comes from, its kind and type |
| `Node` | one op. `out` is its type for a reader's eye, `source` the user's own line, `member` the node of the member program it was made for |
| `Output` | one leaf of the result and its kind |
| `Program` | slots, nodes, outputs |

A `loop` node runs `body` once a member. `args` fill the body's inputs in order: a shared input gets the value, a stacked one its slice `[i]`, a ragged
one the i-th of a list. A stacked output is written into a preallocated `[N, ...]`, a ragged one is a list of N values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ArtifactError
from .opset import allowed

FORMAT = "widepack.program/1"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
KINDS = ("shared", "stacked", "ragged")
TAGS = ("dtype", "device", "layout", "memory_format")
MAX_NODES = 1_000_000
MAX_DEPTH = 16

Kind = Literal["shared", "stacked", "ragged"]


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class Tag:
    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight or an input of a program.

    name: the value's name in the nodes. source: the weight's name in the manifest's table, or the input leaf's name. kind: Shared, Stacked, Ragged.
    type: `float32[B,3,32]`, the member's own (without the member axis).
    """

    name: str
    source: str
    kind: Kind
    type: str


@dataclass(frozen=True, slots=True)
class Node:
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
    value: Any
    kind: Kind


@dataclass(frozen=True, slots=True)
class Program:
    weights: tuple[Slot, ...]
    inputs: tuple[Slot, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    members: int = 0  # 0 for a member program

    def check(self, depth: int = 0, extra: Container[str] | None = None) -> None:
        """Refuse a program that no writer of ours makes: unknown ops, bad names, a value used before it is made. extra: as `allowed` takes it.

        Raises: ArtifactError naming the node.
        """
        if depth > 2:
            raise ArtifactError("program: loop regions are nested more than twice; widepack never writes that")
        if len(self.nodes) > MAX_NODES:
            raise ArtifactError(f"program: {len(self.nodes)} nodes, the limit is {MAX_NODES}")
        known: set[str] = set()
        for slot in (*self.weights, *self.inputs):
            _new(slot.name, known, "slot")
            if slot.kind not in KINDS:
                raise ArtifactError(f"program: slot {slot.name} has the unknown kind {slot.kind[:40]!r}; known: {', '.join(KINDS)}")
        for node in self.nodes:
            _new(node.name, known, "node")
            if not allowed(node.op, extra):
                raise ArtifactError(
                    f"program: node {node.name[:80]} asks for the op {node.op[:80]!r}, which is not on the list of allowed ops; "
                    f"if it is of a library that you have imported and trust with what artifacts say, name it in load(allow_ops=)"
                )
            if node.op.startswith("widepack.") and not self.members and not depth:
                raise ArtifactError(f"program: node {node.name[:80]} asks for {node.op}, which stands in wide programs alone")
            if (node.op == "loop") != (node.body is not None):
                raise ArtifactError(f"program: node {node.name}: a body belongs to a loop, and a loop has one")
            for ref in refs((node.args, node.kwargs)):
                if ref not in known or ref == node.name:
                    raise ArtifactError(f"program: node {node.name[:80]} reads {ref[:80]!r}, which nothing before it makes")
            for key in node.kwargs:
                if not NAME.match(key):
                    raise ArtifactError(f"program: node {node.name} has the keyword {key[:80]!r}, which is no name")
            if node.body is not None:
                if node.body.weights or len(node.body.inputs) != len(node.args):
                    raise ArtifactError(f"program: loop {node.name} passes {len(node.args)} values to {len(node.body.inputs)} inputs")
                if node.body.members not in (0, self.members):
                    raise ArtifactError(
                        f"program: loop {node.name[:80]} has a body for {node.body.members} members, the program is for {self.members}"
                    )
                node.body.check(depth + 1, extra)
        for output in self.outputs:
            for ref in refs(output.value):
                if ref not in known:
                    raise ArtifactError(f"program: an output reads {ref[:80]!r}, which nothing makes")
            if output.kind not in KINDS:
                raise ArtifactError(f"program: an output has the unknown kind {str(output.kind)[:40]!r}; known: {', '.join(KINDS)}")

    def to_json(self) -> dict[str, Any]:
        """The program as JSON values; `from_json` gives an equal program back."""
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
        """Read and check a program. extra: as `allowed` takes it.

        Raises: ArtifactError for whatever is not exactly a program of this format.
        """
        program = cls._read(data, 0)
        program.check(extra=extra)
        return program

    @classmethod
    def _read(cls, data: Any, depth: int) -> Program:
        if depth > 3:
            raise ArtifactError("program: loop regions are nested too deep")
        fields = {"format", "members", "weights", "inputs", "nodes", "outputs"}
        if not isinstance(data, dict) or set(data) != fields:
            raise ArtifactError(f"program: expected an object with the keys {', '.join(sorted(fields))}")
        if data["format"] != FORMAT:
            raise ArtifactError(f"program: format {str(data['format'])[:60]!r}, this widepack reads {FORMAT!r}")
        members = data["members"]
        if type(members) is not int or not 0 <= members < 2**31:
            raise ArtifactError("program: members is no count")
        return cls(
            weights=tuple(_slot(s) for s in _list(data["weights"], "weights")),
            inputs=tuple(_slot(s) for s in _list(data["inputs"], "inputs")),
            nodes=tuple(_node_in(n, depth) for n in _list(data["nodes"], "nodes")),
            outputs=tuple(_output(o) for o in _list(data["outputs"], "outputs")),
            members=members,
        )


def refs(value: Any) -> Iterator[str]:
    """The names of all values that an argument reads, in order."""
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
    """An argument with every `Ref` replaced by `to(name)`; lists, tuples, dicts and slices are rebuilt."""
    if isinstance(value, Ref):
        return to(value.name)
    if isinstance(value, tuple):
        return tuple(substitute(v, to) for v in value)
    if isinstance(value, list):
        return [substitute(v, to) for v in value]
    if isinstance(value, dict):
        return {k: substitute(v, to) for k, v in value.items()}
    return value


def _new(name: str, known: set[str], what: str) -> None:
    if not NAME.match(name):
        raise ArtifactError(f"program: {what} {name[:80]!r} has a name that is none")
    if name in known:
        raise ArtifactError(f"program: two values are called {name[:80]!r}")
    known.add(name)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ArtifactError(f"program: {what} is no list")
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
    if not isinstance(row, dict) or not {"name", "op", "args"} <= set(row) <= {"name", "op", "args", "kwargs", "out", "source", "member", "body"}:
        raise ArtifactError(f"program: {str(row)[:80]} is no node")
    texts = [row.get(k, "") for k in ("name", "op", "out", "source", "member")]
    if not all(isinstance(t, str) for t in texts) or not isinstance(row.get("kwargs", {}), dict):
        raise ArtifactError(f"program: {str(row)[:80]} is no node")
    name, op, out, source, member = texts
    args = tuple(_in(a, 0) for a in _list(row["args"], "args"))
    kwargs = {k: _in(v, 0) for k, v in row.get("kwargs", {}).items()}
    body = Program._read(row["body"], depth + 1) if "body" in row else None
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
    raise ArtifactError(f"program: an argument of type {type(value).__name__} has no form in a file")


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
    raise ArtifactError(f"program: {str(value)[:60]!r} is no argument")
