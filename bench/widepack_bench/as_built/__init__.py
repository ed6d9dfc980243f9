"""Compares artifacts as built and loaded by default with what users would write instead.

`scripts/measure/as_built.py` runs it. Contestants are processes of their own, which take turns.

| in | out | start reading |
|---|---|---|
| a case: network, batch, threads, kind of call | a row: the ratio to the fastest alternative | `row.py` |

| file | what it does |
|---|---|
| `contestant.py` | Runs one contestant: the artifact, or the members in one of the forms that users write |
| `networks.py` | Lists the networks, the numbers of members and the batches |
| `row.py` | Times the contestants of a case in rounds, and makes its row |
| `stage.py` | Builds the artifact of a network, and starts the processes of its contestants |
| `summary.py` | Makes figures of many rows |
"""
