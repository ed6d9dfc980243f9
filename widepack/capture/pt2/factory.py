"""Members that are torch.export programs: a file brings its own graph, conditions and example inputs, and needs no `--model`.

The program is the member. What `torch.export.load(path).module()` would run is captured as data (pt2_programs.py), run node by node where a build asks for the
member's own answers, and held to the bounds and conditions that torch wrote down. All members' programs must be one but for weights and constants; members of
other shapes may differ in sizes too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.manifest import Parameter
from widepack_artifacts.program import Output, Program, Slot
from widepack_artifacts.tree import Tree, paths

from ..capture import Captured
from ...checkpoints.discovery import Checkpoint
from ...ir.encoding import dtype_name, type_of
from ..guards import Leaf, factor_of, guards_from
from ...errors import CaptureError, CheckpointError, MemberMismatch, UsageError
from ...checkpoints.alignment import Factory
from ...checkpoints.pt2_archive import Pt2File
from .reader import WAY_OUT, ReadProgram, Size, TensorInput, numbered, read_program
from ...ir.fake_values import CPU, Fakes, replay
from ...runtime.graph_module import graph_module
from ...spec.draws import Source, draw
from ...spec.input_spec import InputSpec, parse_inputs
from ...checkpoints.state_dict import Refused

_EXAMPLE = 4  # the size of a dim whose example the file does not tell


_READ: WeakKeyDictionary[Pt2File, ReadProgram] = WeakKeyDictionary()


def _read(file: Pt2File) -> ReadProgram:
    """The program of an open file, read once. Raises: Refused."""
    if file not in _READ:
        _READ[file] = read_program(file)
    return _READ[file]


def unreadable(checkpoint: Checkpoint) -> str:
    """Why a checkpoint's program cannot be a member's, in words; empty when it can, or where there is no program."""
    try:
        if checkpoint.program is not None:
            _read(checkpoint.program)
    except Refused as refused:
        return str(refused)
    return ""


class Programs(Factory):
    """The factory of checkpoints that are programs, each of which can be read."""

    def __init__(self) -> None:
        super().__init__("the exported programs", _nothing, {})
        self.takes_state_dict = True  # each program has the sizes of its own weights

    def of(self, checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> nn.Module:
        """The program of a checkpoint as a module, with its weights under their names and its constants beside them."""
        file = _file(checkpoint)
        try:
            return ProgramModule(file, _read(file)).eval()
        except (Refused, ArtifactError) as error:
            raise CheckpointError(f"checkpoint {checkpoint.path}: {error}") from None
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:  # names that no module has, values that no op takes
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: is damaged: its program cannot be put together: {' '.join(str(error).split())[:200]}"
            ) from error

    def captured(self, checkpoints: Sequence[Checkpoint], inputs: Sequence[str] | None) -> Captured:
        """The one program of these members, under the conditions of all of them.

        inputs: specs that name dims and bound integers, or None: as the files say. Raises: CaptureError, MemberMismatch, UsageError.
        """
        made = []
        for checkpoint in checkpoints:
            try:
                made.append(_captured(checkpoint, _read(_file(checkpoint)), parse_inputs(inputs or [])[0]))
            except (Refused, ArtifactError) as error:
                raise CheckpointError(f"checkpoint {checkpoint.path}: {error}") from None
        first, whole = made[0], numbered(_read(_file(checkpoints[0])))
        others = []
        for checkpoint, other in zip(checkpoints[1:], made[1:]):
            why = _difference(checkpoints[0], first, whole, other, numbered(_read(_file(checkpoint))))
            others += [f"{checkpoint.path} {why}"] if why else []
        if others:
            raise MemberMismatch(
                (f"{len(others)} of {len(checkpoints)} programs are others than the first:\n- " if others[1:] else "") + "\n- ".join(others)
            )
        dims = {d: _narrowest([c.dims[d][:2] for c in made]) for d in first.dims}
        guards = {str(g.expr): g for c in made for g in c.guards}
        return replace(first, dims=dims, guards=tuple(guards.values()))


def _nothing() -> nn.Module:
    raise UsageError("exported programs are read from their own files")


def _file(checkpoint: Checkpoint) -> Pt2File:
    assert checkpoint.program is not None  # choose_factory looks
    return checkpoint.program


def _narrowest(bounds: Sequence[tuple[int, int | None]]) -> tuple[int, int | None, str]:
    highs = [high for _, high in bounds if high is not None]
    return max(low for low, _ in bounds), min(highs) if highs else None, ""


def _difference(first: Checkpoint, a: Captured, plain: list[Any], b: Captured, other_plain: list[Any]) -> str:
    """Where a program is not the first's, in words that follow its path; empty when they are one."""
    side = f"is another program than {first.path}"
    if [(leaf.name, leaf.type) for leaf in a.inputs] != [(leaf.name, leaf.type) for leaf in b.inputs] or a.signature != b.signature:
        takes = [", ".join(f"{leaf.name}={leaf.type}" for leaf in c.inputs) for c in (b, a)]
        return f"{side}: it takes {takes[0]}, the other {takes[1]}; members are of one architecture, and exported alike"
    for node, x, y in zip(a.program.nodes, plain, other_plain):
        if x != y:
            return (
                f"{side}, from {node.source or node.name} on: {y[0]}{y[1]} in it, {x[0]}{x[1]} in the other; "
                "members differ in weights only, so make such a number a buffer, and export them alike"
            )
    if len(plain) != len(other_plain) or plain[-1] != other_plain[-1] or a.result != b.result:
        return f"{side}: {len(other_plain) - 1} ops against {len(plain) - 1}, or other results; members are of one architecture"
    return ""


