"""Measures the kernel times of this machine for advice, with what the call of a wide program takes beside
its kernels.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache, partial

import torch

import widepack
from widepack.kernel_times.calibration import measure, seconds
from widepack.kernel_times.profile import Profile
from widepack.kernel_times.program import wide_seconds
from widepack.kernel_times.sources import measured_here

from ..measure.loading import entry_of
from ..models.factory import MODELS
from ..models.mlp import mlp
from ..models.weights import write_checkpoints


@cache
def times_here(threads: int, dtype: str = "float32") -> Profile:
    """Returns the kernel times of this machine's processor.

    Args:
        threads: The number of torch's threads, which the caller has set.
        dtype: Of all values.

    Returns:
        The times: those that `widepack calibrate` measured, else those that are measured now, once in a
        process for each argument.
    """
    stored = measured_here()
    profile = stored if stored is not None and stored.dtype == dtype else measure(dtype)
    return replace(profile, call_s=_call_s(profile))


def _call_s(profile: Profile) -> float:
    """Measures the call of a wide program without its kernels, with an artifact of two members."""
    with tempfile.TemporaryDirectory(prefix="widepack-times-") as folder:
        paths = write_checkpoints(mlp, 2, folder)
        path = f"{folder}/small.wide"
        widepack.build(
            paths, path, model=f"{MODELS}.mlp:mlp", inputs=["input=float32[B,64]"], pt2=False, budget=0
        )
        ens = widepack.load(path, backend="eager")
        program = entry_of(ens).programs.for_sizes("shared", {"B": 1}).program
        with torch.inference_mode():
            once = seconds(partial(ens, torch.ones(1, 64)))
            return max(0.0, once - wide_seconds(program, {"B": 1}, profile))
