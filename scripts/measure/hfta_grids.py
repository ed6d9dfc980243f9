"""The options that HFTA's own tests give its operators and optimizers (UofT-EcoSystem/hfta, `*_test.py`).

A test of HFTA has defaults, and a list of values for each option. It runs once for each value, with the other
options at their defaults. `cases` returns these option sets. The files and their families:

| test of HFTA | families |
|---|---|
| `hfta/ops/linear_test.py` | Linear |
| `hfta/ops/conv_test.py` | Conv1d, Conv2d, ConvTranspose2d |
| `hfta/ops/batchnorm_test.py` | BatchNorm1d, BatchNorm2d |
| `hfta/ops/normalization_test.py`, `layernorm_test.py` | LayerNorm |
| `hfta/ops/sparse_test.py`, `embedding_test.py` | Embedding |
| `hfta/ops/pooling_test.py`, `pool_test.py` | MaxPool2d, AdaptiveAvgPool2d |
| `hfta/ops/dropout2d_test.py` | Dropout2d |
| `hfta/ops/multiheadattention_test.py` | MultiheadAttention, MultiheadAttention, one model |
| `hfta/optim/adam_test.py` | Adam, Adam, partially fused |
| `hfta/optim/adadelta_test.py` | Adadelta, Adadelta, partially fused |
| `hfta/optim/lr_scheduler_test.py` | StepLR, StepLR, partially fused |

Each pair of files in one row has one grid in two ages; the newer one has every value of the older one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy
import torch

Options = dict[str, Any]
CUDA = "cuda:0"
MEMBERS = (1, 2, 5, 10)
FEW_MEMBERS = (1, 5, 8)
BATCHES = (1, 8, 64)
DOUBLE = (torch.float64,)
FLOATS = (torch.float32, torch.float64)
CONTAINERS: dict[str, Callable[[Sequence[float]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": numpy.array,
    "tensor": torch.tensor,
}


@dataclass(frozen=True)
class Grid:
    """defaults: every option. values: for each option, the values that replace its default, one at a time."""

    defaults: Mapping[str, Any]
    values: Mapping[str, Sequence[Any]]


def _grid(defaults: Options, values: Options, members: int = 3) -> Grid:
    return Grid({"members": members, "device": "cpu", "dtype": torch.float32, **defaults}, values)


def _conv(size: str, defaults: Options, values: Options) -> Grid:
    """Returns the grid of a convolution. size: the option that has the length or the side of its input."""
    return _grid(
        {
            "batch": 32,
            "in_channels": 4,
            "out_channels": 16,
            "kernel_size": 3,
            size: 28,
            "stride": 1,
            "padding": 0,
            "dilation": 1,
            "groups": 1,
            "bias": True,
            **defaults,
        },
        {
            "members": MEMBERS,
            "batch": BATCHES,
            "in_channels": (3, 128),
            "out_channels": (1, 64),
            "kernel_size": (1, 5, 7),
            size: (32, 128),
            "stride": (2,),
            "padding": (2,),
            "dilation": (2,),
            "groups": (2,),
            "bias": (False,),
            "device": (CUDA,),
            "dtype": FLOATS,
            **values,
        },
    )


def _batch_norm(size: str, default: int, sizes: Sequence[int]) -> Grid:
    return _grid(
        {
            "features": 128,
            "batch": 8,
            size: default,
            "momentum": 0.1,
            "affine": True,
            "track_running_stats": True,
            "training": True,
            "steps": 10,
        },
        {
            "features": (1, 16, 128),
            "members": MEMBERS,
            "batch": (16, 64),
            size: sizes,
            "momentum": (0.01,),
            "affine": (True, False),
            "track_running_stats": (True, False),
            "training": (True, False),
            "device": ("cpu", CUDA),
            "dtype": FLOATS,
        },
    )


PADDING_MODES = ("reflect", "replicate", "circular")
ATTENTION: Options = {
    "batch": 16,
    "length": 32,
    "embed_dim": 64,
    "num_heads": 8,
    "bias": True,
    "need_weights": True,
    "causal": True,
}
ATTENTION_VALUES: Options = {
    "batch": (1, 8, 32, 64),
    "length": (16, 32, 64),
    "embed_dim": (16, 32, 64, 128),
    "num_heads": (1, 16, 32),
    "bias": (False,),
    "need_weights": (False,),
    "causal": (False,),
}

LAYERS: dict[str, Grid] = {
    "Linear": _grid(
        {"batch": 32, "length": 8, "in_features": 20, "out_features": 50, "bias": True},
        {
            "members": MEMBERS,
            "batch": BATCHES,
            "length": (1, 16, 32),
            "in_features": (10, 256, 1),
            "out_features": (100, 10, 1),
            "bias": (False,),
            "device": (CUDA,),
            "dtype": DOUBLE,
        },
    ),
    "Conv1d": _conv("length", {"padding_mode": "zeros"}, {"padding_mode": PADDING_MODES}),
    "Conv2d": _conv("side", {"padding_mode": "zeros"}, {"padding_mode": PADDING_MODES}),
    "ConvTranspose2d": _conv(
        "side",
        {"output_padding": 0, "output_size": None},
        {
            "padding": (1, 2),
            "output_padding": (1, 2),  # with a stride and a dilation of one more
            "output_size": ((32, 16, 57, 58), (57, 58)),  # with a stride of 2
        },
    ),
    "BatchNorm1d": _batch_norm("length", 16, (0, 1, 8, 64)),  # a length of 0: an input of two dims
    "BatchNorm2d": _batch_norm("side", 28, (32, 128)),
    "LayerNorm": _grid(
        {"batch": 64, "shape": (200,), "affine": True},
        {
            "members": MEMBERS,
            "batch": BATCHES,
            "shape": ((8, 10, 20), (20,), (10, 20)),
            "affine": (False,),
            "device": (CUDA,),
            "dtype": DOUBLE,
        },
        members=5,
    ),
    "Embedding": _grid(
        {
            "batch": 32,
            "shape": (20,),
            "rows": 200,
            "embedding_dim": 50,
            "padding_idx": None,
            "indices": torch.int32,
        },
        {
            "members": MEMBERS,
            "batch": BATCHES,
            "shape": ((32,), (16, 16), (8, 8, 8), (128,), (512,)),
            "rows": (50, 200, 2000),
            "embedding_dim": (32, 128, 786),
            "padding_idx": (0,),
            "device": (CUDA,),
            "indices": (torch.int32, torch.int64),
            "dtype": FLOATS,
        },
    ),
    "MaxPool2d": _grid(
        {
            "batch": 32,
            "channels": 16,
            "kernel_size": 2,
            "side": 28,
            "stride": None,
            "padding": 0,
            "dilation": 1,
            "return_indices": False,
            "ceil_mode": False,
        },
        {
            "members": MEMBERS,
            "batch": BATCHES,
            "channels": (3, 64, 128),
            "kernel_size": (1, 3, 4),
            "side": (32, 256),
            "stride": (1, 3, 4),
            "padding": (1,),
            "dilation": (2, 5),
            "return_indices": (True,),
            "ceil_mode": (True,),
            "device": (CUDA,),
            "dtype": DOUBLE,
        },
    ),
    "AdaptiveAvgPool2d": _grid(
        {"batch": 32, "channels": 16, "side": 28, "output_size": (16, 16)},
        {
            "members": MEMBERS,
            "batch": BATCHES,
            "channels": (3, 64, 128),
            "side": (32, 256),
            "output_size": ((5, 5), (7, 16), (17, 6), (14, None), (None, 20), (None, None), 9),
            "device": (CUDA,),
            "dtype": DOUBLE,
        },
    ),
    "Dropout2d": _grid(
        {"batch": 32, "channels": 1024, "side": 16, "p": 0.4},
        {
            "p": (0.25, 0.99),
            "members": (1, 8),
            "batch": (1, 64),
            "channels": (2000,),
            "side": (8, 32),
            "device": (CUDA,),
            "dtype": DOUBLE,
        },
    ),
    "MultiheadAttention": _grid(ATTENTION, {"members": (1, 3, 5, 10), **ATTENTION_VALUES}),
    "MultiheadAttention, one model": _grid(ATTENTION, ATTENTION_VALUES, members=1),
}


def _rates(*numbers: Sequence[float]) -> tuple[Any, ...]:
    """Returns each list of numbers in each container."""
    return tuple(make(row) for row in numbers for make in CONTAINERS.values())


def _beta_pairs() -> tuple[Any, ...]:
    first, second = ((0.7, 0.8, 0.9), (0.9, 0.9, 0.9)), ((0.777, 0.888, 0.999), (0.999, 0.999, 0.999))
    makes = list(CONTAINERS.values())
    return (
        *((make(row), 0.999) for row, make in product(first, makes)),
        *((0.9, make(row)) for row, make in product(second, makes)),
        *((make(a), make(b)) for (a, b), make in product(zip(first, second), makes)),
    )


DECAYS = (*_rates((0.1, 0.03, 0.0), (0.0, 0.0, 0.0)), 0.3, 0.0)
OPTIMIZERS: dict[str, Grid] = {
    "Adam": Grid(
        {
            "members": 3,
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0,
            "amsgrad": False,
        },
        {
            "members": FEW_MEMBERS,
            "lr": _rates((1e-3, 3e-3, 1e-2), (1e-3, 1e-3, 1e-3)),
            "betas": _beta_pairs(),
            "eps": _rates((1e-7, 1e-8, 1e-9), (1e-8, 1e-8, 1e-8)),
            "weight_decay": DECAYS,
            "amsgrad": (True,),
        },
    ),
    "Adam, partially fused": Grid(
        {"members": 3, "amsgrad": False}, {"members": FEW_MEMBERS, "amsgrad": (True,)}
    ),
    "Adadelta": Grid(
        {"members": 3, "lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0},
        {
            "members": FEW_MEMBERS,
            "lr": _rates((0.5, 1.0, 2.0), (1.0, 1.0, 1.0)),
            "rho": _rates((0.1, 0.9, 0.99), (0.9, 0.9, 0.9)),
            "eps": _rates((1e-6, 1e-5, 1e-7), (1e-6, 1e-6, 1e-6)),
            "weight_decay": DECAYS,
        },
    ),
    "Adadelta, partially fused": Grid({"members": 3}, {"members": FEW_MEMBERS}),
    "StepLR": Grid(
        {"members": 3, "step_size": 2, "gamma": 0.1, "last_epoch": -1},
        {
            "members": FEW_MEMBERS,
            "step_size": _rates((2, 3, 4)),
            "gamma": _rates((0.1, 0.2, 0.3)),
            "last_epoch": (5, *_rates((5, 6, 7))),
        },
    ),
    "StepLR, partially fused": Grid({"members": 3}, {"members": FEW_MEMBERS}),
}


def cases(grid: Grid) -> Iterator[tuple[str, Options]]:
    """Yields the name and the options of each case: one value of one option, the others at their defaults."""
    for option, values in grid.values.items():
        for number, value in enumerate(values):
            yield f"{option}[{number}] = {text(value)}", {**grid.defaults, option: value}


def text(value: Any) -> str:
    """Returns a value as a case names it, for example `array [0.7, 0.8]` or `float64`."""
    if isinstance(value, (torch.Tensor, numpy.ndarray)):
        kind = "tensor" if isinstance(value, torch.Tensor) else "array"
        return f"{kind} [{', '.join(f'{v:.6g}' for v in value.tolist())}]"
    if isinstance(value, tuple) and any(
        isinstance(v, (list, tuple, torch.Tensor, numpy.ndarray)) for v in value
    ):
        return f"({', '.join(map(text, value))})"
    return str(value).removeprefix("torch.")
