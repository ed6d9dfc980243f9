"""Reads and writes the artifact format: bytes, names and versions. It does not run programs.

| module | content |
|---|---|
| `manifest` | `manifest.json`, in `entry`, `wide_program`, `manifest_weights`, `file_list` |
| `factored` | the weights that are a base and low-rank factors: the key `factored` of the manifest |
| `state_dicts` | what the members' state dicts have beside tensors: versions, the file of extra state |
| `program`, `opset` | programs in widepack's own form; the ops that they may use |
| `errors` | the errors of the format, and the form of lists in them |
| `literals` | values that the members' code reads from their weights |
| `fields`, `strict_json`, `format_version` | JSON with limits, fields of documents, versions |
| `guards`, `tree` | conditions over named dims; the structure of inputs and outputs |
| `costs` | what a call costs, as formulas: the document and its file |
| `formulas`, `polynomials` | formulas over sizes: evaluated without `eval`, added up |
| `writer`, `reader` | the folder; their parts are in `folder`, `lock`, `stream`, `file_copy` |
| `weights`, `header` | safetensors files: written as a stream, mapped lazily (`weights` imports torch) |
| `correction` | restores weights that are stored as factors, bit for bit (imports torch) |
| `file_identity` | what the system tells about a file: that it changed, and which bytes are on the disk |

Start reading with `manifest.py`, then `program.py` and `reader.py`. FORMAT.md, in the folder above, is the
specification. Importing the package imports neither torch nor safetensors.
"""

from __future__ import annotations

from .errors import ArtifactError as ArtifactError
from .errors import WidepackError as WidepackError
from .manifest import Manifest as Manifest
from .program import Program as Program
