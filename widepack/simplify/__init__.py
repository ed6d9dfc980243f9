"""Rewrites the member program before it is lowered. Each file is one pass; no pass raises a kind.

| in | out | start reading |
|---|---|---|
| a member program, kinds of its values | an equal program that runs faster wide | `pipeline.py` |

| file | what it does |
|---|---|
| `canonical.py` | Rewrites ops that have several names to the one name that has strategies |
| `factored_weights.py` | Writes weights of a member program as a base plus a product of thin factors |
| `horizontal_fusion.py` | Joins narrow linear layers over one value into one layer |
| `masked_rewrites.py` | Rewrites the nodes that read values at the true positions of a mask |
| `masked_selection.py` | Rewrites values at the true positions of a Stacked mask |
| `norm_folding.py` | Folds norms into the weights of the layers before or after them |
| `pipeline.py` | Simplifies the member programs of an entry: runs the passes, in order |
| `select_pushdown.py` | Computes one position of a dim if only one is read |
| `transposed_conv.py` | Rewrites transposed convolutions as convolutions |
| `view_chains.py` | Rewrites chains of reshapes and transposes as views, and linear layers behind them |
"""
