"""Makes members of `.pt2` files, which `torch.export.save` wrote. Such a checkpoint needs no `--model`.

Each file has its own graph, conditions and example inputs. What `torch.export.load(path).module()` would run
is read as data (`reader.py`). A build that needs the member's own answers runs it node by node, within the
bounds and conditions that torch wrote down. The programs of all members must be equal but for weights and
constants. Members with other shapes may also differ in sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.program import Output, Program, Slot
from widepack_artifacts.tree import paths

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.factory import Factory
from ...checkpoints.pt2_archive import Pt2File
from ...checkpoints.state_dict import RefusedFile
from ...errors import CaptureError, CheckpointError, MemberMismatch, UsageError
from ...ir.encoding import type_of
from ...ir.fake_values import Fakes, replay
from ...ir.guards import InputLeaf, factor_of
from ...ir.tensor_type import TensorType
from ...spec.draws import InputSource, draw
from ...spec.dtypes import dtype_name
from ...spec.input_spec import DimExpr, InputSpec, parse_inputs
from ..capture import Captured
from ..guards import guards_from
from .fields import WAY_OUT
from .module import ProgramModule, result_of, signature_of
from .reader import ReadProgram, Size, TensorInput, numbered, read_program

_EXAMPLE = 4  # the size of a dim for which the file has no example
_READ: WeakKeyDictionary[Pt2File, ReadProgram] = WeakKeyDictionary()

_Bounds = tuple[int, int | None, str]


def _read_archive(file: Pt2File) -> ReadProgram:
    """Returns the program of an open file. It is read once for each file. Raises: RefusedFile."""
    if file not in _READ:
        _READ[file] = read_program(file)
    return _READ[file]


def _program_file(checkpoint: Checkpoint) -> Pt2File:
    """Returns the `.pt2` file of a checkpoint that is one."""
    assert checkpoint.program is not None  # choose_factory checks this
    return checkpoint.program


def _narrowest(bounds: Sequence[tuple[int, int | None]]) -> _Bounds:
    """Returns the bounds that all of these bounds allow, without a source line."""
    highs = [high for _, high in bounds if high is not None]
    return max(low for low, _ in bounds), min(highs) if highs else None, ""


class _FileCapture:
    """Captures the program of a `.pt2` file.

    specs: the input specs, which name dims and bound integers; empty: the file decides. leaves: the tensor
    inputs. axes: for each of them the name of each dynamic axis. sizes: an example size for every letter.
    Raises: CaptureError, CheckpointError, UsageError.
    """

    def __init__(self, checkpoint: Checkpoint, read: ReadProgram, specs: Sequence[InputSpec]) -> None:
        self.path, self.file, self.read, self.specs = checkpoint.path, _program_file(checkpoint), read, specs
        self.signature, self.leaves = signature_of(read)
        self.axes = self._axes()
        self.units = self._units()
        self.examples = self._examples()
        self.sizes = self._sizes()

    def captured(self) -> Captured:
        """Returns the captured member."""
        read = self.read
        inputs = self._inputs()
        # The weights of checkpoints are read later, other tensors from here.
        get = {True: self.file.get, False: self.file.read}
        weights = {s: (role, get[s in self.file.saved](s).detach()) for _, s, role in read.weights}
        program = Program(
            tuple(Slot(value, name, "shared", type_of(weights[name][1])) for value, name, _ in read.weights),
            tuple(Slot(i.value, leaf.name, "shared", leaf.type) for (_, i), leaf in zip(self.leaves, inputs)),
            read.nodes,
            tuple(Output(o, "shared") for o in read.outputs if hasattr(o, "name")),
        )
        program.check()
        program, types = self._typed(program)
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
            signature=self.signature,
            outputs=tuple(
                (names.get(i) or "output", types[o.value.name]) for i, o in enumerate(program.outputs)
            ),
            result=result,
            returned=result,
            dims=self._dims(),
            sizes=self.sizes,
            guards=guards_from(read.guards, [*inputs, *flat], f"the program of {self.path}"),
        )

    def _axes(self) -> list[dict[int, str]]:
        """Returns the name of each dynamic axis, for each input: from the specs, else B, D1, D2, ..."""
        if not self.specs:
            letters = _default_letters(self.leaves)
            return [
                {
                    a: str(DimExpr(letters[s.symbol], s.factor))
                    for a, s in enumerate(item.sizes)
                    if isinstance(s, Size)
                }
                for _, item in self.leaves
            ]
        by_name = {s.name: s for s in self.specs}
        if set(by_name) != {name for name, _ in self.leaves}:
            raise UsageError(
                f"the program of {self.path} takes {', '.join(n for n, _ in self.leaves)}; "
                f"the inputs describe {', '.join(by_name)}"
            )
        return [_spec_axes(self.path, name, item, by_name[name]) for name, item in self.leaves]

    def _named(self) -> Iterator[tuple[int, int, Size, str]]:
        """Yields the input, the axis, the size and the name of each dynamic axis."""
        for number, ((_, item), named) in enumerate(zip(self.leaves, self.axes)):
            for axis, text in named.items():
                size = item.sizes[axis]
                assert isinstance(size, Size)
                yield number, axis, size, text

    def _units(self) -> dict[str, tuple[str, int]]:
        """Returns for each symbol of the file its letter, and how many of the symbol one letter is.

        Raises: CaptureError if the specs use two letters or two factors for one symbol.
        """
        units: dict[str, tuple[str, int]] = {}
        for number, axis, size, text in self._named():
            factor, letter = factor_of(text)
            unit = (letter, factor // size.factor)
            if factor % size.factor or units.setdefault(size.symbol, unit) != unit:
                raise CaptureError(
                    f"input {self.leaves[number][0]}: axis {axis} is {text} in the spec, but in the program "
                    f"of {self.path} it is {size.factor} times a dim that has another letter in "
                    "another spec; give each dim one letter, and one factor for all inputs"
                )
        return units

    def _examples(self) -> list[torch.Tensor]:
        """Returns the example inputs of the file, or none if they do not fit the program.

        Raises: CheckpointError if they are too large.
        """
        try:
            samples = self.file.samples() or ()
        except RefusedFile as refused:
            raise CheckpointError(f"checkpoint {self.path}: its example inputs: it {refused}") from None
        tensors = [x for x in samples if isinstance(x, torch.Tensor)]
        fit = len(tensors) == len(self.leaves) and all(
            _fits(x, item) for x, (_, item) in zip(tensors, self.leaves)
        )
        return tensors if fit else []

    def _sizes(self) -> dict[str, int]:
        """Returns an example size for every letter: from the file's example inputs, else the size that torch
        noted.
        """
        sizes: dict[str, int] = {}
        for number, axis, size, text in self._named():
            factor, letter = factor_of(text)
            noted = size.factor * size.hint or factor * _EXAMPLE
            whole = self.examples[number].shape[axis] if self.examples else noted
            if whole % factor:
                raise CaptureError(
                    f"input {self.leaves[number][0]}: axis {axis} is {text} in the spec, but {whole} in the "
                    f"program's own example, which is not a multiple of {factor}; write another factor"
                )
            sizes.setdefault(letter, whole // factor)
        return sizes

    def _inputs(self) -> list[InputLeaf]:
        """Returns the inputs, each with an example: the file's own, or a drawn one."""
        ranges = {s.name: (s.low, s.high) for s in self.specs}
        inputs = []
        for i, ((name, item), named) in enumerate(zip(self.leaves, self.axes)):
            dims = tuple(named.get(a) or str(s) for a, s in enumerate(item.sizes))
            type_ = str(TensorType(dtype_name(item.dtype), dims))
            of_integers = not item.dtype.is_floating_point and item.dtype is not torch.bool
            if of_integers and not self.examples and not self.specs:
                raise UsageError(
                    f"checkpoint {self.path}: the program was saved without example inputs, so widepack "
                    f"does not know which integers {name} takes; describe its inputs, for example --input "
                    f"'{name}={type_}:0..9'"
                )
            if self.specs or not self.examples:
                source = InputSource(name, type_, *ranges.get(name, (None, None)))
                example = draw(source, self.sizes, 1 + i)
            else:
                example = self.examples[i]
            inputs.append(InputLeaf(name, type_, example, named))
        return inputs

    def _dims(self) -> dict[str, _Bounds]:
        """Returns the bounds of each letter, from the bounds of the file's symbols."""
        dims: dict[str, _Bounds] = {}
        for symbol, (letter, times) in self.units.items():
            low, high = self.read.ranges.get(symbol, (0, None))
            low = low if low > 2 else 1  # a lower bound of 2 comes from torch.export, not from the program
            bounds = (max(1, -(-low // times)), None if high is None else high // times)
            dims[letter] = _narrowest([bounds, *([dims[letter][:2]] if letter in dims else [])])
        return dims

    def _typed(self, program: Program) -> tuple[Program, dict[str, str]]:
        """Returns the program with the type of every node, and the type of every value.

        Raises: CheckpointError where an op does not accept its inputs, or gives another type than the file.
        """
        fakes = Fakes(self.sizes)
        try:
            values = replay(program, fakes)
        except Exception as error:
            words = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"checkpoint {self.path}: its program cannot be run: {type(error).__name__}: {words}"
            ) from error
        for name, value in values.items():
            if not isinstance(value, torch.Tensor) or name not in self.read.types:
                continue
            dtype, sizes = self.read.types[name]
            if (dtype, len(sizes)) != (value.dtype, value.ndim):
                raise CheckpointError(
                    f"checkpoint {self.path}: the value {name} of its program is {dtype_name(value.dtype)} "
                    f"of {value.ndim} dims here, and {dtype_name(dtype)} of {len(sizes)} in the file; "
                    f"{WAY_OUT}"
                )
        dims = fakes.dims.items()
        letters = {dim.node.expr: letter for letter, dim in dims if isinstance(dim, torch.SymInt)}
        types = {name: type_of(value, letters) for name, value in values.items()}
        return replace(program, nodes=tuple(replace(n, out=types[n.name]) for n in program.nodes)), types


def _default_letters(leaves: Sequence[tuple[str, TensorInput]]) -> dict[str, str]:
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


def _spec_axes(path: str, name: str, item: TensorInput, spec: InputSpec) -> dict[int, str]:
    """Returns the letters that a spec gives to an input's dynamic axes. Raises: CaptureError where they
    differ.
    """
    dims = tuple("a dynamic dim" if isinstance(s, Size) else str(s) for s in item.sizes)
    differ = (
        f"input {name} is {TensorType(dtype_name(item.dtype), dims)} in the program of {path}, "
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


def _fits(x: torch.Tensor, item: TensorInput) -> bool:
    """Whether a tensor has the dtype and shape of an input."""
    sizes = zip(x.shape, item.sizes)
    return (
        x.dtype == item.dtype
        and x.ndim == len(item.sizes)
        and all(isinstance(s, Size) or n == s for n, s in sizes)
    )


def unreadable(checkpoint: Checkpoint) -> str:
    """Returns why a checkpoint's program cannot be read; empty if it can, or if the checkpoint is no `.pt2`
    file.
    """
    try:
        if checkpoint.program is not None:
            _read_archive(checkpoint.program)
    except RefusedFile as refused:
        return str(refused)
    return ""


class ExportedProgramFactory(Factory):
    """The factory for checkpoints that are `.pt2` files. Each of them can be read."""

    brings_weights = True

    def __init__(self) -> None:
        super().__init__("the exported programs", _no_factory, {})
        self.takes_state_dict = True  # each program has the sizes of its own weights

    def of(self, checkpoint: Checkpoint, state_dict: Mapping[str, Tensor]) -> nn.Module:
        """Returns the program of a checkpoint as a module, with weights and constants under their names."""
        file = _program_file(checkpoint)
        try:
            return ProgramModule(file, _read_archive(file)).eval()
        except (RefusedFile, ArtifactError) as error:
            raise CheckpointError(f"checkpoint {checkpoint.path}: {error}") from None
        # invalid names or arguments of ops
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: is damaged: its program cannot be put together: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error

    def captured(self, checkpoints: Sequence[Checkpoint], inputs: Sequence[str] | None) -> Captured:
        """Returns the one program of these members, under the conditions of all of them.

        Args:
            checkpoints: The `.pt2` files.
            inputs: Specs that name dims and bound integers; None: the files decide.

        Raises:
            CaptureError: The specs do not fit the programs.
            CheckpointError: A file is damaged.
            MemberMismatch: The programs differ in more than weights.
            UsageError: The specs describe other inputs.
        """
        programs = []
        for checkpoint in checkpoints:
            try:
                programs.append(_compared(checkpoint, inputs))
            except (RefusedFile, ArtifactError) as error:
                raise CheckpointError(f"checkpoint {checkpoint.path}: {error}") from None
        first = programs[0]
        others = [
            f"{other.checkpoint.path} {why}" for other in programs[1:] if (why := _difference(first, other))
        ]
        if others:
            several = f"{len(others)} of {len(checkpoints)} programs differ from the first:\n- "
            raise MemberMismatch((several if others[1:] else "") + "\n- ".join(others))
        every = [p.captured for p in programs]
        dims = {d: _narrowest([c.dims[d][:2] for c in every]) for d in first.captured.dims}
        guards = {str(g.expr): g for c in every for g in c.guards}
        return replace(first.captured, dims=dims, guards=tuple(guards.values()))


def _no_factory() -> nn.Module:
    raise UsageError("exported programs are read from their own files")


class _ComparedProgram(NamedTuple):
    """A `.pt2` file's program, and its nodes without names of values (`numbered`)."""

    checkpoint: Checkpoint
    captured: Captured
    nodes: list[Any]

    @property
    def ops(self) -> list[str]:
        return [row[0] for row in self.nodes[:-1]]


def _compared(checkpoint: Checkpoint, inputs: Sequence[str] | None) -> _ComparedProgram:
    """Reads and captures the program of a checkpoint. inputs: specs that name dims, or None."""
    read = _read_archive(_program_file(checkpoint))
    captured = _FileCapture(checkpoint, read, parse_inputs(inputs or [])[0]).captured()
    return _ComparedProgram(checkpoint, captured, numbered(read))


def _difference(first: _ComparedProgram, other: _ComparedProgram) -> str:
    """Returns where a program differs from the first, to follow its path; empty if they are equal."""
    a, b = first.captured, other.captured
    differs = f"differs from {first.checkpoint.path}"
    takes = [[(leaf.name, leaf.type) for leaf in c.inputs] for c in (b, a)]
    if takes[0] != takes[1] or a.signature != b.signature:
        texts = [", ".join(f"{name}={type_}" for name, type_ in rows) for rows in takes]
        return (
            f"{differs}: it takes {texts[0]}, the other takes {texts[1]}; members have one "
            "architecture and are exported in the same way"
        )
    for node, x, y in zip(a.program.nodes, first.nodes, other.nodes):
        if x != y:
            return (
                f"{differs}, from {node.source or node.name} on: {y[0]}{y[1]} in it, {x[0]}{x[1]} in "
                "the other; members differ in weights only, so make such a number a buffer, and "
                "export all of them in the same way"
            )
    same_length = len(first.nodes) == len(other.nodes)
    if not same_length or first.nodes[-1] != other.nodes[-1] or a.result != b.result:
        return (
            f"{differs}: {len(other.nodes) - 1} ops against {len(first.nodes) - 1}, or other results; "
            "members are of one architecture"
        )
    return ""


def other_programs(checkpoints: Sequence[Checkpoint], inputs: Sequence[str] | None) -> list[str]:
    """Returns for each checkpoint why its program differs from the first of the same shapes; empty if it does
    not.

    Between members of different shapes literals may be sizes, so only the ops are compared. Every program
    must be readable. inputs: specs that name dims, or None.
    """
    of_shapes: dict[Any, _ComparedProgram] = {}
    reasons = []
    for checkpoint in checkpoints:
        try:
            program = _compared(checkpoint, inputs)
        except (RefusedFile, ArtifactError) as error:
            reasons.append(str(error))
            continue
        shapes = tuple(sorted((name, tuple(info.shape)) for name, info in checkpoint.tensors().items()))
        if shapes in of_shapes:
            reasons.append(_difference(of_shapes[shapes], program))
            continue
        first = next(iter(of_shapes.values()), program)
        if first.ops == program.ops:
            of_shapes[shapes] = program
            reasons.append("")
        else:
            reasons.append(
                f"differs from {first.checkpoint.path} in its ops; members have one architecture and "
                "are exported in the same way"
            )
    return reasons
