"""Maps each ATen op to its strategies, and provides what strategies are written with.

| in | out | start reading |
|---|---|---|
| decorated functions of `primitives` | `REGISTRY`: from op to strategies | `registry.py`, then `writer.py` |

All that is known of an op is in two places. Every user of a fact reads it there, so that an op is added in
one file of `primitives`:

| fact | where |
|---|---|
| its strategies, in the order in which they are tried; its family | `@strategy`, or a line of `families.py` |
| example arguments, for tests and the benchmark | `@samples` |
| its cost, what it does with the rows of a batch, its operations, why it has no strategy | its `OpRecord` |
| FLOP and memory | the formula of its class of costs: `runtime/flop_formulas.py`, `op_costs.py` |
| whether it draws random numbers, views or writes; its dims | torch's schema and tags: `ir/ops.py` |

An `OpRecord` (`ir/op_records.py`) names a class of costs and a rule of rows. The defaults are by family: an
op that torch tags as pointwise, or as a reduction, and a view need no record. The records of the format's ops
are in a table below this room, because a load computes costs and imports no strategies. A record in a file of
`primitives` counts as much.

| file | what it does |
|---|---|
| `aliases.py` | Finds primitives by the names that users type: `conv2d`, `LayerNorm`, `attention` |
| `families.py` | Registers whole families of ops in one line |
| `registry.py` | Maps the overload of each op to its strategies, in the order in which they are tried |
| `samples.py` | Registers samples: example arguments of an op, which tests |
| `sequential.py` | Runs an op once for each member: the strategy `sequential` |
| `user_ops.py` | Registers strategies for ops of other libraries: `widepack.primitives.register` |
| `writer.py` | Provides the writers, with which strategies call ops: `w.call(op, ...)` |
"""
