"""Checks the operands of widepack's own op of packed sequences."""

from __future__ import annotations

from torch import Tensor

from .require import OperandError, between, dense, integers, readable, require

_SHOWN = 8  # lengths in a message


def sequence_lengths(lengths: Tensor, steps: Tensor) -> None:
    """Checks `widepack.sequence_lengths`: the lengths too, where their values can be read without a wait."""
    integers("lengths", lengths)
    require(lengths.dim() >= 1, "lengths has no dims; 1 is needed")
    dense("steps", steps, 1)
    require(steps.device == lengths.device, f"steps is on {steps.device}; lengths is on {lengths.device}")
    if lengths.device.type != "cpu" or not lengths.numel() or not readable(lengths):
        return
    between("lengths", lengths, 1, steps.shape[0])
    for row in lengths[(lengths[..., 1:] > lengths[..., :-1]).any(-1)].reshape(-1, lengths.shape[-1])[:1]:
        texts = ", ".join(map(str, row[:_SHOWN].tolist()))
        raise OperandError(
            f"lengths is {texts}{', ...' if row.numel() > _SHOWN else ''}; pack_padded_sequence with "
            "enforce_sorted=True needs them in descending order"
        )
