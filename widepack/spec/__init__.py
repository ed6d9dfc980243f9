"""Parses what a user requests into typed values: input specs, sizes, dtypes, entries, states, names.

| in | out | start reading |
|---|---|---|
| text such as `x=float32[B,3]:0..9`, options, `widepack.toml` | dataclasses; `UsageError` | `input_spec.py` |

| file | what it does |
|---|---|
| `config.py` | Reads `widepack.toml`, model arguments, and sizes in bytes, as a user writes them |
| `draws.py` | Draws inputs for verification and measurement, at any sizes of the named dims |
| `dropout.py` | Keeps dropout on in eval mode: N stochastic passes of one checkpoint |
| `dtypes.py` | Finds dtypes by name, and converts weights to them |
| `entries.py` | Finds the entries of a build: methods of the member |
| `input_spec.py` | Parses input specs and bounds of dims, as a user writes them |
| `member_parts.py` | Divides the members into adjacent parts of about equal bytes of weights |
| `names.py` | Checks the names that callers give: paths of artifacts and checkpoints, numbers |
| `output_names.py` | Names the outputs of an entry, for clients of a server and columns of files |
| `state.py` | Parses state requests |
"""
