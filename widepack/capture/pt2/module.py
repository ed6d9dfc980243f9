"""Runs the program of a `.pt2` file as an `nn.Module`, and reads how it is called and what it returns."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from torch import nn

from widepack_artifacts.entry import Parameter
from widepack_artifacts.program import Output, Program, Slot
from widepack_artifacts.tree import Tree

from ...checkpoints.pt2_archive import Pt2File
from ...checkpoints.state_dict import RefusedFile
from ...ir.encoding import type_of
from ...ir.fake_values import CPU
from ...ir.torch_internals import submodules_of
from ...runtime.graph_module import graph_module
from ...spec.dtypes import dtype_name
from ..exported import state_tensors
from .reader import ReadProgram, TensorInput


class ProgramModule(nn.Module):
    """The program of a `.pt2` file as a module.

    It takes the inputs of the exported module, and returns its result as a flat list. Its own attributes
    begin with `_widepack_`, because no weight has such a name.
    """

    def __init__(self, file: Pt2File, read: ReadProgram) -> None:
        super().__init__()
        self._add_weights(file, {source for _, source, _ in read.weights})
        self._widepack_sources = [source for _, source, _ in read.weights]
        self._widepack_signature, leaves = signature_of(read)
        types = {source: type_of(t) for source in self._widepack_sources for t in [file.get(source)]}
        self._widepack_program = Program(
            tuple(Slot(value, source, "shared", types[source]) for value, source, _ in read.weights),
            tuple(Slot(item.value, name, "shared", f"{dtype_name(item.dtype)}[]") for name, item in leaves),
            read.nodes,
            tuple(Output(o, "shared") for o in read.outputs if hasattr(o, "name")),
        )
        self._widepack_program.check()
        self._widepack_run = graph_module(self._widepack_program, CPU).forward
        self._widepack_outputs = read.outputs

    def _add_weights(self, file: Pt2File, read: set[str]) -> None:
        """Registers the file's parameters and buffers, and the constants that the program reads."""
        parameters: dict[object, nn.Parameter] = {}  # tied weights stay one parameter
        for name in file.tensors():
            parent: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in submodules_of(parent):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            if file.is_parameter(name):
                place = file.place(name)
                if place not in parameters:
                    parameters[place] = nn.Parameter(file.read(name), requires_grad=False)
                parent.register_parameter(last, parameters[place])
            elif name in file.saved or name in read:
                parent.register_buffer(last, file.read(name), persistent=name in file.saved)

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs the program on the exported module's inputs. Returns the leaves of its result, in order."""
        positions = [p for p in self._widepack_signature if p.kind == "positional"]
        arguments = {**dict(zip((p.name for p in positions), args)), **kwargs}
        values: list[Any] = [None] * len(self._widepack_program.inputs)
        for parameter in self._widepack_signature:
            _fill(parameter.tree, arguments.get(parameter.name), values)
        by_name = state_tensors(self)
        outs = iter(self._widepack_run(*(by_name[s] for s in self._widepack_sources), *values))
        return [next(outs) if hasattr(o, "name") else o for o in self._widepack_outputs]


def _fill(tree: Tree, value: Any, into: list[Any]) -> None:
    """Puts the tensors of one argument into the list of inputs, each at its number."""
    ((form, inner),) = tree.items()
    if form == "leaf":
        into[inner] = value
    elif form in ("tuple", "list"):
        for part, v in zip(inner, value):
            _fill(part, v, into)
    elif form == "dict":
        for key, part in inner:
            _fill(part, value[key], into)


def signature_of(read: ReadProgram) -> tuple[tuple[Parameter, ...], list[tuple[str, TensorInput]]]:
    """Returns the parameters of a program's call, and its tensor inputs with their names. Raises:
    RefusedFile.
    """
    items = iter(read.inputs)
    leaves: list[tuple[str, TensorInput]] = []

    def leaf(name: str) -> Tree:
        item = next(items, None)
        if item is None:
            raise RefusedFile("is damaged: its call has more inputs than its program")
        if isinstance(item, TensorInput):
            leaves.append((name, item))
            return {"leaf": len(leaves) - 1}
        return item

    def refuse(kind: str, context: Any, children: list[Any], name: str) -> Tree:
        raise RefusedFile(
            f"takes the input {name} of the type {kind[:80]}; inputs are tensors, numbers, strings, None, "
            "and lists, tuples and dicts of them"
        )

    def tree(node: Any, name: str) -> Tree:
        return _tree(node, name, leaf, refuse)

    _, _, parts = _spec(read.in_tree)
    if len(parts) != 2:
        raise RefusedFile("is damaged: its call has no arguments by position and by name")
    (_, _, positional), (_, context, named) = _spec(parts[0]), _spec(parts[1])
    parameters = []
    for i, part in enumerate(positional):
        name = read.names[i] if i < len(read.names) else f"x{i}"
        parameters.append(Parameter(name, "positional", tree(part, name)))
    for key, part in zip(_keys(context, len(named)), named):
        parameters.append(Parameter(str(key), "keyword", tree(part, str(key))))
    if next(items, None) is not None or len({p.name for p in parameters}) != len(parameters):
        raise RefusedFile("is damaged: its call has fewer inputs than its program")
    return tuple(parameters), leaves


