"""Changes torch while a member is exported, so that more members can be captured.

| in | out | start reading |
|---|---|---|
| torch's functions | the same ones, without reads of values and without fixed sizes | `functions.py` |

| file | what it does |
|---|---|
| `decompositions.py` | Decomposes ops that the format does not have and torch does not decompose |
| `dropout_copies.py` | Keeps dropouts whole, and apart from their inputs, during an export with dropout on |
| `fake_quantize.py` | Writes fake quantization with its scales in tensors as plain ops |
| `functions.py` | Replaces functions of torch that torch.export cannot follow, while a member is exported |
| `member_values.py` | Lets a member's code read the values of its own tensors during an export |
| `numbers.py` | Lets `int(x)` and `float(x)` of a tensor be numbers of the program, as `x.item()` is |
| `packed_sequences.py` | Lets torch.export follow packed sequences, as padded ones with lengths |
| `recurrent_shapes.py` | Gives an export the shapes of a recurrent layer's result at once |
| `row_branches.py` | Follows branches on whether a mask selected any rows |
| `tensor_index.py` | Rewrites places that a number in a tensor names: `table[domain]` |
| `transforms.py` | Replaces the levels of torch.func by autograd |
"""
