"""Makes members of `.pt2` files, which `torch.export.save` wrote. Such a checkpoint needs no `--model`.

Each file has its own graph, conditions and example inputs. What `torch.export.load(path).module()` would run
is read as data (`reader.py`). A build that needs the member's own answers runs it node by node, within the
bounds and conditions that torch wrote down. The programs of all members must be equal but for weights and
constants. Members with other shapes may also differ in sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from widepack_artifacts.errors import ArtifactError

from ...checkpoints.discovery import Checkpoint
from ...checkpoints.factory import Factory
from ...checkpoints.state_dict import RefusedFile
from ...errors import CheckpointError, MemberMismatch, UsageError
from ...spec.input_spec import parse_inputs
from ..capture import Captured
from .captured import captured_of, narrowest_bounds, program_file, read_archive
from .module import ProgramModule
from .reader import numbered


def unreadable(checkpoint: Checkpoint) -> str:
    """Returns why a checkpoint's program cannot be read; empty if it can, or if the checkpoint is no `.pt2`
    file.
    """
    try:
        if checkpoint.program is not None:
            read_archive(checkpoint.program)
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
        file = program_file(checkpoint)
        try:
            return ProgramModule(file, read_archive(file)).eval()
        except (RefusedFile, ArtifactError) as error:
            raise CheckpointError(f"checkpoint {checkpoint.path}: {error}") from None
        except (
            KeyError,
            TypeError,
            AttributeError,
            RuntimeError,
        ) as error:  # invalid names or arguments of ops
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
                read = read_archive(program_file(checkpoint))
                captured = captured_of(checkpoint, read, parse_inputs(inputs or [])[0])
            except (RefusedFile, ArtifactError) as error:
                raise CheckpointError(f"checkpoint {checkpoint.path}: {error}") from None
            programs.append(_ComparedProgram(checkpoint, captured, numbered(read)))
        first = programs[0]
        others = [
            f"{other.checkpoint.path} {why}" for other in programs[1:] if (why := _difference(first, other))
        ]
        if others:
            several = f"{len(others)} of {len(checkpoints)} programs differ from the first:\n- "
            raise MemberMismatch((several if others[1:] else "") + "\n- ".join(others))
        every = [p.captured for p in programs]
        dims = {d: narrowest_bounds([c.dims[d][:2] for c in every]) for d in first.captured.dims}
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
        read = read_archive(program_file(checkpoint))
        try:
            captured = captured_of(checkpoint, read, parse_inputs(inputs or [])[0])
        except (RefusedFile, ArtifactError) as error:
            reasons.append(str(error))
            continue
        program = _ComparedProgram(checkpoint, captured, numbered(read))
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