def _tree(
    node: Any, name: str, leaf: Callable[[str], Tree], other: Callable[[str, Any, list[Any], str], Tree]
) -> Tree:
    """Returns the tree of a pytree's description.

    leaf: makes a leaf of its name. other: makes the tree of a class of its name, context and children.
    """
    kind, context, children = _spec(node)
    if kind is None:
        return leaf(name)
    if kind in ("builtins.tuple", "builtins.list"):
        parts = [_tree(c, f"{name}.{i}", leaf, other) for i, c in enumerate(children)]
        return {kind.removeprefix("builtins."): parts}
    if kind == "builtins.dict":
        rows = zip(_keys(context, len(children)), children)
        return {"dict": [[k, _tree(c, f"{name}.{k}", leaf, other)] for k, c in rows]}
    return other(kind, context, children, name)


def _spec(node: Any) -> tuple[str | None, Any, list[Any]]:
    """Returns the type (None: a leaf), context and children of a node in a pytree's description."""
    if (
        not isinstance(node, dict)
        or not {"type", "context", "children_spec"} <= set(node)
        or not isinstance(node["children_spec"], list)
    ):
        raise RefusedFile("is damaged: the tree of its inputs or outputs has an unknown form")
    kind = node["type"]
    if kind is not None and not isinstance(kind, str):
        raise RefusedFile("is damaged: the tree of its inputs or outputs has a type that is not a name")
    return kind, node["context"], node["children_spec"]


def _context(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text  # a plain name


def _keys(context: Any, count: int) -> list[str | int]:
    keys = _context(context)
    if not isinstance(keys, list) or len(keys) != count or not all(isinstance(k, (str, int)) for k in keys):
        raise RefusedFile("is damaged: a dict of its inputs or outputs has no keys")
    return keys


def result_of(read: ReadProgram) -> Tree:
    """Returns the tree of a program's result. Classes with named values become `Output`s, as in a capture."""
    outputs, numbers = iter(read.outputs), itertools.count()

    def leaf(name: str) -> Tree:
        value = next(outputs, _END)
        if value is _END:
            raise RefusedFile("is damaged: its result has more leaves than its program gives")
        return {"leaf": next(numbers)} if hasattr(value, "name") else {"const": value}

    def fields(kind: str, context: Any, children: list[Any], name: str) -> Tree:
        class_name, keys, absent = _named_fields(kind, context, len(children), read)
        rows = [[k, _tree(c, k, leaf, fields)] for k, c in zip(keys, children)]
        return {"output": [class_name, rows + [[k, {"const": None}] for k in absent]]}

    result = _tree(read.out_tree, "output", leaf, fields)
    if next(outputs, _END) is not _END:
        raise RefusedFile("is damaged: its result has fewer leaves than its program gives")
    return result


def _named_fields(kind: str, context: Any, count: int, read: ReadProgram) -> tuple[str, list[str], list[str]]:
    """Returns the name of a class with named values, its fields, and the fields that are None.

    The context of a named tuple is its type's name, that of a dataclass two lists, and that of other classes
    a list.
    """
    known = _context(context)
    absent: Any = []
    if isinstance(known, str) and known in read.named_tuples:
        kind, fields = known, read.named_tuples[known]
    elif isinstance(known, list) and len(known) == 2 and all(isinstance(part, list) for part in known):
        fields, absent = known
    else:
        fields = known
    is_list = isinstance(fields, list) and len(fields) == count
    if not is_list or not all(isinstance(f, str) for f in (*fields, *absent)):
        raise RefusedFile(
            f"gives a {kind[:80]}; outputs are tensors, numbers, strings and None, in tuples, lists, dicts "
            "and classes of named values"
        )
    return kind.rpartition(".")[2], fields, absent


_END = object()
