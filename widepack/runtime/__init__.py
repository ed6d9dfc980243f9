"""Makes one callable of a wide program and its weights, and checks a program against a budget before it runs.

| in | out | start reading |
|---|---|---|
| a program and its weights | `Executable` | `executable.py`; for untrusted programs `admission.py` |

| file | what it does |
|---|---|
| `admission.py` | Checks a program of an artifact before it runs: its slots, its outputs |
| `budget.py` | Limits the memory and the work that one load may take |
| `cost_terms.py` | Provides the terms that cost rules share: numbers of tensors, and the time |
| `executable.py` | Binds a program to its weights on a device, and runs it |
| `graph_module.py` | Turns a program into a flat fx graph, with `loop` regions as modules, and |
| `in_place_writes.py` | Finds the writes of a program that may overwrite a value instead of copying it |
| `kernel_count.py` | Counts the kernels that a program starts, where torch dispatches them |
| `live_memory.py` | Tracks the memory that is live while a program is walked: what each node makes |
| `loop_values.py` | Splits the arguments of a loop region by member, and joins the members' results |
| `matrix_costs.py` | Computes the costs of matrix products, contractions, convolutions and attention |
| `meta_values.py` | Runs ops on torch's meta device, where tensors have sizes and no memory |
| `node_arguments.py` | Checks the arguments of a node that are known before any value is |
| `numeric_costs.py` | Computes the costs of pools, losses over pairs, distances, linear algebra |
| `op_costs.py` | Estimates what one op takes from the sizes of its arguments and results: time |
| `part_write.py` | Writes into a part of a tensor, where the part is reached by a chain of views |
| `prologue.py` | Splits a program into the nodes that depend on weights alone, which run once |
| `random_sizes.py` | Finds results whose size random numbers determine |
| `sequence_costs.py` | Computes the costs of ops over the steps of a sequence: recurrent layers |
| `unroll.py` | Writes out every loop region of a program, member after member, for readers |
| `value_checks.py` | Checks the values that ops of a compiled program read as places |
| `value_sizes.py` | Bounds the results whose size only values determine: `nonzero`, a mask as index |
| `value_memory.py` | Finds which values of a program may share memory, and where each is read last |
| `walk.py` | Checks a program against a budget before it runs: an artifact may come |
"""
