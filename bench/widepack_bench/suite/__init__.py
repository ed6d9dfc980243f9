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
| `real_rows.py` | Measures one network of the suite `real` with one number of members |
| `real_run.py` | Runs the suite `real`: several numbers of members, batches and patterns |
| `real_table.py` | Writes the results of the suite `real` as text: a summary, and the table |
| `regret.py` | Measures the regret of a measured plan: its time against the best candidate's |
| `row.py` | Runs one row of the suite: writes random checkpoints, builds the artifact, tunes it |
| `rows.py` | Lists the rows of the suite: the network, the number of members and the batch |
| `run.py` | Runs the suite of reference networks: each row builds, loads |
| `stateful_steps.py` | Runs the members alone, step after step, for an entry with state |
| `table.py` | Writes the results of the suite as text: the summary of its rows, and the table |
"""
