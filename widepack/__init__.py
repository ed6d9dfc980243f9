"""widepack: N trained models of one architecture as one.

    widepack.build(checkpoints, "ens.wide", model="pkg.mod:factory", inputs=["x=float32[B,3,32,32]"])
    ens = widepack.load("ens.wide")
    y = ens(x)        # every member sees x; each output leaf [N, *the member's shape]
    y = ens.each(xs)  # member i sees xs[i]

Importing this package imports neither torch nor the rules until one of these names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .building import BuildReport as BuildReport
    from .building import build as build
    from .errors import ArtifactError as ArtifactError
    from .errors import CaptureError as CaptureError
    from .errors import CheckpointError as CheckpointError
    from .errors import InputError as InputError
    from .errors import LoweringError as LoweringError
    from .errors import MemberMismatch as MemberMismatch
    from .errors import UsageError as UsageError
    from .errors import VerificationError as VerificationError
    from .errors import WidepackError as WidepackError
    from .exporting_forms import ExportReport as ExportReport
    from .exporting_forms import export as export
    from .fused import Fused as Fused
    from .fusing import fuse as fuse
    from .inputs import each as each
    from .loading import load as load
    from .output import Output as Output
    from .packing import pack as pack
    from .packing import unpack as unpack
    from .revising import ReviseReport as ReviseReport
    from .revising import append as append
    from .revising import drop as drop
    from .revising import update as update
    from .swapping import SwapReport as SwapReport
    from .tuner import TuneReport as TuneReport
    from .tuner import tune as tune
    from .wide_model import WideModel as WideModel

_WHERE = {
    "build": "building",
    "BuildReport": "building",
    "load": "loading",
    "fuse": "fusing",
    "Fused": "fused",
    "pack": "packing",
    "unpack": "packing",
    "WideModel": "wide_model",
    "each": "inputs",
    "Output": "output",
    "SwapReport": "swapping",
    "tune": "tuner",
    "TuneReport": "tuner",
    "update": "revising",
    "append": "revising",
    "drop": "revising",
    "ReviseReport": "revising",
    "export": "exporting_forms",
    "ExportReport": "exporting_forms",
    **dict.fromkeys(
        (
            "WidepackError",
            "UsageError",
            "CheckpointError",
            "MemberMismatch",
            "CaptureError",
            "LoweringError",
            "VerificationError",
            "InputError",
            "ArtifactError",
        ),
        "errors",
    ),
}
__all__ = ["__version__", *_WHERE]


_MODULES = ("optim", "primitives")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _WHERE:
        raise AttributeError(f"module 'widepack' has no attribute {name!r}")
    module = import_module(f".{_WHERE[name]}", __name__)
    value = getattr(module, name)
    globals()[name] = value
    return value
