"""A small GPT-2 from transformers, without a cache: its language-model head is tied to the embedding, and its
length is dynamic, up to its 64 positions.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from . import generator, trained

N = 3
RECURRENT = False
INPUTS = ["input_ids=int64[B,T]:0..299", "T=2..64"]


def model(width: int = 64, layers: int = 2) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=300,
            n_positions=64,
            n_embd=width,
            n_layer=layers,
            n_head=4,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def sample(batch: int, seed: int, length: int = 10) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randint(0, 300, (batch, length), generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    return trained(model, 700 + i)
