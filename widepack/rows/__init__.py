"""Shows that the rows of a batch are independent: no row changes the answer to another one.

Requests of different callers may share a batch only then.

| in | out | start reading |
|---|---|---|
| a member program, its dim of the batch, inputs to draw | `Rows` of a manifest | `verdict.py`, `walk.py` |

| file | what it does |
|---|---|
| `axes.py` | In which dim of an input or an output the rows are |
| `call.py` | One node of a walk, with the layouts of its arguments |
| `families.py` | Rules by family: ops on each number alone, along dims, on the last dims |
| `indices.py` | Rules: ops that read or write at indices |
| `layout.py` | Where the rows are in a value |
| `networks.py` | Rules: convolutions, norms, pools, recurrent layers, matrix functions |
| `products.py` | Rules: matrix products, attention, distances |
| `shapes.py` | Rules: other shapes, joins, parts, copies, values made of sizes |
| `trials.py` | Tries other values, NaN and other batches |
| `verdict.py` | Decides: first the walk, then the trials |
| `walk.py` | Walks a program by the rules |
"""
