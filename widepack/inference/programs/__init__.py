"""Finds the wide programs of an entry of a loaded model, binds them to weights, and checks them.

| in | out | start reading |
|---|---|---|
| an open artifact and a pattern of inputs | `BoundProgram` | `program_source.py`, `program_binder.py` |

| file | what it does |
|---|---|
| `bound_program.py` | Defines wide programs before and after they are bound to weights |
| `entry_inputs.py` | Makes the inputs of an entry's wide calls: from the probe, drawn at other sizes |
| `failed_call.py` | Explains a call that an op refused: which node, which inputs |
| `member_runs.py` | Runs single members of a loaded model on the probe's inputs: their own programs |
| `merged_weights.py` | Tells which wide programs merge the factors of weights, and whether there is memory |
| `probe_check.py` | Checks the programs of one entry against the artifact's probe, in another dtype too |
| `program_binder.py` | Binds wide programs to weights and to a backend |
| `program_source.py` | Finds the wide programs of an entry, and checks them against the budget of the load |
"""
