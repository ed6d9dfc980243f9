"""widepack's artifact format: bytes, names and versions. Nothing here knows how a program is run.

| module | what is in it |
|---|---|
| `manifest` | `manifest.json` as dataclasses |
| `program` | programs in widepack's own form; `opset`: the ops that they may ask for |
| `guards`, `tree` | conditions over named dims; the structure of inputs and outputs |
| `store` | `Writer` and `Reader` of the folder |
| `weights` | safetensors files, written as a stream and mapped lazily (imports torch) |

FORMAT.md beside this package is the specification. Importing the package imports neither torch nor safetensors.
"""

from __future__ import annotations

from .errors import ArtifactError as ArtifactError
from .errors import WidepackError as WidepackError
from .manifest import Manifest as Manifest
from .program import Program as Program
