"""Chooses plans by measurement on this machine: `widepack.tune`.

| in | out | start reading |
|---|---|---|
| an artifact, batches | the fastest plans, in the artifact or the user's cache | `tune.py`, `search.py` |

| file | what it does |
|---|---|
| `candidate_pool.py` | Makes the candidates of a search, for one batch and one pattern |
| `choice.py` | Chooses the plans of all batches of a pattern from what was measured |
| `graph_files.py` | Puts the ONNX graphs of members into an artifact whose plans name ONNX Runtime |
| `report.py` | Defines the report of `widepack.tune`, and writes measured plans into an artifact |
| `search.py` | Searches the fastest plan for one entry, pattern and batch on this machine |
| `searches.py` | Prepares the searches of one pattern of an entry: one for each batch |
| `tune.py` | Measures the plans of an artifact, thoroughly or as a build does, and stores the fastest |
"""