def other_programs(checkpoints: Sequence[Checkpoint], inputs: Sequence[str] | None) -> list[str]:
    """For each checkpoint why its program is not that of the first of the same shapes, or empty; of other shapes than any, literals may be sizes, and ops count.

    Every program can be read. inputs: specs that name dims, or None.
    """
    of_shapes: dict[Any, tuple[Checkpoint, Captured, list[Any]]] = {}
    whys = []
    for checkpoint in checkpoints:
        read = _read(_file(checkpoint))
        try:
            made = _captured(checkpoint, read, parse_inputs(inputs or [])[0])
        except (Refused, ArtifactError) as error:
            whys.append(str(error))
            continue
        plain = numbered(read)
        shapes = tuple(sorted((name, tuple(info.shape)) for name, info in checkpoint.tensors().items()))
        if shapes in of_shapes:
            first, a, whole = of_shapes[shapes]
            whys.append(_difference(first, a, whole, made, plain))
            continue
        first, _, whole = next(iter(of_shapes.values()), (checkpoint, made, plain))
        same = [row[0] for row in whole[:-1]] == [row[0] for row in plain[:-1]]
        whys.append("" if same else f"is another program than {first.path}, of other ops; members are of one architecture, and exported alike")
        if same:
            of_shapes[shapes] = checkpoint, made, plain
    return whys


