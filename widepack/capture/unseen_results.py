"""Finds results of ops that an export did not see.

Inside a transform, torch may compute a result where the export cannot record it. The export then takes the
result for a constant. This constant has a shape, but no values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..ir.torch_internals import is_fake, is_transformed
from .derivatives import UnseenResult
from .explain import source_of


def refuse_unseen(exported: torch.export.ExportedProgram, module: nn.Module) -> None:
    """Refuses a program that reads a constant without values, unless the member's own tensors have none.

    Raises: UnseenResult, with the line that computed the constant, or reads it.
    """
    empty = {name for name, value in exported.constants.items() if _has_no_values(value)}
    if not empty or any(map(is_fake, (*module.parameters(), *module.buffers()))):
        return
    names = {s.arg.name for s in exported.graph_signature.input_specs if s.target in empty}
    constants = [node for node in exported.graph.nodes if node.name in names and node.users]
    if constants:
        line = next(filter(None, (source_of(node, code=True) for node in constants)), "")
        raise UnseenResult("the result of a transform was taken for a constant", line)


def _has_no_values(value: Any) -> bool:
    return is_fake(value) or (isinstance(value, torch.Tensor) and is_transformed(value))
