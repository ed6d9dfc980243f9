"""widepack fuses N trained PyTorch models of one architecture into one model.

    widepack.build(checkpoints, "ens.wide", model="pkg.mod:factory", inputs=["x=float32[B,3,32,32]"])
    ens = widepack.load("ens.wide")
    y = ens(x)        # all members get x; each output leaf is [N, *shape]
    y = ens.each(xs)  # member i gets xs[i]

The package imports torch when one of its names is first used. `README.md` describes its folders; `errors.py`
has the classes of errors, `version.py` the version.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from .building.build import build as build
    from .building.report import BuildReport as BuildReport
    from .distributed.device_load import load as load
    from .distributed.device_model import DeviceModel as DeviceModel
    from .errors import ArtifactError as ArtifactError
    from .errors import CaptureError as CaptureError
    from .errors import CheckpointError as CheckpointError
    from .errors import InputError as InputError
    from .errors import LoweringError as LoweringError
    from .errors import MemberMismatch as MemberMismatch
    from .errors import ProbeError as ProbeError
    from .errors import Unavailable as Unavailable
    from .errors import UsageError as UsageError
    from .errors import VerificationError as VerificationError
    from .errors import WidepackError as WidepackError
    from .evaluation.evaluate import EvaluateReport as EvaluateReport
    from .evaluation.evaluate import evaluate as evaluate
    from .exporters.export import ExportReport as ExportReport
    from .exporters.export import export as export
    from .fused.best_members import BestMembers as BestMembers
    from .fused.channel_packing import pack as pack
    from .fused.channel_packing import unpack as unpack
    from .fused.fuse import fuse as fuse
    from .fused.module import Fused as Fused
    from .inference.cascade import CascadeAnswer as CascadeAnswer
    from .inference.input_values import each as each
    from .inference.members.swap import SwapReport as SwapReport
    from .inference.model import WideModel as WideModel
    from .inference.output import Output as Output
    from .prediction.predict import PredictReport as PredictReport
    from .prediction.predict import predict as predict
    from .revision.request import ReviseReport as ReviseReport
    from .revision.revise import append as append
    from .revision.revise import drop as drop
    from .revision.revise import update as update
    from .selection.select import SelectReport as SelectReport
    from .selection.select import select as select
    from .tuning.report import TuneReport as TuneReport
    from .tuning.tune import tune as tune
    from .verification.weight_error import WeightError as WeightError

_WHERE = {
    "build": "building.build",
    "BuildReport": "building.build",
    "load": "distributed.device_load",
    "fuse": "fused.fuse",
    "Fused": "fused.module",
    "BestMembers": "fused.best_members",
    "pack": "fused.channel_packing",
    "unpack": "fused.channel_packing",
    "WideModel": "inference.model",
    "DeviceModel": "distributed.device_model",
    "each": "inference.input_values",
    "CascadeAnswer": "inference.cascade",
    "Output": "inference.output",
    "SwapReport": "inference.members.swap",
    "WeightError": "verification.weight_error",
    "tune": "tuning.tune",
    "TuneReport": "tuning.tune",
    "predict": "prediction.predict",
    "PredictReport": "prediction.predict",
    "evaluate": "evaluation.evaluate",
    "EvaluateReport": "evaluation.evaluate",
    "select": "selection.select",
    "SelectReport": "selection.select",
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
            "ProbeError",
            "Unavailable",
        ),
        "errors",
    ),
}
__all__ = ["__version__", *_WHERE]

# Pickles of fused modules and wide layers name these classes here, so they stay loadable when a file moves.
_IN_PICKLES = {
    "FusedRecipe": "fused.recipe",
    "ModuleSkeleton": "fused.skeleton",
    "StackedModule": "fused.parts",
    "StackedWeight": "fused.stacked_parameters",
}


_MODULES = ("distributed", "optim", "primitives")


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f".{name}", __name__)
    where = _WHERE.get(name) or _IN_PICKLES.get(name)
    if where is None:
        raise AttributeError(f"module 'widepack' has no attribute {name!r}")
    module = import_module(f".{where}", __name__)
    value = getattr(module, name)
    if isinstance(value, FunctionType):
        value.__module__ = __name__  # pickles name the public place; classes say so themselves
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
