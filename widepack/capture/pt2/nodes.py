"""Reads the nodes of a `.pt2` file's program as nodes of a member program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from widepack_artifacts.opset import OPS
from widepack_artifacts.program import Node, Ref, refs

from ...checkpoints.state_dict import RefusedFile
from ..explain import user_line
from .arguments import SYMBOLS, read_arguments
from .fields import (
    WAY_OUT,
    bad_field,
    clean_text,
    list_of,
    object_of,
    tensor_name,
    text_of,
)

_DROPOUT = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_ASSERTS = (
    "_assert_tensor_metadata",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_assert_async",
)
# Ops whose result is new memory, whatever their inputs are.
_FRESH = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul bmm addmm baddbmm
    batch_norm group_norm layer_norm instance_norm _native_batch_norm_legit_no_training
    add sub mul div relu hardtanh silu hardswish leaky_relu elu sigmoid tanh
    max_pool2d avg_pool2d adaptive_avg_pool2d
    zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full clone
"""


def live_nodes(nodes: Sequence[Node], outputs: Sequence[Any]) -> Iterator[Node]:
    """Returns the nodes that an output needs. All ops are functional, so the others have no effect."""
    needed = set(refs(list(outputs)))
    kept = []
    for node in reversed(nodes):
        if node.name in needed:
            needed |= set(refs((node.args, node.kwargs)))
            kept.append(node)
    return reversed(kept)


def read_nodes(
    rows: Sequence[Any], renamed: dict[str, str], metas: Mapping[str, Any], results: Sequence[Any]
) -> list[Node]:
    """Returns all nodes, in order.

    renamed: value in the file -> value in the program; grows with each node. metas: the file's description of
    each tensor value. results: the file's outputs.
    """
    reader = _NodeReader(renamed, metas, _read_counts(rows, results))
    for number, value in enumerate(rows):
        reader.add(number, object_of(value, "nodes"))
    return reader.nodes


@dataclass(kw_only=True)
class _Op:
    """An op of the file while it is read. source: the user's line. inputs: the file's arguments."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]
    source: str
    inputs: list[dict[str, Any]]
    first_of_several: bool = False  # the file has one result, and the program's op returns several

    @property
    def base(self) -> str:
        return self.name.split(".")[1]


class _NodeReader:
    """Reads one node after the other.

    counts: how often each value of the file is read. fresh: values that own their memory. aliases: other
    names of values; a write into one of them is a write into both.
    """

    def __init__(self, renamed: dict[str, str], metas: Mapping[str, Any], counts: Counter[str]) -> None:
        self.nodes: list[Node] = []
        self._renamed = renamed
        self._metas = metas
        self._counts = counts
        self._fresh: set[str] = set()
        self._aliases: set[str] = set()

    def add(self, number: int, row: Mapping[str, Any]) -> None:
        """Reads a node of the file, which becomes no node, one, or several."""
        target = text_of(row.get("target"))
        name = _op_name(target)
        source = _source(row)
        if name.split(".")[1] in _ASSERTS and name.startswith("aten."):
            return
        if "higher_order" in target:
            raise RefusedFile(_not_read(name, target, source))
        outputs = list_of(row.get("outputs"), "outputs")
        inputs = [object_of(a, "inputs") for a in list_of(row.get("inputs"), "inputs")]
        args, kwargs = read_arguments(name, inputs, self._renamed, source)
        op = _Op(name=name, args=args, kwargs=kwargs, source=source, inputs=inputs)
        if op.base in _DROPOUT and len(args) == 3 and args[2] is False and isinstance(args[0], Ref):
            (only,) = outputs  # dropout in eval mode is an alias of its input
            self._renamed[tensor_name(only) or ""] = args[0].name
            self._aliases.add(tensor_name(only) or "")
            return
        in_eval = _as_in_eval(op)
        functional = self._functional(in_eval)
        base = op.base if functional is in_eval else functional.base
        op = functional
        if op.name not in OPS:
            raise RefusedFile(_not_read(op.name, target, source))
        op = self._fixed_squeeze(op)
        new = list(_result_nodes(op, outputs, number, self._renamed))
        self.nodes += new
        if base in _FRESH.split() and len(outputs) == 1:
            self._fresh.add(new[-1].name)

    def _functional(self, op: _Op) -> _Op:
        """Returns the functional twin of an op that writes into a fresh value which nothing else reads."""
        written = tensor_name(op.inputs[0].get("arg")) if op.inputs else None
        if op.name in OPS or not op.base.endswith("_") or written is None or written in self._aliases:
            return op
        if self._renamed[written] in self._fresh and self._counts[written] == 1:
            twin = op.name.replace(f".{op.base}.", f".{op.base[:-1]}.")
            return replace(op, name=twin) if twin in OPS else op
        return op

    def _fixed_squeeze(self, op: _Op) -> _Op:
        """Returns a squeeze of the dims that have size 1 in the file, because a batch of size 1 keeps its
        dim.
        """
        if op.name != "aten.squeeze.default":
            return op
        meta = self._metas.get(tensor_name(op.inputs[0].get("arg")) or "") if op.inputs else None
        sizes = list_of(object_of(meta, "tensor_values").get("sizes"), "sizes")
        ones = [d for d, size in enumerate(sizes) if size == {"as_int": 1}]
        return replace(op, name="aten.squeeze.dims", args=[*op.args, ones])


def _source(row: Mapping[str, Any]) -> str:
    """Returns the user's line of a node; empty where the file has none."""
    metadata = row.get("metadata")
    source = user_line(str(metadata.get("stack_trace") or "")) if isinstance(metadata, dict) else ""
    return source[:500] if source.isprintable() else ""


