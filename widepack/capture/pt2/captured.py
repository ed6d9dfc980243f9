"""Turns the program of a `.pt2` file (`ReadProgram`) into a captured member (`Captured`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from widepack_artifacts.program import Output, Program, Slot
from widepack_artifacts.tree import paths

from ...checkpoints.discovery import Checkpoint
from ...checkpoints.pt2_archive import Pt2File
from ...checkpoints.state_dict import RefusedFile
from ...errors import CaptureError, CheckpointError, UsageError
from ...ir.encoding import type_of
from ...ir.fake_values import Fakes, replay
from ...ir.guards import InputLeaf, factor_of
from ...ir.tensor_type import TensorType
from ...spec.draws import InputSource, draw
from ...spec.dtypes import dtype_name
from ...spec.input_spec import InputSpec
from ..capture import Captured
from ..guards import guards_from
from .fields import WAY_OUT
from .module import result_of, signature_of
from .reader import ReadProgram, Size, TensorInput, read_program

_EXAMPLE = 4  # the size of a dim for which the file has no example
_READ: WeakKeyDictionary[Pt2File, ReadProgram] = WeakKeyDictionary()

_NamedInputs = Sequence[tuple[str, TensorInput]]
_Bounds = tuple[int, int | None, str]


def read_archive(file: Pt2File) -> ReadProgram:
    """Returns the program of an open file. It is read once for each file. Raises: RefusedFile."""
    if file not in _READ:
        _READ[file] = read_program(file)
    return _READ[file]


def program_file(checkpoint: Checkpoint) -> Pt2File:
    """Returns the `.pt2` file of a checkpoint that is one."""
    assert checkpoint.program is not None  # choose_factory checks this
    return checkpoint.program


def narrowest_bounds(bounds: Sequence[tuple[int, int | None]]) -> _Bounds:
    """Returns the bounds that all of these bounds allow, without a source line."""
    highs = [high for _, high in bounds if high is not None]
    return max(low for low, _ in bounds), min(highs) if highs else None, ""


def captured_of(checkpoint: Checkpoint, read: ReadProgram, specs: Sequence[InputSpec]) -> Captured:
    """Captures the program of a `.pt2` file.

    specs: the input specs, which name dims and bound integers; empty: the file decides.
    Raises: CaptureError, CheckpointError, UsageError.
    """
    signature, leaves = signature_of(read)
    axes = _axes(checkpoint, leaves, specs)
    units = _units(checkpoint, leaves, axes)
    examples = _examples(checkpoint, leaves)
    sizes = _sizes(leaves, axes, examples)
    inputs = _inputs(checkpoint, leaves, axes, specs, sizes, examples)
    weights = _weights(checkpoint, read)
    program, types = _typed(_program(read, leaves, inputs, weights), read, sizes, checkpoint.path)
    result = result_of(read)
    names = paths(result)
    # torch.export with strict=True calls the inputs flat_args.0, flat_args.1, ... in its guards
    places = [i for i, item in enumerate(read.inputs) if isinstance(item, TensorInput)]
    flat = [replace(leaf, name=f"flat_args.{i}") for i, leaf in zip(places, inputs)]
    needed = {slot.source for slot in program.weights}
    return Captured(
        program=program,
        weights={n: w for n, w in weights.items() if n in needed},
        inputs=tuple(inputs),
        signature=signature,
        outputs=tuple((names.get(i) or "output", types[o.value.name]) for i, o in enumerate(program.outputs)),
        result=result,
        returned=result,
        dims=_dims(read, units),
        sizes=sizes,
        guards=guards_from(read.guards, [*inputs, *flat], f"the program of {checkpoint.path}"),
    )


def _units(
    checkpoint: Checkpoint, leaves: _NamedInputs, axes: Sequence[Mapping[int, str]]
) -> dict[str, tuple[str, int]]:
    """Returns for each symbol of the file its letter, and how many of the symbol one letter is.

    Raises: CaptureError if the specs use two letters or two factors for one symbol.
    """
    units: dict[str, tuple[str, int]] = {}
    for named, (name, item) in zip(axes, leaves):
        for axis, text in named.items():
            size = item.sizes[axis]
            assert isinstance(size, Size)
            factor, letter = factor_of(text)
            unit = (letter, factor // size.factor)
            if factor % size.factor or units.setdefault(size.symbol, unit) != unit:
                raise CaptureError(
                    f"input {name}: axis {axis} is {text} in the spec, but in the program of "
                    f"{checkpoint.path} it is {size.factor} times a dim that has another letter in "
                    "another spec; give each dim one letter, and one factor for all inputs"
                )
    return units


def _examples(checkpoint: Checkpoint, leaves: _NamedInputs) -> list[torch.Tensor]:
    """Returns the example inputs of the file, or none if they do not fit the program.

    Raises: CheckpointError if they are too large.
    """
    try:
        samples = program_file(checkpoint).samples() or ()
    except RefusedFile as refused:
        raise CheckpointError(f"checkpoint {checkpoint.path}: its example inputs: it {refused}") from None
    tensors = [x for x in samples if isinstance(x, torch.Tensor)]
    fit = len(tensors) == len(leaves) and all(_fits(x, item) for x, (_, item) in zip(tensors, leaves))
    return tensors if fit else []


def _inputs(
    checkpoint: Checkpoint,
    leaves: _NamedInputs,
    axes: Sequence[Mapping[int, str]],
    specs: Sequence[InputSpec],
    sizes: Mapping[str, int],
    examples: Sequence[torch.Tensor],
) -> list[InputLeaf]:
    """Returns the inputs, each with an example: the file's own, or a drawn one. Raises: UsageError."""
    ranges = {s.name: (s.low, s.high) for s in specs}
    inputs = []
    for i, ((name, item), named) in enumerate(zip(leaves, axes)):
        dims = tuple(named.get(a) or str(s) for a, s in enumerate(item.sizes))
        type_ = str(TensorType(dtype_name(item.dtype), dims))
        if not examples and not specs and not item.dtype.is_floating_point and item.dtype is not torch.bool:
            raise UsageError(
                f"checkpoint {checkpoint.path}: the program was saved without example inputs, so widepack "
                f"does not know which integers {name} takes; describe its inputs, for example --input "
                f"'{name}={type_}:0..9'"
            )
        if specs or not examples:
            example = draw(InputSource(name, type_, *ranges.get(name, (None, None))), sizes, 1 + i)
        else:
            example = examples[i]
        inputs.append(InputLeaf(name, type_, example, named))
    return inputs


