"""Reads the program of a `.pt2` file, which `torch.export.save` wrote: torch's JSON becomes nodes of a member
program.

The file is read as data only. Every op is looked up in the format's allow-list, no name of the file reaches
Python's `getattr`, and an expression over sizes has one of two forms: `Symbol('s0', ...)`, or a number times
it.

Programs must be functional. A program that was saved without `run_decompositions({})` may have these ops too:
batch_norm, dropout, `to` and `detach_` of a literal, which are read as in eval mode; and an op that writes
into a value (`relu_` after a convolution), if an op with a fresh result made that value and nothing else
reads it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.opset import OPS
from widepack_artifacts.program import Node, Ref, refs, substitute

from ...checkpoints.pt2_archive import DTYPES, Pt2File
from ...checkpoints.state_dict import RefusedFile
from ...ir.edit import needed
from ..explain import ASSERTS, user_line
from .fields import (
    SYMBOLS,
    WAY_OUT,
    bad_field,
    clean_text,
    list_of,
    literal_of,
    object_of,
    read_arguments,
    renamed_value,
    tagged,
    tensor_name,
    text_of,
    union_of,
)

_SYMBOL = re.compile(r"Symbol\('([A-Za-z_][A-Za-z0-9_]*)'(?:, (?:positive|integer|nonnegative)=True)*\)\Z")
_LONGEST_GUARD, _ALL_GUARDS = 2_000, 100_000  # characters; torch writes some hundreds
_PRODUCT = re.compile(r"Mul\(Integer\(([0-9]{1,9})\), (Symbol\([^()]*\))\)\Z")


@dataclass(frozen=True, slots=True)
class Size:
    """A dynamic size of an input: `factor` times a symbol of the file. hint: the symbol in the export's
    example, or 0.
    """

    factor: int
    symbol: str
    hint: int


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor input of the program. value: its name in the program."""

    value: str
    dtype: torch.dtype
    sizes: tuple[int | Size, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadProgram:
    """The program of a `.pt2` file as data.

    Attributes:
        weights: (name in the program, name in the file, role).
        inputs: Tensors, or `{"const": literal}`, in the order of the call's leaves.
        nodes: The nodes that the outputs need.
        outputs: `Ref`s, or literals.
        in_tree: How the file describes the structure of the inputs.
        out_tree: How the file describes the structure of the result.
        named_tuples: Type name -> field names.
        names: The forward's parameters, as far as the file has them.
        ranges: Symbol -> bounds.
        guards: Torch's conditions on sizes, as text.
        types: Dtype and sizes that the file gives to each tensor value.
    """

    weights: tuple[tuple[str, str, str], ...]
    inputs: tuple[TensorInput | dict[str, Any], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    in_tree: Any
    out_tree: Any
    named_tuples: Mapping[str, list[str]]
    names: tuple[str, ...]
    ranges: Mapping[str, tuple[int, int | None]]
    guards: tuple[str, ...]
    types: Mapping[str, tuple[torch.dtype, list[Any]]]


def read_program(file: Pt2File) -> ReadProgram:
    """Returns the program of a file.

    Raises:
        RefusedFile: The file is damaged, or has something that a member program cannot have.
    """
    whole = file.program()
    module = object_of(whole.get("graph_module"), "graph_module")
    graph = object_of(module.get("graph"), "graph")
    signature = object_of(module.get("signature"), "signature")
    guards = _guards(whole)
    metas = object_of(graph.get("tensor_values"), "tensor_values")
    results = _results(signature)
    renamed: dict[str, str] = {}
    inputs, weights = _inputs_and_weights(file, signature, metas, renamed)
    nodes = _read_nodes(list_of(graph.get("nodes"), "nodes"), renamed, metas, results)
    outputs = [_output(row.get("arg"), renamed) for row in results]
    call = _call(module)
    return ReadProgram(
        weights=tuple(weights),
        inputs=tuple(inputs),
        nodes=tuple(needed(nodes, refs(outputs))),
        outputs=tuple(outputs),
        in_tree=_tree(call.get("in_spec")),
        out_tree=_tree(call.get("out_spec")),
        named_tuples=_named_tuples(module.get("treespec_namedtuple_fields")),
        names=tuple(text_of(n) for n in list_of(call.get("forward_arg_names") or [], "forward_arg_names")),
        ranges=_ranges(whole.get("range_constraints")),
        guards=guards,
        types={renamed[n]: _dtype_and_sizes(meta) for n, meta in metas.items() if n in renamed},
    )


def _guards(whole: Mapping[str, Any]) -> tuple[str, ...]:
    guards = whole.get("guards_code")
    if not isinstance(guards, list) or not all(isinstance(g, str) for g in guards):
        raise RefusedFile(
            "is a torch.export program of a torch that does not store the conditions of a program; "
            "save it with torch 2.11 or newer"
        )
    longest = max(map(len, guards), default=0)
    if longest > _LONGEST_GUARD or sum(map(len, guards)) > _ALL_GUARDS:
        raise RefusedFile(
            f"has {len(guards)} conditions on sizes, the longest of {longest} characters; at most"
            f" {_LONGEST_GUARD} characters of one and {_ALL_GUARDS} of all are read; export the model with"
            " fewer conditions, or give its state dict and --model"
        )
    return tuple(guards)


def _inputs_and_weights(
    file: Pt2File, signature: Mapping[str, Any], metas: Mapping[str, Any], renamed: dict[str, str]
) -> tuple[list[TensorInput | dict[str, Any]], list[tuple[str, str, str]]]:
    """Returns the inputs and weights of the program, and adds their names to `renamed`."""
    weights = []
    inputs: list[TensorInput | dict[str, Any]] = []
    for spec in list_of(signature.get("input_specs"), "input_specs"):
        kind, row = union_of(spec, "input_specs")
        if kind == "constant_input":
            inputs.append({"const": literal_of(row.get("value"))})
        elif kind == "user_input":
            name = tensor_name(row.get("arg"))
            if name is None:
                raise RefusedFile(
                    "has an input that is not a tensor, but a size or a number that may change; "
                    "export it with tensors, and read sizes from their shapes"
                )
            renamed[name] = clean_text(name)
            inputs.append(_input(renamed[name], metas.get(name)))
        elif kind in _NAMES:
            name = text_of(object_of(row.get("arg"), "arg").get("name"))
            source = text_of(row.get(_NAMES[kind]))
            renamed[name] = clean_text(f"w_{name}")
            role = kind if source in file.saved and kind != "tensor_constant" else "constant"
            weights.append((renamed[name], source, role))
        else:
            raise RefusedFile(f"holds an input of kind {kind!r}, which has no form in an artifact")
    if unknown := [source for _, source, _ in weights if source not in file.tensors()]:
        raise RefusedFile(f"is damaged: its program reads {unknown[0][:80]}, which it does not contain")
    return inputs, weights


def _output(arg: Any, renamed: Mapping[str, str]) -> Any:
    """Returns one output: a `Ref` to a tensor, or a literal."""
    name = tensor_name(arg)
    if name is not None:
        return Ref(renamed_value(name, renamed))
    if isinstance(arg, dict) and set(arg) & set(SYMBOLS):
        raise RefusedFile(
            "has an output that is a number which depends on the inputs' sizes; return tensors, and read "
            "sizes from their shapes"
        )
    return literal_of(arg)


def _dtype_and_sizes(meta: Any, what: str = "a value") -> tuple[torch.dtype, list[Any]]:
    """Returns the dtype and the sizes that the file has for a tensor. what: the tensor, for the message."""
    value = object_of(meta, "tensor_values")
    dtype = DTYPES.get(value["dtype"]) if type(value.get("dtype")) is int else None
    if dtype is None:
        raise bad_field(f"{what} has no known dtype")
    return dtype, list_of(value.get("sizes"), "sizes")


def _results(signature: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the program's outputs. Refuses a program with side effects, which has other outputs too."""
    results = []
    for spec in list_of(signature.get("output_specs"), "output_specs"):
        kind, row = union_of(spec, "output_specs")
        if kind in ("buffer_mutation", "parameter_mutation", "user_input_mutation"):
            what = text_of(row.get("buffer_name") or row.get("parameter_name") or row.get("user_input_name"))
            raise RefusedFile(
                f"is a program that changes {what} when it runs; a member program has no side effects. Was "
                "it exported in train mode? Export module.eval()"
            )
        if kind != "user_output":
            raise RefusedFile(
                f"has an output of kind {kind!r}, which a member program cannot have; export module.eval()"
            )
        results.append(row)
    return results


_NAMES = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}


def _input(value: str, meta: Any) -> TensorInput:
    dtype, sizes = _dtype_and_sizes(meta, f"the input {value}")
    return TensorInput(value, dtype, tuple(_size(s, value) for s in sizes))


def _size(value: Any, name: str) -> int | Size:
    """Returns one size of an input: a number, or a whole multiple of a dynamic dim."""
    kind, content = tagged(value)
    if kind == "as_int" and type(content) is int and content >= 0:
        return content
    expr = content if kind == "as_expr" and isinstance(content, dict) else {}
    text = expr.get("expr_str")
    if not isinstance(text, str):
        raise bad_field(f"the input {name} has a size that is neither a number nor an expression")
    product = _PRODUCT.match(text)
    symbol = _SYMBOL.match(product[2] if product else text)
    if symbol is None or (product and int(product[1]) < 1):
        raise RefusedFile(
            f"has the input {name}, one of whose sizes is {text[:80]!r}; a size is a number, or a whole "
            "multiple of a dynamic dim"
        )
    kind, hint = tagged(expr.get("hint"))
    in_example = hint if kind == "as_int" and type(hint) is int and 0 < hint < 2**31 else 0
    return Size(int(product[1]) if product else 1, symbol[1], in_example)


def _ranges(value: Any) -> dict[str, tuple[int, int | None]]:
    ranges: dict[str, tuple[int, int | None]] = {}
    for symbol, row in object_of(value, "range_constraints").items():
        ends = [object_of(row, "range_constraints").get(k) for k in ("min_val", "max_val")]
        if any(e is not None and type(e) is not int for e in ends):
            raise bad_field(f"the bounds of {symbol[:40]} are not numbers")
        ranges[symbol] = (ends[0] or 0, ends[1])
    return ranges


def _call(module: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the signature of the program's call."""
    for row in list_of(module.get("module_call_graph"), "module_call_graph"):
        if isinstance(row, dict) and row.get("fqn") == "" and isinstance(row.get("signature"), dict):
            signature: dict[str, Any] = row["signature"]
            return signature
    raise bad_field("it does not contain its call")


def _tree(text: Any) -> Any:
    """Returns a pytree's description, which the file has as JSON in a string. Nothing in it is imported."""
    if not isinstance(text, str):
        raise bad_field("it does not contain its inputs or outputs")
    try:
        tree = strict_json.parse(text.encode("utf-8"), "the tree of inputs or outputs")
    except (ArtifactError, UnicodeEncodeError) as error:
        raise bad_field(str(error)) from None
    if not isinstance(tree, list) or len(tree) != 2 or tree[0] != 1:
        raise bad_field("its trees are of an unknown form")
    return tree[1]


def _named_tuples(value: Any) -> dict[str, list[str]]:
    return {
        name: [text_of(f) for f in list_of(object_of(row, "namedtuple").get("field_names"), "field_names")]
        for name, row in (value or {}).items()
    }


def numbered(program: ReadProgram) -> list[Any]:
    """Returns the program without names and source lines: two files of one model are equal then."""
    order: dict[str, int] = {}
    for name in (
        *(w[0] for w in program.weights),
        *(i.value for i in program.inputs if isinstance(i, TensorInput)),
        *(n.name for n in program.nodes),
    ):
        order.setdefault(name, len(order))

    def plain(value: Any) -> str:
        """Returns a text, so that NaN equals itself."""
        return repr(substitute(value, lambda name: ("value", order.get(name))))

    rows: list[Any] = [(n.op, plain(n.args), plain(n.kwargs)) for n in program.nodes]
    return [*rows, plain(list(program.outputs))]


_DROPOUT = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
# Ops whose result is new memory, whatever their inputs are.
_FRESH = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul bmm addmm baddbmm
    batch_norm group_norm layer_norm instance_norm _native_batch_norm_legit_no_training
    add sub mul div relu hardtanh silu hardswish leaky_relu elu sigmoid tanh
    max_pool2d avg_pool2d adaptive_avg_pool2d
    zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full clone
"""


def _read_nodes(
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
        if name.split(".")[1] in ASSERTS and name.startswith("aten."):
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

    inputs = [a for row in rows if isinstance(row, dict) for a in row.get("inputs") or ()]
    walk([row.get("arg") for row in (*inputs, *results) if isinstance(row, dict)])
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
        kind, value = tagged(output)
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