def _read_counts(rows: Sequence[Any], results: Sequence[Any]) -> Counter[str]:
    """Returns how often each value is read, by its name in the file."""
    counts: Counter[str] = Counter()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            counts.update(v for k, v in value.items() if k in ("name", "as_name") and isinstance(v, str))
            value = list(value.values())
        if isinstance(value, list):
            for part in value:
                walk(part)

    walk(
        [
            argument.get("arg")
            for row in rows
            if isinstance(row, dict)
            for argument in row.get("inputs") or ()
            if isinstance(argument, dict)
        ]
    )
    walk([row.get("arg") for row in results])
    return counts


def _op_name(target: str) -> str:
    """`torch.ops.aten.linear.default` -> `aten.linear.default`, `_operator.mul` -> `operator.mul`."""
    name = target.removeprefix("torch.ops.")
    if name.startswith("_operator."):
        name = name[1:]
    return name if name.count(".") else f"{name}."


def _at(target: str, source: str) -> str:
    return f"{target.removeprefix('torch.ops.')}{f', from {source}' if source else ''}"


def _not_read(name: str, target: str, source: str) -> str:
    """The message for an op that a member program cannot have."""
    base = name.split(".")[1]
    if "higher_order" in target:
        return f"contains a nested region ({_at(target, source)}); {WAY_OUT}"
    if base.endswith("_") and not base.endswith("__"):
        return f"writes into a value ({_at(target, source)}); {WAY_OUT}"
    return (
        f"contains the op {_at(target, source)}, which a member program cannot have; {WAY_OUT}, and "
        "if that does not help, please report it"
    )


def _as_in_eval(op: _Op) -> _Op:
    """Returns what `run_decompositions({})` makes of an op in eval mode, for the few ops that are read
    without it.
    """
    args, kwargs = op.args, op.kwargs
    if op.name in ("aten.detach_.default", "aten.lift_fresh_copy.default"):
        return replace(op, name="aten.clone.default")
    if op.name == "aten.batch_norm.default":
        if args[5:6] != [False] or args[3:4] == [None] or args[4:5] == [None]:
            raise RefusedFile(
                f"normalises by the batch itself ({_at(op.name, op.source)}), as in train mode; export "
                "module.eval()"
            )
        return replace(
            op,
            name="aten._native_batch_norm_legit_no_training.default",
            args=[*args[:5], *args[6:8]],
            first_of_several=True,
        )
    if op.name in ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device"):
        at = 2 if op.name == "aten.to.device" else 1
        dtype = {"dtype": args[at]} if len(args) > at else {}
        kept = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}
        return replace(op, name="aten._to_copy.default", args=args[:1], kwargs={**dtype, **kept})
    return op


_Place = tuple[int, ...]  # indices of a result: (), (1,), (0, 2)


def _result_nodes(op: _Op, outputs: Sequence[Any], number: int, renamed: dict[str, str]) -> Iterator[Node]:
    """Yields an op's node, named as its result in the file; for several results a `getitem` for each."""
    leaves = _result_leaves(op, outputs)
    taken = set(renamed.values())
    if any(clean_text(name) in taken or name in renamed for _, name in leaves):
        raise bad_field(f"two values are called {leaves[0][1][:60]!r}")
    renamed.update({name: clean_text(name) for _, name in leaves})
    if len(leaves) == 1 and leaves[0][0] == ():
        yield Node(renamed[leaves[0][1]], op.name, tuple(op.args), op.kwargs, "", op.source)
        return
    whole = f"n{number}_{op.base.strip('_')}"
    while whole in taken or whole in renamed.values():
        whole += "_"
    renamed[f" {number}"] = whole  # no later value may take this name
    yield Node(whole, op.name, tuple(op.args), op.kwargs, "", op.source)
    parts: dict[_Place, str] = {(): whole}

    def item(name: str, place: _Place) -> Node:
        return Node(name, "operator.getitem", (Ref(parts[place[:-1]]), place[-1]), {}, "", op.source)

    for place, name in leaves:
        for depth in range(1, len(place)):
            outer = place[:depth]
            if outer not in parts:
                parts[outer] = renamed[f" {number} {outer}"] = f"{whole}_{outer[-1]}"
                yield item(parts[outer], outer)
        yield item(renamed[name], place)


def _result_leaves(op: _Op, outputs: Sequence[Any]) -> list[tuple[_Place, str]]:
    """Returns the place and the name in the file of each result of an op."""
    leaves: list[tuple[_Place, str]] = []
    several = len(outputs) > 1 or op.first_of_several
    for i, output in enumerate(outputs):
        one = isinstance(output, dict) and len(output) == 1
        kind, value = next(iter(output.items())) if one else ("", None)
        place: _Place = (i,) if several else ()
        if kind == "as_tensor":
            leaves.append((place, text_of(object_of(value, kind).get("name"))))
        elif kind in SYMBOLS:
            leaves.append((place, text_of(object_of(value, kind).get("as_name"))))
        elif kind == "as_tensors":
            rows = list_of(value, kind)
            leaves += [((*place, j), text_of(object_of(v, kind).get("name"))) for j, v in enumerate(rows)]
        elif kind != "as_none":
            raise bad_field(f"{op.name} gives a result of kind {kind[:40]!r}")
    return leaves
