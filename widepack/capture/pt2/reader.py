"""The program of a `torch.export.save` file: torch's JSON -> nodes of widepack's own form.

Only data is read: every op is looked up in the format's allow-list, no name of the file reaches Python's `getattr`, and an expression over sizes is read by a
grammar of two forms, `Symbol('s0', ...)` and a number times it. Programs have to be functional; of what `torch.export.export` writes before
`run_decompositions({})` these are taken too: batch_norm, dropout, `to` and `detach_` of a literal, as what they are in eval mode; and an op that writes into a
value which an op on a list of ops with fresh results made, and which nothing else reads (`relu_` after a convolution), as its functional twin.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.opset import OPS
from widepack_artifacts.program import Node, Ref, refs, substitute

from ...ir import ops
from ...ir.encoding import encode
from ..explain import user_line
from ...checkpoints.pt2_archive import DTYPES, Pt2File
from ...checkpoints.state_dict import Refused

WAY_OUT = "save the functional program: torch.export.save(exported.run_decompositions({}), path)"

_DROPOUT = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_ASSERTS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size", "_assert_async")
# Ops whose result is new memory, whatever they are given.
_FRESH = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear matmul bmm addmm baddbmm batch_norm group_norm layer_norm instance_norm
    _native_batch_norm_legit_no_training add sub mul div relu hardtanh silu hardswish leaky_relu elu sigmoid tanh max_pool2d avg_pool2d adaptive_avg_pool2d
    zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full clone
"""
_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d, 4: torch.preserve_format}
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_SYMBOL = re.compile(r"Symbol\('([A-Za-z_][A-Za-z0-9_]*)'(?:, (?:positive|integer|nonnegative)=True)*\)\Z")
_PRODUCT = re.compile(r"Mul\(Integer\(([0-9]{1,9})\), (Symbol\([^()]*\))\)\Z")


@dataclass(frozen=True, slots=True)
class Size:
    """A dynamic size of an input: `factor` times a symbol of the file. hint: what it was in the export's example, or 0."""

    factor: int
    symbol: str
    hint: int


@dataclass(frozen=True, slots=True)
class TensorInput:
    """A tensor that the program is called with."""

    value: str
    dtype: torch.dtype
    sizes: tuple[int | Size, ...]


