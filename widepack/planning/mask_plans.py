"""Plans for attention with masks on a CPU: the strategy `blocks`, in wide regions and in loops.

The op of this strategy skips keys that the mask forbids (kernels/masked.py). It looks at the mask at each
call of long sequences, so it serves masks of any origin. Short ones run as in torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from widepack_artifacts.program import Kind, Node, Program

from ..ir import ops
from ..kernels.masked import OP, PLAIN
from .plan import NodeChoice

BLOCKS = "blocks"
BECAUSE = "of long sequences, keys that the mask forbids are skipped"


def masked_attention(program: Program, found: Mapping[str, Kind]) -> dict[str, NodeChoice]:
    """Returns the attention with a mask or `is_causal` that differs between members.

    Args:
        program: The member program.
        found: The kinds of its values.
    """
    return {
        n.name: NodeChoice(BLOCKS, BECAUSE)
        for n in program.nodes
        if n.op == PLAIN and found[n.name] == "stacked" and _has_mask(n)
    }


def in_loop(node: Node, choices: Mapping[str, NodeChoice], device: str) -> Node | None:
    """Returns the node for the body of a loop, if the plan names `blocks` for it; else None."""
    choice = choices.get(node.name)
    if choice is None or choice.strategy != BLOCKS or device != "cpu" or node.op != PLAIN:
        return None
    return replace(node, op=OP, out="", member=node.name)


def _has_mask(node: Node) -> bool:
    bound = ops.bind(node.op, node.args, node.kwargs)
    masked = bound.get("attn_mask") is not None or bound.get("is_causal") is True
    return masked and not bound.get("dropout_p")
