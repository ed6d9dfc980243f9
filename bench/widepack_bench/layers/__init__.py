"""Times one layer of `torch.nn` at a time, every strategy beside the baselines: `widepack bench-layers`.

| in | out | start reading |
|---|---|---|
| names of layers, a preset of shapes and members | rows of a table; JSON | `run.py`, then `row.py` |

| file | what it does |
|---|---|
| `block_sweeps.py` | Lists the reference blocks as sweeps |
| `contestants.py` | Chooses which strategies and baselines of a layer are timed in full |
| `document.py` | Makes and reads the JSON document of `widepack bench-layers` |
| `in_memory.py` | Makes wide programs of N modules in memory: captures one member, then lowers it |
| `reference.py` | Compares the answers of a layer's programs with the members' reference answers |
| `row.py` | Measures one row of `widepack bench-layers`: N members of a layer |
| `rows.py` | Runs the rows of `widepack bench-layers` one after the other |
| `run.py` | Runs `widepack bench-layers`: measures row after row into one JSON document |
| `sweeps.py` | Lists what `widepack bench-layers` measures: how each layer of torch.nn is made |
| `table.py` | Writes the results of `widepack bench-layers` as text: layers, rows, summary |
| `tuned.py` | Builds, tunes and loads the artifact of a layer's members, as users run it |
| `tuned_many.py` | Tunes the artifacts of many layers, several at the same time, each layer |
"""
