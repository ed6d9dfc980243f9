"""Chooses plans by measurement on this machine: `widepack.tune`.

| in | out | start reading |
|---|---|---|
| an artifact, batches | the fastest plans, in the artifact or the user's cache | `tune.py`, `search.py` |

| file | what it does |
|---|---|
| `candidate_pool.py` | Makes the candidates of a search, for one batch and one pattern |
| `quick_race.py` | Chooses the plans of a new artifact by a quick race of a few plans on this machine |
| `report.py` | Defines the report of `widepack.tune`, and writes measured plans into an artifact |
| `search.py` | Searches the fastest plan for one entry, pattern and batch on this machine |
| `searches.py` | Prepares the searches of one pattern of an entry: one for each batch |
| `tune.py` | Tunes an artifact: chooses its plans by measurement on this machine, and stores them |
"""
