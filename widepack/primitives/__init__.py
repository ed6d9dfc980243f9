"""The primitives: one file an op family. Importing this package fills the registry."""

from importlib import import_module as _import_module
from typing import Any

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
from . import norm as norm
from . import patches as patches
from . import pointwise as pointwise
from . import pool as pool
from . import recurrent as recurrent
from . import shape as shape


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
