"""Derives what a call costs from a program: FLOP, bytes, kernels and peak memory, as formulas over its dims.

| in | out | start reading |
|---|---|---|
| a program, the kinds of its slots, example sizes | `widepack_artifacts.costs.Costs` | `derive.py` |

| file | what it does |
|---|---|
| `amounts.py` | Adds the kernels of a program up: rows by module, op and line, states of the memory |
| `counts.py` | Counts one kernel: FLOP, other operations and bytes, from the sizes of its tensors |
| `derive.py` | Derives the costs of a program: one row for each op of a module, totals, and the peak |
| `expressions.py` | Turns sizes into formulas over named dims, and formulas into text |
| `live_storages.py` | Tracks the memory that is live after each kernel, as formulas |
| `recorder.py` | Runs a program on symbolic tensors, and records every kernel that it starts |
"""
