"""The primitives: one file an op family. Importing this package fills the registry; `register` adds strategies for ops of others."""

from importlib import import_module as _import_module
from typing import Any

from ..registry.samples import Draw as Draw
from ..registry.samples import call as call
from ..ir.values import Shared as Shared
from ..ir.values import Stacked as Stacked
from ..registry.writer import Writer as Writer
from ..registry.writer import rank as rank
from . import attention
from . import recurrent_cells as cells
from . import conv
from . import reductions as counts
from . import dims
from . import distance
from . import dropout
from . import embedding
from . import fft
from . import indexing
from . import linalg
from . import linear
from . import losses
from ..registry import aliases as names
from . import norm
from . import conv_patches as patches
from . import pointwise
from . import pool
from . import recurrent
from . import shape
from ..registry.aliases import find as find
from ..registry.user_ops import register as register


def __getattr__(name: str) -> Any:
    """The faces (`WideLinear`, ...), which stand above the primitives, by name: nothing that lowers imports them."""
    if name.startswith("Wide"):
        faces = _import_module("widepack.layers.catalog")
        if name in faces.FACES:
            globals()[name] = faces.face(name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_import_module("widepack.layers.catalog").FACES})