def _weights(checkpoint: Checkpoint, read: ReadProgram) -> dict[str, tuple[str, torch.Tensor]]:
    """Returns the program's weights: name -> (role, tensor)."""
    file = program_file(checkpoint)
    return {source: (role, file.get(source).detach()) for _, source, role in read.weights}


def _program(
    read: ReadProgram,
    leaves: _NamedInputs,
    inputs: Sequence[InputLeaf],
    weights: Mapping[str, tuple[str, torch.Tensor]],
) -> Program:
    """Returns the program without types of nodes."""
    program = Program(
        tuple(Slot(value, name, "shared", type_of(weights[name][1])) for value, name, _ in read.weights),
        tuple(Slot(item.value, name, "shared", leaf.type) for leaf, (name, item) in zip(inputs, leaves)),
        read.nodes,
        tuple(Output(o, "shared") for o in read.outputs if hasattr(o, "name")),
    )
    program.check()
    return program


def _dims(read: ReadProgram, units: Mapping[str, tuple[str, int]]) -> dict[str, _Bounds]:
    """Returns the bounds of each letter, from the bounds of the file's symbols."""
    dims: dict[str, _Bounds] = {}
    for symbol, (letter, times) in units.items():
        low, high = read.ranges.get(symbol, (0, None))
        low = low if low > 2 else 1  # a lower bound of 2 comes from torch.export, not from the program
        bounds = (max(1, -(-low // times)), None if high is None else high // times)
        dims[letter] = narrowest_bounds([bounds, *([dims[letter][:2]] if letter in dims else [])])
    return dims


def _axes(checkpoint: Checkpoint, leaves: _NamedInputs, specs: Sequence[InputSpec]) -> list[dict[int, str]]:
    """Returns the name of each dynamic axis, for each input: from the specs, else B, D1, D2, ...

    Raises: CaptureError, UsageError.
    """
    if not specs:
        letters = _default_letters(leaves)
        return [
            {a: _scaled(s.factor, letters[s.symbol]) for a, s in enumerate(item.sizes) if isinstance(s, Size)}
            for _, item in leaves
        ]
    by_name = {s.name: s for s in specs}
    if set(by_name) != {name for name, _ in leaves}:
        raise UsageError(
            f"the program of {checkpoint.path} takes {', '.join(n for n, _ in leaves)}; "
            f"the inputs describe {', '.join(by_name)}"
        )
    return [_spec_axes(checkpoint, name, item, by_name[name]) for name, item in leaves]


def _default_letters(leaves: _NamedInputs) -> dict[str, str]:
    """Returns a letter for each symbol of the file.

    B is axis 0 of the first input with a dynamic axis 0. It is also axis 0 of all inputs that had the same
    size there in the export, because an export does not say that the batches of a call belong together.
    """
    firsts = [size for _, item in leaves for size in item.sizes[:1] if isinstance(size, Size)]
    batch = firsts[0].hint * firsts[0].factor if firsts else 0
    letters = {size.symbol: "B" for size in firsts if size.hint * size.factor == batch}
    others = dict.fromkeys(
        s.symbol for _, item in leaves for s in item.sizes if isinstance(s, Size) and s.symbol not in letters
    )
    letters.update({symbol: f"D{1 + i}" for i, symbol in enumerate(others)})
    return letters


def _spec_axes(checkpoint: Checkpoint, name: str, item: TensorInput, spec: InputSpec) -> dict[int, str]:
    """Returns the letters that a spec gives to an input's dynamic axes. Raises: CaptureError where they
    differ.
    """
    dims = tuple("a dynamic dim" if isinstance(s, Size) else str(s) for s in item.sizes)
    differ = (
        f"input {name} is {TensorType(dtype_name(item.dtype), dims)} in the program of {checkpoint.path}, "
        f"and {spec} in the spec"
    )
    if spec.dtype != dtype_name(item.dtype) or len(spec.dims) != len(item.sizes):
        raise CaptureError(f"{differ}; write the dtype and the number of dims of the program")
    axes = {}
    for axis, (dim, size) in enumerate(zip(spec.dims, item.sizes)):
        if isinstance(size, Size) != (not isinstance(dim, int)) or (isinstance(dim, int) and dim != size):
            raise CaptureError(
                f"{differ}, which says {dim} at axis {axis}; an export decides which dims are dynamic, so "
                "change the spec, or export the member again with other dynamic_shapes"
            )
        if isinstance(size, Size):
            axes[axis] = str(dim)
    return axes


def _scaled(factor: int, letter: str) -> str:
    return letter if factor == 1 else f"{factor}*{letter}"


def _fits(x: torch.Tensor, item: TensorInput) -> bool:
    """Whether a tensor has the dtype and shape of an input."""
    sizes = zip(x.shape, item.sizes)
    return (
        x.dtype == item.dtype
        and x.ndim == len(item.sizes)
        and all(isinstance(s, Size) or n == s for n, s in sizes)
    )


def _sizes(
    leaves: _NamedInputs, axes: Sequence[Mapping[int, str]], examples: Sequence[torch.Tensor]
) -> dict[str, int]:
    """Returns an example size for every letter: from the file's example inputs, else the size that torch
    noted.
    """
    sizes: dict[str, int] = {}
    for i, ((name, item), named) in enumerate(zip(leaves, axes)):
        for axis, text in named.items():
            size = item.sizes[axis]
            assert isinstance(size, Size)
            factor, letter = factor_of(text)
            whole = examples[i].shape[axis] if examples else size.factor * size.hint or factor * _EXAMPLE
            if whole % factor:
                raise CaptureError(
                    f"input {name}: axis {axis} is {text} in the spec, but {whole} in the program's "
                    f"own example, which is not a multiple of {factor}; write another factor"
                )
            sizes.setdefault(letter, whole // factor)
    return sizes


def _typed(
    program: Program, read: ReadProgram, sizes: Mapping[str, int], path: str
) -> tuple[Program, dict[str, str]]:
    """Returns the program with the type of every node, and the type of every value.

    Raises: CheckpointError where an op does not accept its inputs, or gives another type than the file says.
    """
    fakes = Fakes(sizes)
    try:
        values = replay(program, fakes)
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"checkpoint {path}: its program cannot be run: {type(error).__name__}: {words}"
        ) from error
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            continue
        here = (value.dtype, value.ndim)
        dtype, rank = read.types.get(name, here)
        if (dtype, rank) != here:
            raise CheckpointError(
                f"checkpoint {path}: the value {name} of its program is {dtype_name(value.dtype)} of "
                f"{value.ndim} dims here, and {dtype_name(dtype)} of {rank} in the file; {WAY_OUT}"
            )
    letters = {dim.node.expr: letter for letter, dim in fakes.dims.items() if isinstance(dim, torch.SymInt)}
    types = {name: type_of(value, letters) for name, value in values.items()}
    return replace(program, nodes=tuple(replace(n, out=types[n.name]) for n in program.nodes)), types