class ProgramModule(nn.Module):
    """A file's program as a module: called and answering as the exported module, its result as a flat list. Its own attributes have names that no weight has."""

    def __init__(self, file: Pt2File, read: ReadProgram) -> None:
        super().__init__()
        kept: dict[object, Any] = {}  # tied weights stay one
        used = {source for _, source, _ in read.weights}
        for name in file.tensors():
            parent: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            if file.is_parameter(name):
                place = file.place(name)
                kept[place] = kept[place] if place in kept else nn.Parameter(file.get(name).clone(), requires_grad=False)
                parent.register_parameter(last, kept[place])
            elif name in file.saved or name in used:
                parent.register_buffer(last, file.get(name).clone(), persistent=name in file.saved)
        self._widepack_sources = [source for _, source, _ in read.weights]
        self._widepack_signature, leaves = signature_of(read)
        types = {source: f"{dtype_name(t.dtype)}[{','.join(map(str, t.shape))}]" for source in self._widepack_sources for t in [file.get(source)]}
        self._widepack_program = Program(
            tuple(Slot(value, source, "shared", types[source]) for value, source, _ in read.weights),
            tuple(Slot(item.value, name, "shared", f"{dtype_name(item.dtype)}[]") for name, item in leaves),
            read.nodes,
            tuple(Output(o, "shared") for o in read.outputs if hasattr(o, "name")),
        )
        self._widepack_program.check()
        self._widepack_run = graph_module(self._widepack_program, CPU).forward
        self._widepack_outputs = read.outputs

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Inputs: as the exported module takes them. Returns: the leaves of its result, in order."""
        positions = [p for p in self._widepack_signature if p.kind == "positional"]
        given = {**dict(zip((p.name for p in positions), args)), **kwargs}
        values: list[Any] = [None] * len(self._widepack_program.inputs)
        for parameter in self._widepack_signature:
            _fill(parameter.tree, given.get(parameter.name), values)
        by_name = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers(remove_duplicate=False))}
        outs = iter(self._widepack_run(*(by_name[s] for s in self._widepack_sources), *values))
        return [next(outs) if hasattr(o, "name") else o for o in self._widepack_outputs]


def _fill(tree: Tree, value: Any, into: list[Any]) -> None:
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
    """How a program is called, and its tensors with their names. Raises: Refused."""
    items = iter(read.inputs)
    leaves: list[tuple[str, TensorInput]] = []

    def walk(node: Any, name: str) -> Tree:
        kind, context, children = _spec(node)
        if kind is None:
            item = next(items, None)
            if item is None:
                raise Refused("is damaged: its call has more inputs than its program")
            if isinstance(item, TensorInput):
                leaves.append((name, item))
                return {"leaf": len(leaves) - 1}
            return item
        if kind in ("builtins.tuple", "builtins.list"):
            return {kind.removeprefix("builtins."): [walk(c, f"{name}.{i}") for i, c in enumerate(children)]}
        if kind == "builtins.dict":
            return {"dict": [[k, walk(c, f"{name}.{k}")] for k, c in zip(_keys(context, len(children)), children)]}
        raise Refused(
            f"takes the input {name} of the type {kind[:80]}; inputs are tensors, numbers, strings, None, and lists, tuples and dicts of them"
        )

    _, _, parts = _spec(read.in_tree)
    if len(parts) != 2:
        raise Refused("is damaged: its call has no arguments by position and by name")
    (_, _, positional), (_, context, named) = _spec(parts[0]), _spec(parts[1])
    found = []
    for i, part in enumerate(positional):
        name = read.names[i] if i < len(read.names) else f"x{i}"
        found.append(Parameter(name, "positional", walk(part, name)))
    for key, part in zip(_keys(context, len(named)), named):
        found.append(Parameter(str(key), "keyword", walk(part, str(key))))
    if next(items, None) is not None or len({p.name for p in found}) != len(found):
        raise Refused("is damaged: its call has fewer inputs than its program")
    return tuple(found), leaves


def _spec(node: Any) -> tuple[str | None, Any, list[Any]]:
    """A node of a pytree's description: its type (None: a leaf), context and children."""
    if not isinstance(node, dict) or not {"type", "context", "children_spec"} <= set(node) or not isinstance(node["children_spec"], list):
        raise Refused("is damaged: the tree of its inputs or outputs is none")
    kind = node["type"]
    if kind is not None and not isinstance(kind, str):
        raise Refused("is damaged: the tree of its inputs or outputs is of no type")
    return kind, node["context"], node["children_spec"]


