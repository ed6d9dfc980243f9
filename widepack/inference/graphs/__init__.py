"""Runs the calls of bound programs by graphs: captured at the first call of a batch, then replayed.

| in | out | start reading |
|---|---|---|
| a bound program and the tensors of a call | its outputs | `call_graphs.py` |

| file | what it does |
|---|---|
| `call_graphs.py` | Captures, keeps and replays the graphs of one bound program |
| `graph_limits.py` | Finds the programs that no graph can run, or makes no faster |
| `graph_rows.py` | Finds the batches that graphs run, and how a smaller batch is padded to one |
"""
