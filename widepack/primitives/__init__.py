"""The primitives: one file an op family. Importing this package fills the registry; `register` adds strategies for ops of others."""

from importlib import import_module as _import_module
from typing import Any

from ..samples_of_ops import Draw as Draw
from ..samples_of_ops import call as call
from ..values import Shared as Shared
from ..values import Stacked as Stacked
from ..writer import Writer as Writer
from ..writer import rank as rank
from . import attention as attention
from . import cells as cells
from . import conv as conv
from . import counts as counts
from . import dims as dims
from . import distance as distance
from . import dropout as dropout
from . import embedding as embedding
from . import fft as fft
from . import indexing as indexing
from . import linalg as linalg
from . import linear as linear
from . import losses as losses
from . import names as names
from . import norm as norm
from . import patches as patches
from . import pointwise as pointwise
from . import pool as pool
from . import recurrent as recurrent
from . import shape as shape
from .names import find as find
from .own import register as register


def __getattr__(name: str) -> Any:
    """The faces (`WideLinear`, ...), which stand above the primitives, by name: nothing that lowers imports them."""
    if name.startswith("Wide"):
        faces = _import_module("widepack.faces")
        if name in faces.FACES:
            globals()[name] = faces.face(name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_import_module("widepack.faces").FACES})
