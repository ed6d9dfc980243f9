"""Decides in which precision figures are computed."""

from __future__ import annotations

import torch


def wide(answers: torch.Tensor) -> torch.Tensor:
    """Returns answers in float32 or wider: half precision would lose the differences between members."""
    return answers.float() if answers.dtype in (torch.float16, torch.bfloat16) else answers