@dataclass(frozen=True, slots=True)
class ReadProgram:
    """A program as data.

    weights: (value, name, role). inputs: tensors, or `{"const": literal}`, in the order of the call's leaves. outputs: `Ref`s, or literals. in_tree, out_tree:
    as the file has them. names: the forward's parameters, as far as they are told. ranges: bounds of each symbol. guards: torch's conditions, as text.
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
    types: Mapping[str, tuple[torch.dtype, int]]  # dtype and rank of the values that are tensors, as torch wrote them down


def read_program(file: Pt2File) -> ReadProgram:
    """The program of a file. Raises: Refused for one that is damaged, or holds what a member program cannot."""
    whole = file.program()
    module = _object(whole.get("graph_module"), "graph_module")
    graph, signature = _object(module.get("graph"), "graph"), _object(module.get("signature"), "signature")
    guards = whole.get("guards_code")
    if not isinstance(guards, list) or not all(isinstance(g, str) for g in guards):
        raise Refused(
            "is a torch.export program of a torch that does not write down under which conditions it holds; save it with torch 2.11 or newer"
        )
    metas = _object(graph.get("tensor_values"), "tensor_values")
    results = _results(signature)
    renamed: dict[str, str] = {}
    weights = []
    inputs: list[TensorInput | dict[str, Any]] = []
    for spec in _list(signature.get("input_specs"), "input_specs"):
        kind, row = _union(spec, "input_specs")
        if kind == "constant_input":
            inputs.append({"const": _literal(row.get("value"))})
        elif kind == "user_input":
            name = _tensor_name(row.get("arg"))
            if name is None:
                raise Refused(
                    "has an input that is no tensor, but a size or a number that may change; export it with tensors, and read sizes from their shapes"
                )
            renamed[name] = _clean(name)
            inputs.append(_input(renamed[name], metas.get(name)))
        elif kind in ("parameter", "buffer", "tensor_constant"):
            name, source = _text(_object(row.get("arg"), "arg").get("name")), _text(row.get(_NAMES[kind]))
            renamed[name] = _clean(f"w_{name}")
            role = kind if source in file.saved and kind != "tensor_constant" else "constant"
            weights.append((renamed[name], source, role))
        else:
            raise Refused(f"holds an input of kind {kind!r}, which has no form in an artifact")
    if unknown := [source for _, source, _ in weights if source not in file.tensors()]:
        raise Refused(f"is damaged: its program reads {unknown[0][:80]}, which it does not hold")
    nodes = _nodes(_list(graph.get("nodes"), "nodes"), renamed, metas, results)
    outputs: list[Any] = []
    for row in results:
        name = _tensor_name(row.get("arg"))
        if name is not None:
            outputs.append(Ref(_known(name, renamed)))
        elif isinstance(row.get("arg"), dict) and set(row["arg"]) & {"as_sym_int", "as_sym_bool", "as_sym_float"}:
            raise Refused("has an output that is a number which depends on the inputs' sizes; return tensors, and read sizes from their shapes")
        else:
            outputs.append(_literal(row.get("arg")))
    call = _call(module)
    return ReadProgram(
        tuple(weights),
        tuple(inputs),
        tuple(_alive(nodes, outputs)),
        tuple(outputs),
        _tree(call.get("in_spec")),
        _tree(call.get("out_spec")),
        _named_tuples(module.get("treespec_namedtuple_fields")),
        tuple(_text(n) for n in _list(call.get("forward_arg_names") or [], "forward_arg_names")),
        _ranges(whole.get("range_constraints")),
        tuple(guards),
        {renamed[name]: _kind(meta) for name, meta in metas.items() if name in renamed},
    )


def _kind(meta: Any) -> tuple[torch.dtype, int]:
    found = _object(meta, "tensor_values")
    dtype = DTYPES.get(found["dtype"]) if type(found.get("dtype")) is int else None
    if dtype is None:
        raise _bad("a value has no dtype that is known")
    return dtype, len(_list(found.get("sizes"), "sizes"))


def _results(signature: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The program's outputs, which are all the user's. Raises: Refused."""
    found = []
    for spec in _list(signature.get("output_specs"), "output_specs"):
        kind, row = _union(spec, "output_specs")
        if kind in ("buffer_mutation", "parameter_mutation", "user_input_mutation"):
            what = _text(row.get("buffer_name") or row.get("parameter_name") or row.get("user_input_name"))
            raise Refused(
                f"is a program that changes {what} when it runs; a member program has no side effects. Was it exported in train mode? Export module.eval()"
            )
        if kind != "user_output":
            raise Refused(f"has an output of kind {kind!r}, which no member has; export module.eval()")
        found.append(row)
    return found


_NAMES = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}


