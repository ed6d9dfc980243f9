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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.program import Node, Ref, substitute

from ...checkpoints.pt2_archive import DTYPES, Pt2File
from ...checkpoints.state_dict import RefusedFile
from .fields import (
    bad_field,
    clean_text,
    list_of,
    literal_of,
    object_of,
    renamed_value,
    tensor_name,
    text_of,
    union_of,
)
from .nodes import live_nodes, read_nodes

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
        types: Dtype and rank that the file gives to each tensor value.
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
    types: Mapping[str, tuple[torch.dtype, int]]


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
    nodes = read_nodes(list_of(graph.get("nodes"), "nodes"), renamed, metas, results)
    outputs = [_output(row.get("arg"), renamed) for row in results]
    call = _call(module)
    return ReadProgram(
        weights=tuple(weights),
        inputs=tuple(inputs),
        nodes=tuple(live_nodes(nodes, outputs)),
        outputs=tuple(outputs),
        in_tree=_tree(call.get("in_spec")),
        out_tree=_tree(call.get("out_spec")),
        named_tuples=_named_tuples(module.get("treespec_namedtuple_fields")),
        names=tuple(text_of(n) for n in list_of(call.get("forward_arg_names") or [], "forward_arg_names")),
        ranges=_ranges(whole.get("range_constraints")),
        guards=guards,
        types={renamed[name]: _dtype_and_rank(meta) for name, meta in metas.items() if name in renamed},
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
    if isinstance(arg, dict) and set(arg) & {"as_sym_int", "as_sym_bool", "as_sym_float"}:
        raise RefusedFile(
            "has an output that is a number which depends on the inputs' sizes; return tensors, and read "
            "sizes from their shapes"
        )
    return literal_of(arg)


def _dtype_and_rank(meta: Any) -> tuple[torch.dtype, int]:
    value = object_of(meta, "tensor_values")
    dtype = DTYPES.get(value["dtype"]) if type(value.get("dtype")) is int else None
    if dtype is None:
        raise bad_field("a value has no known dtype")
    return dtype, len(list_of(value.get("sizes"), "sizes"))


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
    row = object_of(meta, "tensor_values")
    dtype = DTYPES.get(row["dtype"]) if type(row.get("dtype")) is int else None
    if dtype is None:
        raise bad_field(f"the input {value} has no known dtype")
    return TensorInput(value, dtype, tuple(_size(s, value) for s in list_of(row.get("sizes"), "sizes")))


def _size(value: Any, name: str) -> int | Size:
    """Returns one size of an input: a number, or a whole multiple of a dynamic dim."""
    number = value.get("as_int") if isinstance(value, dict) and len(value) == 1 else None
    if type(number) is int and number >= 0:
        return number
    expr = value.get("as_expr") if isinstance(value, dict) and len(value) == 1 else None
    text = expr.get("expr_str") if isinstance(expr, dict) else None
    if not isinstance(text, str):
        raise bad_field(f"the input {name} has a size that is neither a number nor an expression")
    product = _PRODUCT.match(text)
    symbol = _SYMBOL.match(product[2] if product else text)
    if symbol is None or (product and int(product[1]) < 1):
        raise RefusedFile(
            f"has the input {name}, one of whose sizes is {text[:80]!r}; a size is a number, or a whole "
            "multiple of a dynamic dim"
        )
    assert isinstance(expr, dict)
    hint = expr.get("hint")
    known = hint.get("as_int") if isinstance(hint, dict) else None
    in_example = known if type(known) is int and 0 < known < 2**31 else 0
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
