"""Makes the wide program, which runs all members in one call, from a member program and a plan.

| in | out | start reading |
|---|---|---|
| a member program, kinds, a plan | a wide program: ATen ops, loops, own ops | `lower.py`, `interpreter.py` |

| file | what it does |
|---|---|
| `differentiable.py` | Makes wide programs that have gradients |
| `fusion.py` | Fuses layers with the activations after them |
| `int8_weights.py` | Replaces the weights of linear layers in a wide program by int8 weights |
| `interpreter.py` | Writes the nodes of a wide program: it runs each node of the member program |
| `loops.py` | Lowers a loop region to one node |
| `lower.py` | Makes the wide program from a member program, the kinds of its values, and a plan |
| `pattern_programs.py` | Holds the simplified programs of an entry for one pattern, and lowers them |
| `wide_programs.py` | Makes the wide programs of a build: predicted plans |
"""
