"""Times whole networks, wide and beside every baseline: `widepack bench` and `widepack bench-suite`.

| in | out | start reading |
|---|---|---|
| an artifact, or rows of the suite | `Report`; JSON | `bench.py`, `compare.py`, then `run.py` |

| file | what it does |
|---|---|
| `batches.py` | Compares the answers of all contestants at one batch, then times them in one race |
| `bench.py` | Times an artifact, or a loaded model, against the baselines: `bench(artifact)` |
| `compare.py` | Times a loaded model against its members: `compare(ens, modules)` |
| `real_networks.py` | Lists the networks of the suite `real`: published architectures at real sizes |
| `row.py` | Measures rows of the suites: writes random checkpoints, builds the artifact, tunes it |
| `rows.py` | Lists the rows of the suite: the network, the number of members and the batch |
| `run.py` | Runs the suites of networks, each network in its own process |
| `stateful_steps.py` | Runs the members alone, step after step, for an entry with state |
| `table.py` | Writes the results of the suites as text: a summary, the table, and notes |
"""
