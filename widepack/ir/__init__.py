"""Describes and rewrites programs as data: ops, types, kinds, fake values, guards, and changes of dtype.

| in | out | start reading |
|---|---|---|
| `widepack_artifacts.program.Program` | facts about it, or another program | `ops.py`, then `kinds.py` |

| file | what it does |
|---|---|
| `at_rest.py` | Replaces random ops by fixed ones: dropout returns its input |
| `cast.py` | Changes the floating dtypes of a member program by a table of dtypes |
| `direct.py` | Names functions of torch's public API that do what an op does, in less time for each call |
| `edit.py` | Provides small edits of programs for several passes: reading other values |
| `encoding.py` | Converts arguments between programs and torch, and walks over them |
| `fake_values.py` | Computes the shape and dtype of every node of a program on fake tensors |
| `float64.py` | Raises a member program to float64, for the reference answers |
| `guards.py` | Converts conditions over named dims from sympy or Python text to the arithmetic |
| `kinds.py` | Computes the kind of every value of a member program: which values are equal |
| `limits.py` | Checks the operands of ops of untrusted programs before an op reads them |
| `op_records.py` | Holds what is known of each op beside its strategies and samples: one record an op |
| `ops.py` | Finds ops by name and answers questions about them from their schemas |
| `overlapping.py` | Writes into tensors whose elements share memory, which torch refuses |
| `recurrent_values.py` | Computes the shapes that torch's recurrent layers return, without a run |
| `size_terms.py` | Estimates how many terms sizes have once torch expands their expressions |
| `tensor_type.py` | Parses the type texts of programs: `float32[B,3]` becomes a `TensorType` |
| `torch_internals.py` | Wraps names of torch that have no public form |
| `torch_tuples.py` | Names and builds the named tuples of torch, which ops such as `x.max(1)` return |
| `values.py` | Represents the values of a wide program while it is written, by kind |
"""
