"""Converts the weights of a Hugging Face folder into those of its model, as `from_pretrained` does.

transformers 5 stores weights under the names of its earlier versions, and converts them when it loads them:
it renames them, stacks experts, or splits a projection. The conversion is the class's own. It gets the
weights in memory, so it reads no file of the folder.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MemberMismatch
from .checkpoint import Checkpoint
from .differences import place_of
from .loading import kept, state_of
from .state_dict import info_of

_CONVERTS = 5
"""The first version of transformers whose files have other names than its modules."""
_OTHER_LOADS = ("quantization_config", "fusion_config", "distributed_config")
"""Fields of a config with which `from_pretrained` makes another module than the class does."""
_DETAIL = re.compile(r"^Error.*", re.MULTILINE)  # in the report of transformers, after a traceback


def converted(transformers: Any, given: Checkpoint, module: nn.Module) -> Checkpoint:
    """Returns a checkpoint under the names of a model of transformers, converted by its class.

    What the class does not take stays under its name in the file, so that it is compared with the model. The
    names that the class itself ignores are left out. Names that are not converted keep their tensors mapped.

    Args:
        transformers: The package.
        given: A checkpoint of a folder that `save_pretrained` wrote.
        module: A fresh member. It does not change.

    Raises:
        MemberMismatch: The class cannot convert the checkpoint.
    """
    if int(transformers.__version__.partition(".")[0]) < _CONVERTS:
        return given
    infos = given.tensors()
    state = {name: given.get(name) for name in infos}
    said: list[str] = []
    try:
        with _collected(transformers, said):
            loaded, report = _loaded(module, state)
    except Exception as e:  # a class may raise anything
        detail = _DETAIL.findall("\n".join(said)) or [f"{type(e).__name__}: {e}"]
        raise MemberMismatch(
            f"{type(module).__name__}.from_pretrained of transformers {transformers.__version__} cannot"
            f" convert its weights: {' '.join(detail[0].split())[:300]}"
        ) from e
    sources = _sources(state, module, loaded, report)
    if sources == {name: name for name in infos}:
        return given
    made = {n: infos[s] if isinstance(s, str) else info_of(s) for n, s in sources.items()}

    def read(name: str) -> Tensor:
        source = sources[name]
        return given.get(source) if isinstance(source, str) else source

    return given.converted(made, read)


def _sources(
    state: Mapping[str, Tensor], module: nn.Module, loaded: nn.Module, report: Mapping[str, Any]
) -> dict[str, str | Tensor]:
    """Returns for each weight of a loaded module its name in the file, or its value if it was computed."""
    stored = {place_of(tensor): name for name, tensor in state.items()}
    other_shapes = {name: tuple(shape) for name, shape, _ in report["mismatched_keys"]}
    sources: dict[str, str | Tensor] = {}
    first: dict[object, str] = {}  # the first name of a tied weight
    own = state_of(loaded)
    for name, fresh in state_of(module).items():
        tied = first.setdefault(place_of(fresh), name) != name
        if name in report["missing_keys"] or (tied and name not in state):
            continue
        if tied:
            sources[name] = name
        elif name in other_shapes:
            sources[name] = own[name].new_zeros(()).expand(other_shapes[name])  # refused for its shape
        else:
            sources[name] = stored.get(place_of(own[name])) or kept(own[name])
    return {**{n: n for n in report["unexpected_keys"] if n in state}, **sources}


def _loaded(module: nn.Module, state: Mapping[str, Tensor]) -> tuple[nn.Module, Any]:
    """Returns a module of the same class that has the weights, and what `from_pretrained` reports.

    Weights that are only renamed are the given tensors.
    """
    config = copy.deepcopy(module.config)
    for name in _OTHER_LOADS:
        if hasattr(config, name):
            delattr(config, name)
    floating = {t.dtype for t in state.values() if t.is_floating_point()}
    model_class: Any = type(module)
    loaded, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=dict(state),
        dtype=reduce(torch.promote_types, floating) if floating else torch.float32,  # holds each exactly
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    return loaded, report


class _CollectedLines(logging.Handler):
    """Appends what is logged to a list."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())


@contextmanager
def _collected(transformers: Any, said: list[str]) -> Iterator[None]:
    """Collects the warnings of transformers in the block, in place of writing them, and shows no progress."""
    root, logs = logging.getLogger("transformers"), transformers.utils.logging
    before, level, bar = (root.handlers, root.propagate), root.level, logs.is_progress_bar_enabled()
    root.handlers, root.propagate = [_CollectedLines(said)], False
    root.setLevel(logging.WARNING)
    logs.disable_progress_bar()
    try:
        yield
    finally:
        root.handlers, root.propagate = before
        root.setLevel(level)
        if bar:
            logs.enable_progress_bar()
