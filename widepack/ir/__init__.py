"""Describes and rewrites programs as data: ops, types, kinds, fake values, guards, and changes of dtype.

| in | out | start reading |
|---|---|---|
| `widepack_artifacts.program.Program` | facts about it, or another program | `ops.py`, then `kinds.py` |

| file | what it does |
|---|---|
| `cast.py` | Changes the floating dtypes of a program, for a load and for float64 reference outputs |
| `edit.py` | Provides small edits of programs for several passes |
| `encoding.py` | Converts arguments between programs and torch, and walks over them |
| `fake_values.py` | Computes the shape and dtype of every node of a program on fake tensors |
| `guards.py` | Converts conditions over named dims from sympy or Python text to the arithmetic of guards |
| `kinds.py` | Computes the kind of every value: which values are equal for all members |
| `limits.py` | Checks the operands of ops of untrusted programs; the shapes and steps of recurrent layers |
| `op_records.py` | Holds what is known of each op beside its strategies and samples |
| `ops.py` | Finds ops by name and answers questions about them from their schemas |
| `overlapping.py` | Writes into tensors whose elements share memory, which torch refuses |
| `random_ops.py` | Replaces random ops by fixed ones: dropout returns its input |
| `size_terms.py` | Estimates how many terms sizes have once torch expands their expressions, before it does |
| `tensor_type.py` | Parses the type texts of programs: `float32[B,3]` becomes a `TensorType` |
| `torch_internals.py` | Wraps names of torch that have no public form |
| `torch_tuples.py` | Names and builds the named tuples of torch, which ops such as `x.max(1)` return |
| `values.py` | Represents the values of a wide program while it is written, by kind |
"""
