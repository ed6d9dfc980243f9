"""Maps each ATen op to its strategies, and provides what strategies are written with.

| in | out | start reading |
|---|---|---|
| decorated functions of `primitives` | `REGISTRY`: from op to strategies | `registry.py`, then `writer.py` |

| file | what it does |
|---|---|
| `aliases.py` | Finds primitives by the names that users type: `conv2d`, `LayerNorm`, `attention` |
| `families.py` | Registers whole families of ops in one line |
| `flop_formulas.py` | Provides the FLOP formula of each op: torch's, widepack's own, and those of users |
| `registry.py` | Maps the overload of each op to its strategies, in the order in which they are tried |
| `samples.py` | Registers samples: example arguments of an op, which tests |
| `sequential.py` | Runs an op once for each member: the strategy `sequential` |
| `user_ops.py` | Registers strategies for ops of other libraries: `widepack.primitives.register` |
| `writer.py` | Provides the writers, with which strategies call ops: `w.call(op, ...)` |
"""
