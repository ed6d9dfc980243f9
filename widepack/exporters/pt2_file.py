"""Writes a program of an artifact as a `torch.export` program: `torch.export.load(f).module()(x)` runs it.

Weights `inside` have the names of the artifact's weights files. With `none` they are left out, as in the
artifact's `.pt2` files, and the reader puts them into `state_dict`. The program is exported from the
artifact's checked programs. A `.pt2` file of the artifact is never copied, because loading one can run code
that is in it.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from widepack_artifacts import tree
from widepack_artifacts.entry import Entry

from ..backends.flat import nodes_unrolled
from ..backends.task import quiet
from ..backends.torch_export import (
    exported_program,
    flat_weights,
    placeholder,
    save_program,
    without_literals,
)
from ..errors import LoweringError
from ..ir.fake_values import Fakes
from ..system import atomic_file, deadline
from .subject import ExportSubject, Run, Written, lowering_error

_QUOTES = re.compile(r"[\"'\\\x00-\x1f]")


def write(subject: ExportSubject, path: Path, weights: str) -> Written:
    """Writes the file. Raises: LoweringError for a program that torch.export cannot express."""
    result, keywords = calling_convention(subject.entry)
    _refuse_names(subject)
    fakes = Fakes(subject.example)
    values = _values(subject)
    inside = values if weights == "inside" else None
    with (
        lowering_error(f"{subject.title} cannot be written by torch.export of torch {torch.__version__}"),
        torch.no_grad(),
        deadline.within(60 + 0.5 * nodes_unrolled(subject.program)),
    ):
        exported = exported_program(subject.program, fakes, subject.dims, result, keywords, inside)
        with atomic_file.Sink(path) as file, quiet():
            save_program(exported, file)
    entry = subject.entry
    axis = f"{subject.members}," if subject.members else ""
    return Written(
        inputs=[
            f"{placeholder(i.name)}={i.type.replace('[', f'[{axis}' if stacked else '[', 1)}"
            for i, stacked in zip(entry.inputs, subject.stacked_inputs)
        ],
        outputs=[f"{o.name or 'output'}={o.type.replace('[', f'[{axis}', 1)}" for o in entry.outputs],
        initializers=len(values),
    )


def check(subject: ExportSubject, path: Path, weights: str) -> str:
    """Loads the file, which this process has just written, and compares its answers with the artifact's.

    Returns: what was compared, in words, or `not checked: ` and the reason. Raises: VerificationError,
    LoweringError.
    """
    version = f"torch {torch.__version__}"
    with lowering_error(f"{subject.title}: torch.export of {version} does not run the file that was written"):
        loaded = torch.export.load(path)
        if weights == "none":
            loaded.state_dict.update(_values(subject))
        return subject.compare(_callable(subject, loaded.module()), "a torch.export program", version)


def calling_convention(entry: Entry) -> tuple[tree.Tree, frozenset[str]]:
    """Returns the result's tree in a torch.export program, and the names of the inputs that are keywords.

    An entry with state returns (result, {state: new value}) and takes states as keywords:
    `y, state = model(x, **state)`.
    """
    keywords = frozenset(
        entry.inputs[i].name for p in entry.signature if p.kind == "keyword" for i in tree.paths(p.tree)
    )
    if not entry.state:
        return entry.result, keywords
    names = {s.output: entry.inputs[s.input].name for s in entry.state}
    states = {"dict": [[placeholder(name), {"leaf": o}] for o, name in names.items()]}
    return {"tuple": [entry.result, states]}, keywords | set(names.values())


def _callable(subject: ExportSubject, module: Any) -> Run:
    """Returns the loaded program as a function of its inputs in the manifest's order."""
    result, keywords = calling_convention(subject.entry)
    inputs, kinds = subject.entry.inputs, subject.kinds
    numbers = [[k] * subject.members if kind == "ragged" else k for k, kind in enumerate(kinds)]
    order = pytree.tree_leaves(tree.build(without_literals(result), numbers, lambda _, rows: dict(rows)))

    def run(values: Sequence[torch.Tensor]) -> list[Any]:
        args = [x for x, i in zip(values, inputs) if i.name not in keywords]
        kwargs = {placeholder(i.name): x for x, i in zip(values, inputs) if i.name in keywords}
        with torch.no_grad():
            leaves = pytree.tree_leaves(module(*args, **kwargs))
        answers: list[Any] = [[] if kind == "ragged" else None for kind in kinds]
        for k, value in zip(order, leaves, strict=True):
            if kinds[k] == "ragged":
                answers[k].append(value)
            else:
                answers[k] = value
        return answers

    return run


def _values(subject: ExportSubject) -> dict[str, torch.Tensor]:
    """Returns the program's weights by their names in the weights file. Each has separate memory, because
    torch writes all of the memory that a tensor is a part of.
    """
    tensors: dict[str, Any] = {}
    for source, value in subject.values.items():
        if isinstance(value, (list, tuple)):
            tensors.update((f"{source}@{i}", v) for i, v in enumerate(value))
        else:
            tensors[source] = value
    names = [s.source for s in flat_weights(subject.program).weights]
    return {name: _with_separate_storage(tensors[name]) for name in names}


def _with_separate_storage(value: torch.Tensor) -> torch.Tensor:
    """Returns a view of a tensor whose storage ends where the tensor ends. The memory is not copied."""
    value = value.detach().contiguous()
    start, size = value.storage_offset() * value.element_size(), value.numel() * value.element_size()
    return torch.empty(0, dtype=value.dtype).set_(
        value.untyped_storage()[start : start + size], 0, value.shape, value.stride()
    )


def _refuse_names(subject: ExportSubject) -> None:
    """Refuses names that are not Python names. torch writes names into Python code that runs when a program
    is loaded, and an artifact may come from anyone. Raises: LoweringError.
    """
    for spec in subject.entry.inputs:
        name = placeholder(spec.name)
        if not name.isidentifier() or keyword.iskeyword(name):
            raise LoweringError(
                f"{subject.title}: a torch.export program cannot have an input called {spec.name[:60]!r}; "
                "names in Python have letters, digits and _ only"
            )
    for name in subject.values:
        if _QUOTES.search(name):
            raise LoweringError(
                f"{subject.title}: a torch.export program cannot have a weight called {name[:60]!r}"
            )
