"""Makes one callable of a wide program and its weights, and checks a program against a budget before it runs.

| in | out | start reading |
|---|---|---|
| a program and its weights | `Executable` | `executable.py`; for untrusted programs `admission.py` |

| file | what it does |
|---|---|
| `admission.py` | Checks a program of an artifact before it runs: its slots, its outputs, random sizes |
| `budget.py` | Limits the memory and the work that one load may take |
| `executable.py` | Binds a program to its weights on a device, and runs it |
| `flop_formulas.py` | Provides the FLOP of each op: by its class, torch's, and those of users |
| `graph_module.py` | Turns a program into a flat fx graph, with `loop` regions as modules |
| `in_place_writes.py` | Finds the writes of a program that may overwrite a value instead of copying it |
| `kernel_count.py` | Counts the kernels that a program starts, where torch dispatches them |
| `meta_values.py` | Runs ops on torch's meta device, where tensors have sizes and no memory |
| `op_costs.py` | Estimates what one op takes from the sizes of its arguments and results: time |
| `prologue.py` | Splits a program into the nodes that depend on weights alone, which run once |
| `unroll.py` | Writes out every loop region of a program, member after member, for readers |
| `value_checks.py` | Checks the values that ops of a compiled program read as places |
| `value_memory.py` | Finds which values of a program may share memory, and where each is read last |
| `walk.py` | Checks a program against a budget before it runs |
"""