def _context(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text  # a plain name


def _keys(context: Any, count: int) -> list[str | int]:
    keys = _context(context)
    if not isinstance(keys, list) or len(keys) != count or not all(isinstance(k, (str, int)) for k in keys):
        raise Refused("is damaged: a dict of its inputs or outputs has no keys")
    return keys


def _result(read: ReadProgram) -> Tree:
    """The tree of a program's result. Classes that hold named values become `Output`s, as in a capture."""
    outputs = iter(read.outputs)
    count = 0

    def walk(node: Any) -> Tree:
        nonlocal count
        kind, context, children = _spec(node)
        if kind is None:
            value = next(outputs, _END)
            if value is _END:
                raise Refused("is damaged: its result has more leaves than its program gives")
            if not hasattr(value, "name"):
                return {"const": value}
            count += 1
            return {"leaf": count - 1}
        if kind in ("builtins.tuple", "builtins.list"):
            return {kind.removeprefix("builtins."): [walk(c) for c in children]}
        if kind == "builtins.dict":
            return {"dict": [[k, walk(c)] for k, c in zip(_keys(context, len(children)), children)]}
        known = _context(context)
        if isinstance(known, str) and known in read.named_tuples:
            kind, fields, absent = known, read.named_tuples[known], []
        elif isinstance(known, list) and len(known) == 2 and all(isinstance(part, list) for part in known):
            fields, absent = known  # a dataclass: the fields that are there, and those that are None
        else:
            fields, absent = known, []
        if not isinstance(fields, list) or len(fields) != len(children) or not all(isinstance(f, str) for f in (*fields, *absent)):
            raise Refused(f"gives a {kind[:80]}; outputs are tensors, numbers, strings and None, in tuples, lists, dicts and classes of named values")
        return {"output": [kind.rpartition(".")[2], [[k, walk(c)] for k, c in zip(fields, children)] + [[k, {"const": None}] for k in absent]]}

    found = walk(read.out_tree)
    if next(outputs, _END) is not _END:
        raise Refused("is damaged: its result has fewer leaves than its program gives")
    return found


_END = object()


def _captured(checkpoint: Checkpoint, read: ReadProgram, specs: Sequence[InputSpec]) -> Captured:
    signature, leaves = signature_of(read)
    named = _axes(checkpoint, leaves, specs)
    units: dict[str, tuple[str, int]] = {}  # symbol -> letter, and how many of the symbol a letter is
    for axes, (name, item) in zip(named, leaves):
        for axis, text in axes.items():
            size = item.sizes[axis]
            assert isinstance(size, Size)
            factor, letter = factor_of(text)
            if factor % size.factor or units.setdefault(size.symbol, (letter, factor // size.factor)) != (letter, factor // size.factor):
                raise CaptureError(
                    f"input {name}: axis {axis} is {text} in the spec; in the program of {checkpoint.path} it is {size.factor} times a dim that is called otherwise elsewhere: "
                    "a dim has one letter, and one factor for all"
                )
    samples = _file(checkpoint).samples()
    tensors = [x for x in samples or () if isinstance(x, torch.Tensor)]
    if len(tensors) != len(leaves) or any(not _fits(x, item) for x, (_, item) in zip(tensors, leaves)):
        tensors = []
    sizes = _sizes(leaves, named, tensors)
    ranges = {s.name: (s.low, s.high) for s in specs}
    inputs = []
    for i, ((name, item), axes) in enumerate(zip(leaves, named)):
        type_ = f"{dtype_name(item.dtype)}[{','.join(axes.get(a) or str(s) for a, s in enumerate(item.sizes))}]"
        if not tensors and not specs and not item.dtype.is_floating_point and item.dtype is not torch.bool:
            raise UsageError(
                f"checkpoint {checkpoint.path}: the program was saved without example inputs, so nothing says which integers {name} takes; "
                f"describe its inputs, for example --input '{name}={type_}:0..9'"
            )
        drawn = bool(specs) or not tensors
        example = draw(Source(name, type_, *ranges.get(name, (None, None))), sizes, 1 + i) if drawn else tensors[i]
        inputs.append(Leaf(name, type_, example, axes))
    file = _file(checkpoint)
    weights = {source: (role, file.get(source).detach()) for _, source, role in read.weights}
    slots = tuple(
        Slot(value, source, "shared", f"{dtype_name(weights[source][1].dtype)}[{','.join(map(str, weights[source][1].shape))}]")
        for value, source, _ in read.weights
    )
    program = Program(
        slots,
        tuple(Slot(item.value, name, "shared", leaf.type) for leaf, (name, item) in zip(inputs, leaves)),
        read.nodes,
        tuple(Output(o, "shared") for o in read.outputs if hasattr(o, "name")),
    )
    program.check()
    program, values = _typed(program, read, sizes, checkpoint.path)
    needed = {r.source for r in program.weights}
    result = _result(read)
    names = paths(result)
    outputs = tuple((names.get(i) or "output", values[o.value.name]) for i, o in enumerate(program.outputs))
    dims: dict[str, tuple[int, int | None, str]] = {}
    for symbol, (letter, times) in units.items():
        low, high = read.ranges.get(symbol, (0, None))
        low = low if low > 2 else 1  # a lower bound of 2 is export's own, not the program's
        bounds_here = (max(1, -(-low // times)), None if high is None else high // times)
        dims[letter] = _narrowest([bounds_here, *([dims[letter][:2]] if letter in dims else [])])
    places = [i for i, item in enumerate(read.inputs) if isinstance(item, TensorInput)]
    flat = [replace(leaf, name=f"flat_args.{i}") for i, leaf in zip(places, inputs)]  # what an export with strict=True calls its inputs
    guards = guards_from(read.guards, [*inputs, *flat], f"the program of {checkpoint.path}")
    return Captured(
        program, {n: w for n, w in weights.items() if n in needed}, tuple(inputs), signature, outputs, result, dims, sizes, guards, (), result
    )


def _axes(checkpoint: Checkpoint, leaves: Sequence[tuple[str, TensorInput]], specs: Sequence[InputSpec]) -> list[dict[int, str]]:
    """What each dynamic axis is called: as the specs say, else B, D1, D2, ... Raises: CaptureError, UsageError.

    B is axis 0 of the first input that has a dynamic one, and of all that had the same size there when they were exported: an export does not say that the
    batches of a call belong together.
    """
    if not specs:
        letters: dict[str, str] = {}
        firsts = [size for _, item in leaves if item.sizes for size in item.sizes[:1] if isinstance(size, Size)]
        letters.update({size.symbol: "B" for size in firsts if size.hint * size.factor == firsts[0].hint * firsts[0].factor})
        others = dict.fromkeys(s.symbol for _, item in leaves for s in item.sizes if isinstance(s, Size) and s.symbol not in letters)
        letters.update({symbol: f"D{1 + i}" for i, symbol in enumerate(others)})
        return [{a: _named(s.factor, letters[s.symbol]) for a, s in enumerate(item.sizes) if isinstance(s, Size)} for _, item in leaves]
    by_name = {s.name: s for s in specs}
    if set(by_name) != {name for name, _ in leaves}:
        raise UsageError(f"the program of {checkpoint.path} takes {', '.join(n for n, _ in leaves)}; the inputs describe {', '.join(by_name)}")
    found = []
    for name, item in leaves:
        spec, axes = by_name[name], {}
        has = f"{dtype_name(item.dtype)}[{','.join('a dynamic dim' if isinstance(s, Size) else str(s) for s in item.sizes)}]"
        if spec.dtype != dtype_name(item.dtype) or len(spec.dims) != len(item.sizes):
            raise CaptureError(f"input {name} is {has} in the program of {checkpoint.path}, and {spec} in the spec")
        for axis, (dim, size) in enumerate(zip(spec.dims, item.sizes)):
            if isinstance(size, Size) != (not isinstance(dim, int)) or (isinstance(dim, int) and dim != size):
                raise CaptureError(
                    f"input {name} is {has} in the program of {checkpoint.path}, and {spec} in the spec, which says {dim} at axis {axis}; "
                    "an export decides which dims are dynamic"
                )
            if isinstance(size, Size):
                axes[axis] = str(dim)
        found.append(axes)
    return found


def _named(factor: int, letter: str) -> str:
    return letter if factor == 1 else f"{factor}*{letter}"


def _fits(x: torch.Tensor, item: TensorInput) -> bool:
    sizes = zip(x.shape, item.sizes)
    return x.dtype == item.dtype and x.ndim == len(item.sizes) and all(isinstance(s, Size) or n == s for n, s in sizes)


def _sizes(leaves: Sequence[tuple[str, TensorInput]], named: Sequence[Mapping[int, str]], samples: Sequence[torch.Tensor]) -> dict[str, int]:
    """An example size of every letter: that of the file's own example, else what torch noted."""
    sizes: dict[str, int] = {}
    for i, ((name, item), axes) in enumerate(zip(leaves, named)):
        for axis, text in axes.items():
            size = item.sizes[axis]
            assert isinstance(size, Size)
            factor, letter = factor_of(text)
            whole = samples[i].shape[axis] if samples else size.factor * size.hint or factor * _EXAMPLE
            if whole % factor:
                raise CaptureError(f"input {name}: axis {axis} is {text} in the spec, and {whole} in the program's own example")
            sizes.setdefault(letter, whole // factor)
    return sizes


def _typed(program: Program, read: ReadProgram, sizes: Mapping[str, int], path: str) -> tuple[Program, dict[str, str]]:
    """The program with the type of every node, and the type of every value. Raises: CheckpointError where an op does not take, or give, what the file says."""
    fakes = Fakes(sizes)
    try:
        values = replay(program, fakes)
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise CheckpointError(f"checkpoint {path}: its program cannot be run: {type(error).__name__}: {words}") from error
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and read.types.get(name, (value.dtype, value.ndim)) != (value.dtype, value.ndim):
            dtype, rank = read.types[name]
            raise CheckpointError(
                f"checkpoint {path}: the value {name} of its program is {dtype_name(value.dtype)} of {value.ndim} dims here, and {dtype_name(dtype)} of {rank} in the "
                f"file; {WAY_OUT}"
            )
    letters = {dim.node.expr: letter for letter, dim in fakes.dims.items() if isinstance(dim, torch.SymInt)}
    types = {name: type_of(value, letters) for name, value in values.items()}
    return replace(program, nodes=tuple(replace(n, out=types[n.name]) for n in program.nodes)), types
