"""A program of an artifact as a `torch.export` program, which runs without widepack: `torch.export.load(f).module()(x)`.

Weights `inside` are under the names that they have in the artifact's weights files; with `none` they are left out, as in the artifact's own `.pt2` files, and whoever
loads the program puts them into `state_dict`. A file is made from the artifact's checked programs and never copied: loading a `.pt2` can run code that is in it.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from widepack_artifacts import tree
from widepack_artifacts.manifest import Entry

from ..system import atomic_file as single
from ..backends.task import first_line, quiet
from ..errors import LoweringError, WidepackError
from ..backends.torch_export import exported_program, flat_weights, placeholder, save_program, without_literals
from .subject import Run, Subject
from ..ir.fake_values import Fakes

_QUOTES = re.compile(r"[\"'\\\x00-\x1f]")


@dataclass
class WrittenPt2:
    inputs: list[str]
    outputs: list[str]
    weights: int


def write(subject: Subject, path: Path, weights: str) -> WrittenPt2:
    """Write the file. Raises: LoweringError for what torch.export cannot hold."""
    result, keywords = calling(subject.entry)
    _refuse_names(subject)
    fakes = Fakes(subject.example)
    values = _values(subject)
    try:
        with torch.no_grad():
            made = exported_program(subject.program, fakes, subject.dims, result, keywords, values if weights == "inside" else None)
            with single.Sink(path) as file, quiet():
                save_program(made, file)
    except (WidepackError, OSError):
        raise
    except Exception as e:
        raise LoweringError(
            f"{subject.said} cannot be written by torch.export of torch {torch.__version__}: {type(e).__name__}: {first_line(e)}"
        ) from e
    entry = subject.entry
    several = f"{subject.members}," if subject.members else ""
    return WrittenPt2(
        [f"{placeholder(i.name)}={i.type.replace('[', f'[{several}' if own else '[', 1)}" for i, own in zip(entry.inputs, subject.own_inputs)],
        [f"{o.name or 'output'}={o.type.replace('[', f'[{several}', 1)}" for o in entry.outputs],
        len(values),
    )


def hold(subject: Subject, path: Path, weights: str) -> str:
    """Load the file, which was written by this process a moment ago, and hold it to the artifact. Gives what was tried. Raises: VerificationError, LoweringError."""
    try:
        loaded = torch.export.load(path)
        if weights == "none":
            loaded.state_dict.update(_values(subject))
        run = _called(subject, loaded.module())
        tried = subject.hold(run, f"{subject.said}, written as a torch.export program,")
    except (WidepackError, OSError):
        raise
    except Exception as e:
        raise LoweringError(
            f"{subject.said}: torch.export of torch {torch.__version__} does not run what was written: {type(e).__name__}: {first_line(e)}"
        ) from e
    return f"torch {torch.__version__}: {'; '.join(tried)}" if tried else "not checked: the artifact has no probe, and no sizes to try"


def calling(entry: Entry) -> tuple[tree.Tree, frozenset[str]]:
    """The result's tree of an entry as a torch.export program has it, and which inputs are given by keyword.

    With state: (result, {state: new value}), and the states as keywords: `y, state = model(x, **state)`.
    """
    keywords = frozenset(entry.inputs[i].name for p in entry.signature if p.kind == "keyword" for i in tree.paths(p.tree))
    if not entry.state:
        return entry.result, keywords
    names = {s.output: entry.inputs[s.input].name for s in entry.state}
    states = {"dict": [[placeholder(name), {"leaf": o}] for o, name in names.items()]}
    return {"tuple": [entry.result, states]}, keywords | set(names.values())


def _called(subject: Subject, module: Any) -> Run:
    """The program as a function of its inputs in the manifest's order."""
    result, keywords = calling(subject.entry)
    inputs, outputs = subject.entry.inputs, subject.kinds
    numbers = [[k] * subject.members if kind == "ragged" else k for k, kind in enumerate(outputs)]
    order = pytree.tree_leaves(tree.build(without_literals(result), numbers, lambda _, rows: dict(rows)))

    def run(given: Sequence[torch.Tensor]) -> list[Any]:
        args = [x for x, i in zip(given, inputs) if i.name not in keywords]
        named = {placeholder(i.name): x for x, i in zip(given, inputs) if i.name in keywords}
        with torch.no_grad():
            found = pytree.tree_leaves(module(*args, **named))
        answers: list[Any] = [[] if kind == "ragged" else None for kind in outputs]
        for k, value in zip(order, found, strict=True):
            if outputs[k] == "ragged":
                answers[k].append(value)
            else:
                answers[k] = value
        return answers

    return run


def _values(subject: Subject) -> dict[str, torch.Tensor]:
    """Every weight of the program by its name in the weights file, each in a memory of its own: torch writes out all of the memory that a tensor is a part of."""
    held: Mapping[str, Any] = {
        name: part
        for source, value in subject.values.items()
        for name, part in ([(f"{source}@{i}", v) for i, v in enumerate(value)] if isinstance(value, (list, tuple)) else [(source, value)])
    }
    return {s.source: _alone(held[s.source]) for s in flat_weights(subject.program).weights}


def _alone(value: torch.Tensor) -> torch.Tensor:
    value = value.detach().contiguous()
    begin, size = value.storage_offset() * value.element_size(), value.numel() * value.element_size()
    return torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()[begin : begin + size], 0, value.shape, value.stride())


def _refuse_names(subject: Subject) -> None:
    """Torch writes names into Python that it runs when a program is loaded: one that is none is refused, since an artifact may come from anywhere. Raises: LoweringError."""
    for spec in subject.entry.inputs:
        name = placeholder(spec.name)
        if not name.isidentifier() or keyword.iskeyword(name):
            raise LoweringError(
                f"{subject.said}: a torch.export program cannot have an input called {spec.name[:60]!r}; Python's names are letters, digits and _"
            )
    for name in subject.values:
        if _QUOTES.search(name):
            raise LoweringError(f"{subject.said}: a torch.export program cannot have a weight called {name[:60]!r}")
