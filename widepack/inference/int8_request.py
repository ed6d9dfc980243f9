"""Checks the options of a load with int8 weights: `load(weights="int8", max_error=...)`."""

from __future__ import annotations

import math
from typing import Any

import torch

from widepack_artifacts.manifest import Manifest

from ..errors import UsageError
from .cast import Cast
from .model import WideModel
from .open_artifact import Int8Weights

INT8 = "int8"


def int8_request(weights: Any, max_error: Any) -> Int8Weights | None:
    """Returns the request for int8 weights; None for float weights.

    Raises: UsageError for unknown weights, and for a limit that is not a positive number.
    """
    if weights is None:
        if max_error is not None:
            raise UsageError(
                f"max_error={max_error!r:.40} limits what int8 weights may change; give weights='int8' too"
            )
        return None
    if weights != INT8:
        raise UsageError(
            f"weights={weights!r:.40} is unknown; known: 'int8', and None for the weights as they are stored"
        )
    if max_error is None:
        return Int8Weights()
    number = isinstance(max_error, (int, float)) and not isinstance(max_error, bool)
    if not number or not 0 < max_error < math.inf:
        raise UsageError(
            f"max_error={max_error!r:.40} is not a limit; give a number above 0, for example 0.02 for 2% of"
            " the answer's rms"
        )
    return Int8Weights(float(max_error))


def check_options(
    device: torch.device, backend: str, compile: str | None, strategies: Any, prologue: bool, verify: str
) -> None:
    """Refuses options that int8 weights exclude. Raises: UsageError."""
    refused = {
        f"device={str(device)!r}": (device.type != "cpu", "int8 weights run only on the CPU"),
        f"backend={backend!r}": (backend not in ("auto", "eager"), "int8 weights run only on 'eager'"),
        f"compile={compile!r}": (compile is not None, "int8 weights run only on 'eager'"),
        "strategies": (strategies is not None, "the plans of int8 weights are made at load"),
        "prologue=False": (not prologue, "weights are quantized once, at load"),
        "verify='off'": (verify == "off", "the error of int8 weights is measured on the probe"),
    }
    for option, (excluded, why) in refused.items():
        if excluded:
            raise UsageError(f"weights='int8' cannot be used with {option}: {why}; leave out one of the two")


def check_artifact(manifest: Manifest, cast: Cast | None) -> None:
    """Refuses artifacts that have no int8 form. Raises: UsageError."""
    if manifest.factored.weights:
        raise UsageError(
            "weights='int8': this artifact stores factors of a base of all members, and reads few bytes"
            " already; load without weights"
        )
    if not manifest.probe:
        raise UsageError(
            "weights='int8': this artifact has no probe, so the error of int8 weights cannot be measured;"
            " build it again"
        )
    dtypes = {cast.table.get(w.dtype, w.dtype) if cast else w.dtype for w in manifest.weights}
    if "float32" not in dtypes:
        raise UsageError(
            "weights='int8' quantizes float32 weights, and those of this load are "
            f"{', '.join(sorted(dtypes))}; load with dtype='fp32'"
        )


def check_loaded(model: WideModel) -> None:
    """Refuses a model in which no program that is bound reads int8 weights. Raises: UsageError."""
    if not any(b.int8 for name in model.entries for _, b in model.entry(name).programs.bound()):
        raise UsageError(
            "weights='int8': no linear layer of this artifact would be faster with int8 weights: the layers"
            " have few weights, or the smallest batch has many rows for each member. Load without weights"
        )
