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
    from .building.build import BuildReport as BuildReport
    from .building.build import build as build
    from .errors import ArtifactError as ArtifactError
    from .errors import CaptureError as CaptureError
    from .errors import CheckpointError as CheckpointError
    from .errors import InputError as InputError
    from .errors import LoweringError as LoweringError
    from .errors import MemberMismatch as MemberMismatch
    from .errors import UsageError as UsageError
    from .errors import VerificationError as VerificationError
    from .errors import WidepackError as WidepackError
    from .exporters.export import ExportReport as ExportReport
    from .exporters.export import export as export
    from .fused.module import Fused as Fused
    from .fused.fuse import fuse as fuse
    from .inference.binder import each as each
    from .inference.load import load as load
    from .inference.output import Output as Output
    from .fused.channel_packing import pack as pack
    from .fused.channel_packing import unpack as unpack
    from .revision.revise import ReviseReport as ReviseReport
    from .revision.revise import append as append
    from .revision.revise import drop as drop
    from .revision.revise import update as update
    from .inference.swap import SwapReport as SwapReport
    from .tuning.tune import TuneReport as TuneReport
    from .tuning.tune import tune as tune
    from .inference.model import WideModel as WideModel

_WHERE = {
    "build": "building.build",
    "BuildReport": "building.build",
    "load": "inference.load",
    "fuse": "fused.fuse",
    "Fused": "fused.module",
    "pack": "fused.channel_packing",
    "unpack": "fused.channel_packing",
    "WideModel": "inference.model",
    "each": "inference.binder",
    "Output": "inference.output",
    "SwapReport": "inference.swap",
    "tune": "tuning.tune",
    "TuneReport": "tuning.tune",
    "update": "revision.revise",
    "append": "revision.revise",
    "drop": "revision.revise",
    "ReviseReport": "revision.revise",
    "export": "exporters.export",
    "ExportReport": "exporters.export",
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
