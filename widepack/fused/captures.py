"""Captures the programs of a fused module in the mode, dtype and device of its parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..capture.call import MemberCall
from ..capture.capture import Captured, check_literals
from ..errors import UsageError
from ..spec.dropout import switched_on
from .attribute_reads import AttributeReads, recorded_reads
from .member_capture import capture_member
from .programs import FusedEntry, constants_of, refuse_weights
from .recipe import FusedRecipe
from .same_members import refuse_programs


def capture_entry(
    recipe: FusedRecipe,
    call: MemberCall,
    member: Callable[[int], nn.Module],
    device: torch.device,
    mode: str,
) -> FusedEntry:
    """Captures member 0, and those members whose programs may differ from its program.

    Args:
        recipe: What the fused module was made of.
        call: The sample on the CPU, in the dtypes of the weights.
        member: Returns a fresh copy of a member on the CPU, by its number.
        device: The device of the fused module.
        mode: `train` or `eval`, for messages.

    Raises:
        CaptureError: Member 0 cannot be captured.
        MemberMismatch: Members have other programs than member 0.
        UsageError: A shared buffer would change.
    """
    count = len(recipe.skeletons)

    def capture(i: int) -> tuple[Captured, AttributeReads]:
        def fresh() -> nn.Module:
            module = member(i)
            return reads.watch(switched_on(module) if recipe.dropout else module)

        with recorded_reads() as reads:
            captured = capture_member(fresh, call, recipe.dynamic is not None, recipe.dropout)
        refuse_weights(captured, by_name, i, recipe.skeletons[i])
        return captured, reads

    by_name = {name: w for w in recipe.weights for name in (w.name, *w.aliases)}
    first, reads = capture(0)
    refuse_programs(recipe.skeletons, (first, reads), capture, mode)
    check_literals(first, member, range(count), [f"member {i}" for i in range(count)])
    shared = [s.name for s in first.states if by_name[s.name].kind == "shared"]
    if shared:
        whose, way = (
            ("passes of one checkpoint", "fuse N copies of the model")
            if recipe.one_model
            else ("members", "give each member its own copy of them (copy.deepcopy)")
        )
        raise UsageError(
            f"{', '.join(shared)} would change in this mode, and is one buffer for all {count} {whose}. Keep "
            f"these layers in eval mode, or {way}"
        )
    first_names = {name: w.name for name, w in by_name.items()}
    constants = constants_of(first, first_names, recipe.skeletons)
    kinds = {
        **{name: w.kind for name, w in by_name.items()},
        **{name: kind for name, (kind, _) in constants.items()},
    }
    values = {name: value.to(device) for name, (_, value) in constants.items()}
    return FusedEntry(first, kinds, first_names, values, count, device, recipe.strategies)
