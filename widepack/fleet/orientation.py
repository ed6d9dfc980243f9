"""Finds which weights of a model are stored transposed: `[in, out]`, as those of transformers' Conv1D.

`adapter_config.json` has one setting for this, `fan_in_fan_out`. PEFT changes it at every layer, so the file
has that of the last one. Only the shape or the model tells how a weight is stored, and a square weight has no
shape that tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from widepack_artifacts.program import Program, Ref

Turned = Mapping[str, bool]
"""Whether a weight is stored transposed, by its name. Weights that are not in it are unknown."""
_SECOND = {"aten.mm.default": 1, "aten.matmul.default": 1, "aten.addmm.default": 2}
_TURNED = ("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.numpy_T.default")


def of_module(module: nn.Module) -> dict[str, bool]:
    """Returns which weights of linear layers a model stores transposed, by the class of each layer."""
    found = {}
    for name, part in module.named_modules(remove_duplicate=False):
        weight = getattr(part, "weight", None)
        if weight is None or getattr(weight, "ndim", 0) != 2:
            continue
        if isinstance(part, nn.Linear):
            found[f"{name}.weight".lstrip(".")] = False
        elif type(part).__name__ == "Conv1D":  # transformers' class; it is not imported for this
            found[f"{name}.weight".lstrip(".")] = True
    return found


def of_programs(programs: Iterable[Program]) -> dict[str, bool]:
    """Returns which weights member programs read as they are stored, in a product from the right."""
    found: dict[str, set[bool]] = {}
    for program in programs:
        sources = {s.name: s.source for s in program.weights}
        for node in program.nodes:
            place = 1 if node.op == "aten.linear.default" else _SECOND.get(node.op, 0)
            if node.op in _TURNED and len(node.args):
                _add(found, sources, node.args[0], False)
            elif place and len(node.args) > place:
                _add(found, sources, node.args[place], node.op != "aten.linear.default")
    return {name: ways.pop() for name, ways in found.items() if len(ways) == 1}


def _add(found: dict[str, set[bool]], sources: Mapping[str, str], value: object, turned: bool) -> None:
    if isinstance(value, Ref) and value.name in sources:
        found.setdefault(sources[value.name], set()).add(turned)
