"""Times the training of whole networks, fused and beside every baseline: `widepack bench-suite training`.

A step is forward, loss, backward and optimizer of all members.

| in | out | start reading |
|---|---|---|
| rows of the suite | JSON | `run.py`, then `row.py` |

| file | what it does |
|---|---|
| `contestants.py` | The steps by name: the fused module, and what a user runs without widepack |
| `networks.py` | Lists the networks, their inputs and numbers of members |
| `row.py` | Compares the losses of all contestants, then times them in one race |
| `run.py` | Runs the suite `training`: each row in its own process |
| `table.py` | Writes the results as text: a summary, and the table |
| `task.py` | The members, their data and their loss |
| `worker.py` | Trains each member in its own process |
"""