def _bad(what: str) -> Refused:
    return Refused(f"is damaged, or no program that is read: {what}")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(f"its {what} is no object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(f"its {what} is no list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or len(value) > 1000 or not value.isprintable():
        raise _bad(f"{str(value)[:40]!r} stands where a name should")
    return value


def _union(value: Any, what: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict) or len(value) != 1:
        raise _bad(f"an entry of its {what} is of no one kind")
    ((kind, row),) = value.items()
    return kind, _object(row, what)


def _clean(name: str) -> str:
    return re.sub(r"\W", "_", _text(name), flags=re.ASCII)


def _known(name: Any, renamed: Mapping[str, str]) -> str:
    if not isinstance(name, str) or name not in renamed:
        raise _bad(f"{str(name)[:60]!r} is read before it is made")
    return renamed[name]


def _tensor_name(arg: Any) -> str | None:
    if isinstance(arg, dict) and set(arg) == {"as_tensor"}:
        return _text(_object(arg["as_tensor"], "as_tensor").get("name"))
    return None


def _literal(arg: Any) -> Any:
    """None, a number or a string of the call itself."""
    if isinstance(arg, dict) and len(arg) == 1:
        ((kind, value),) = arg.items()
        if kind == "as_none":
            return None
        if kind == "as_float" and type(value) in (int, float, str):
            return _float(value)
        if (kind, type(value)) in (("as_int", int), ("as_bool", bool), ("as_string", str)):
            return value
    raise _bad(f"{str(arg)[:60]!r} is no number, string or None")


def _float(value: Any) -> float:
    if isinstance(value, str) and value in _FLOATS:
        return _FLOATS[value]
    if type(value) not in (int, float):
        raise _bad(f"{str(value)[:40]!r} is no number")
    return float(value)


def _input(value: str, meta: Any) -> TensorInput:
    found = _object(meta, "tensor_values")
    dtype = DTYPES.get(found["dtype"]) if type(found.get("dtype")) is int else None
    if dtype is None:
        raise _bad(f"the input {value} has no dtype that is known")
    return TensorInput(value, dtype, tuple(_size(s, value) for s in _list(found.get("sizes"), "sizes")))


def _size(value: Any, name: str) -> int | Size:
    if isinstance(value, dict) and set(value) == {"as_int"} and type(value["as_int"]) is int and value["as_int"] >= 0:
        size: int = value["as_int"]
        return size
    expr = value.get("as_expr") if isinstance(value, dict) and len(value) == 1 else None
    text = expr.get("expr_str") if isinstance(expr, dict) else None
    if not isinstance(text, str):
        raise _bad(f"the input {name} has a size that is none")
    product = _PRODUCT.match(text)
    symbol = _SYMBOL.match(product[2] if product else text)
    if symbol is None or (product and int(product[1]) < 1):
        raise Refused(f"has the input {name}, one of whose sizes is {text[:80]!r}; a size is a number, or a whole multiple of a dynamic dim")
    assert isinstance(expr, dict)
    hint = expr.get("hint")
    known = hint.get("as_int") if isinstance(hint, dict) else None
    return Size(int(product[1]) if product else 1, symbol[1], known if type(known) is int and 0 < known < 2**31 else 0)


def _ranges(value: Any) -> dict[str, tuple[int, int | None]]:
    found: dict[str, tuple[int, int | None]] = {}
    for symbol, row in _object(value, "range_constraints").items():
        ends = [_object(row, "range_constraints").get(k) for k in ("min_val", "max_val")]
        if any(e is not None and type(e) is not int for e in ends):
            raise _bad(f"the bounds of {symbol[:40]} are no numbers")
        found[symbol] = (ends[0] or 0, ends[1])
    return found


def _call(module: Mapping[str, Any]) -> dict[str, Any]:
    """The signature of the whole program's call."""
    for row in _list(module.get("module_call_graph"), "module_call_graph"):
        if isinstance(row, dict) and row.get("fqn") == "" and isinstance(row.get("signature"), dict):
            found: dict[str, Any] = row["signature"]
            return found
    raise _bad("it does not say how it is called")


def _tree(text: Any) -> Any:
    """A pytree's description, which the file holds as JSON in a string. Its contexts are read as JSON too, and never import anything."""
    if not isinstance(text, str):
        raise _bad("it does not say what it takes or gives")
    try:
        found = strict_json.parse(text.encode("utf-8"), "the tree of inputs or outputs")
    except (ArtifactError, UnicodeEncodeError) as error:
        raise _bad(str(error)) from None
    if not isinstance(found, list) or len(found) != 2 or found[0] != 1:
        raise _bad("its trees are of an unknown form")
    return found[1]


def _named_tuples(value: Any) -> dict[str, list[str]]:
    return {name: [_text(f) for f in _list(_object(row, "namedtuple").get("field_names"), "field_names")] for name, row in (value or {}).items()}


def _alive(nodes: Sequence[Node], outputs: Sequence[Any]) -> Iterator[Node]:
    """The nodes that an output needs: all ops are functional, so that the others do nothing."""
    needed = set(refs(list(outputs)))
    kept = []
    for node in reversed(nodes):
        if node.name in needed:
            needed |= set(refs((node.args, node.kwargs)))
            kept.append(node)
    return reversed(kept)


def _nodes(rows: Sequence[Any], renamed: dict[str, str], metas: Mapping[str, Any], results: Sequence[Any]) -> list[Node]:
    """All nodes, in order; `renamed` learns the name of every value."""
    made: list[Node] = []
    reads = _reads(rows, results)
    fresh: set[str] = set()
    aliases: set[str] = set()  # other names of values: what writes into one writes into both
    for number, value in enumerate(rows):
        row = _object(value, "nodes")
        target = _text(row.get("target"))
        metadata = row.get("metadata")
        source = user_line(str(metadata.get("stack_trace") or "")) if isinstance(metadata, dict) else ""
        source = source[:500] if source.isprintable() else ""
        name = _op_name(target)
        if name.split(".")[1] in _ASSERTS and name.startswith("aten."):
            continue
        if "higher_order" in target:
            raise Refused(_not_read(name, target, source))
        outputs = _list(row.get("outputs"), "outputs")
        given = [_object(a, "inputs") for a in _list(row.get("inputs"), "inputs")]
        args, kwargs = _arguments(name, given, renamed, source)
        base = name.split(".")[1]
        if base in _DROPOUT and len(args) == 3 and args[2] is False and isinstance(args[0], Ref):
            (only,) = outputs  # in a functional program a value and its alias are one
            renamed[_tensor_name(only) or ""] = args[0].name
            aliases.add(_tensor_name(only) or "")
            continue
        name, args, kwargs, first = _as_in_eval(name, args, kwargs, source)
        into = _tensor_name(given[0].get("arg")) if given else None
        if name not in OPS and base.endswith("_") and into is not None and into not in aliases and renamed[into] in fresh and reads[into] == 1:
            twin = name.replace(f".{base}.", f".{base[:-1]}.")
            name, base = (twin, base[:-1]) if twin in OPS else (name, base)
        if name not in OPS:
            raise Refused(_not_read(name, target, source))
        if name == "aten.squeeze.default":  # the rank is the captured one: a batch of 1 is no dim to drop
            meta = metas.get(_tensor_name(given[0].get("arg")) or "") if given else None
            ones = [d for d, size in enumerate(_list(_object(meta, "tensor_values").get("sizes"), "sizes")) if size == {"as_int": 1}]
            name, args = "aten.squeeze.dims", [*args, ones]
        nodes = list(_named(name, args, kwargs, outputs, source, number, renamed, first))
        made += nodes
        if base in _FRESH.split() and len(outputs) == 1:
            fresh.add(nodes[-1].name)
    return made


def _reads(rows: Sequence[Any], results: Sequence[Any]) -> Counter[str]:
    """How often each value is read, by its name in the file."""
    found: Counter[str] = Counter()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            found.update(v for k, v in value.items() if k in ("name", "as_name") and isinstance(v, str))
            value = list(value.values())
        if isinstance(value, list):
            for part in value:
                walk(part)

    walk([given.get("arg") for row in rows if isinstance(row, dict) for given in row.get("inputs") or () if isinstance(given, dict)])
    walk([row.get("arg") for row in results])
    return found


def _op_name(target: str) -> str:
    """`torch.ops.aten.linear.default` -> `aten.linear.default`, `_operator.mul` -> `operator.mul`."""
    name = target.removeprefix("torch.ops.")
    if name.startswith("_operator."):
        name = name[1:]
    return name if name.count(".") else f"{name}."


def _at(target: str, source: str) -> str:
    return f"{target.removeprefix('torch.ops.')}{f', from {source}' if source else ''}"


def _not_read(name: str, target: str, source: str) -> str:
    base = name.split(".")[1]
    if "higher_order" in target:
        return f"holds a region of its own ({_at(target, source)}); {WAY_OUT}"
    if base.endswith("_") and not base.endswith("__"):
        return f"writes into a value ({_at(target, source)}); {WAY_OUT}"
    return f"holds the op {_at(target, source)}, which a member program cannot have; {WAY_OUT}, and if that does not help, please report it"


def _as_in_eval(name: str, args: list[Any], kwargs: dict[str, Any], source: str) -> tuple[str, list[Any], dict[str, Any], bool]:
    """What `run_decompositions({})` makes of an op in eval mode, for the few that are taken without it; and whether the first of several results is meant."""
    if name in ("aten.detach_.default", "aten.lift_fresh_copy.default"):
        return "aten.clone.default", args, kwargs, False
    if name == "aten.batch_norm.default":
        if args[5:6] != [False] or args[3:4] == [None] or args[4:5] == [None]:
            raise Refused(f"normalises by the batch itself ({_at(name, source)}), as in train mode; export module.eval()")
        return "aten._native_batch_norm_legit_no_training.default", [*args[:5], *args[6:8]], kwargs, True
    if name in ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device"):
        at = 2 if name == "aten.to.device" else 1
        dtype = {"dtype": args[at]} if len(args) > at else {}
        return "aten._to_copy.default", args[:1], {**dtype, **{k: v for k, v in kwargs.items() if k in ("dtype", "memory_format")}}, False
    return name, args, kwargs, False


def _arguments(name: str, given: Sequence[Mapping[str, Any]], renamed: Mapping[str, str], source: str) -> tuple[list[Any], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for row in given:
        value = _value(row.get("arg"), renamed, name, source)
        if row.get("kind") == 2:
            key = _text(row.get("name"))
            if key not in ("pin_memory", "layout") and value is not None:
                kwargs[key] = encode(value)
        elif kwargs:
            raise _bad(f"{name} has a positional argument after one by name")
        else:
            args.append(encode(value))
    if name in OPS and name.startswith("aten."):
        known = [a for a, _, _ in ops.arguments(name)]
        if len(args) > len(known) or not set(kwargs) <= set(known):
            raise _bad(f"{name} has arguments that the op does not take")
    return args, kwargs


def _value(arg: Any, renamed: Mapping[str, str], op: str, source: str) -> Any:
    """One argument as torch takes it, with `Ref`s for values."""
    if not isinstance(arg, dict) or len(arg) != 1:
        raise _bad(f"an argument of {op} is of no one kind")
    ((kind, value),) = arg.items()

    def ref(row: Any) -> Ref:
        return Ref(_known(row.get("name") if isinstance(row, dict) else None, renamed))

    def sym(row: Any) -> Any:
        """A number, or the name of one."""
        if isinstance(row, dict) and set(row) == {"as_name"}:
            return Ref(_known(row["as_name"], renamed))
        return _literal(row)

    if kind in ("as_none", "as_int", "as_float", "as_bool", "as_string"):
        return _literal(arg)
    if kind == "as_tensor":
        return ref(value)
    if kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
        return sym(value)
    if kind in ("as_optional_tensor",):
        return _optional(value, ref)
    if kind == "as_complex":
        row = _object(value, kind)
        return complex(_float(row.get("real")), _float(row.get("imag")))
    if kind == "as_scalar_type":
        return _one_of(DTYPES, value, "dtype")
    if kind == "as_memory_format":
        return _one_of(_FORMATS, value, "memory format")
    if kind == "as_layout":
        return torch.strided if value == 7 else _one_of({}, value, "layout")
    if kind == "as_device":
        return torch.device("cpu")  # wherever the program runs
    items = _list(value, kind) if kind.endswith("s") and kind.startswith("as_") else []
    if kind == "as_tensors":
        return [ref(v) for v in items]
    if kind == "as_optional_tensors":
        return [_optional(v, ref) for v in items]
    if kind in ("as_sym_ints", "as_sym_bools", "as_sym_floats"):
        return [sym(v) for v in items]
    if kind in ("as_ints", "as_bools", "as_strings", "as_floats"):
        one = {"as_ints": "as_int", "as_bools": "as_bool", "as_strings": "as_string", "as_floats": "as_float"}[kind]
        return [_literal({one: v}) for v in items]
    if kind == "as_int_lists":
        return [[_literal({"as_int": v}) for v in _list(row, kind)] for row in items]
    raise Refused(
        f"gives {op}{f', from {source},' if source else ''} an argument of kind {kind[:40]!r}, which a member program cannot have; {WAY_OUT}"
    )


def _optional(value: Any, ref: Any) -> Any:
    kind, row = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
    if kind == "as_none":
        return None
    return ref(row if kind == "as_tensor" else None)


def _one_of(table: Mapping[int, Any], value: Any, what: str) -> Any:
    if type(value) is not int or value not in table:
        raise Refused(f"names the {what} {str(value)[:20]}, which is unknown")
    return table[value]


def _named(
    op: str, args: list[Any], kwargs: dict[str, Any], outputs: Sequence[Any], source: str, number: int, renamed: dict[str, str], first: bool
) -> Iterator[Node]:
    """An op's node under the name that the file gives its result; where it gives several, a `getitem` for each."""
    leaves: list[tuple[tuple[int, ...], str]] = []
    several = len(outputs) > 1 or first
    for i, output in enumerate(outputs):
        kind, value = next(iter(output.items())) if isinstance(output, dict) and len(output) == 1 else ("", None)
        at: tuple[int, ...] = (i,) if several else ()
        if kind == "as_tensor":
            leaves.append((at, _text(_object(value, kind).get("name"))))
        elif kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
            leaves.append((at, _text(_object(value, kind).get("as_name"))))
        elif kind == "as_tensors":
            leaves += [((*at, j), _text(_object(v, kind).get("name"))) for j, v in enumerate(_list(value, kind))]
        elif kind != "as_none":
            raise _bad(f"{op} gives a result of kind {kind[:40]!r}")
    taken = set(renamed.values())
    if any(_clean(name) in taken or name in renamed for _, name in leaves):
        raise _bad(f"two values are called {leaves[0][1][:60]!r}")
    renamed.update({name: _clean(name) for _, name in leaves})
    if len(leaves) == 1 and leaves[0][0] == ():
        yield Node(renamed[leaves[0][1]], op, tuple(args), kwargs, "", source)
        return
    whole = f"n{number}_{op.split('.')[1].strip('_')}"
    while whole in taken or whole in renamed.values():
        whole += "_"
    renamed[f" {number}"] = whole  # so that no later value takes the name
    yield Node(whole, op, tuple(args), kwargs, "", source)
    parts: dict[tuple[int, ...], str] = {(): whole}
    for at, name in leaves:
        for depth in range(1, len(at)):
            if at[:depth] not in parts:
                parts[at[:depth]] = renamed[f" {number} {at[:depth]}"] = f"{whole}_{at[depth - 1]}"
                yield Node(parts[at[:depth]], "operator.getitem", (Ref(parts[at[: depth - 1]]), at[depth - 1]), {}, "", source)
        yield Node(renamed[name], "operator.getitem", (Ref(parts[at[:-1]]), at[-1]), {}, "", source)


def numbered(program: ReadProgram) -> list[Any]:
    """The program without the names of its values and lines: equal for two files of one model."""
    order: dict[str, int] = {}
    for name in (
        *(w[0] for w in program.weights),
        *(i.value for i in program.inputs if isinstance(i, TensorInput)),
        *(n.name for n in program.nodes),
    ):
        order.setdefault(name, len(order))

    def plain(value: Any) -> str:
        """As text, so that NaN equals itself."""
        return repr(substitute(value, lambda name: ("value", order.get(name))))

    made: list[Any] = [(n.op, plain(n.args), plain(n.kwargs)) for n in program.nodes]
    return [*made, plain(list(program.outputs))]
