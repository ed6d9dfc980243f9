"""widepack's own torch ops, and their decomposition into ATen ops.

| in | out | start reading |
|---|---|---|
| tensors | `widepack::linear`, `lstm_steps`, ... registered with torch | `library.py`, then `packed.py` |

| file | what it does |
|---|---|
| `checks/` | Checks the operands of torch's ops whose kernels read or write outside of them |
| `decompose.py` | Replaces widepack's own ops in a program by ATen ops, for readers |
| `exact_norms.py` | Computes normalizations of images in channels-last memory as exactly as of contiguous |
| `experts.py` | Defines the op `expert_linear`: each row is multiplied by the matrix of one expert |
| `factored.py` | Defines the ops over weights that are a base plus a product of thin factors |
| `grouped_experts.py` | Defines the op `grouped_experts`: products of rows with the matrices of experts |
| `int8.py` | Defines the ops of linear layers whose weights are int8, with one scale for each row |
| `library.py` | Registers widepack's own ops, their derivatives and their forms in ATen ops |
| `masked.py` | Defines the op `masked_attention`: attention that skips keys which the mask forbids |
| `member_convs.py` | Defines the op `member_convs`: each member's own convolutions |
| `member_products.py` | Defines the product of each member's matrices, with a derivative |
| `mlp_chain.py` | Defines the op `mlp_chain`: linear layers with an activation after each |
| `onednn.py` | Calls oneDNN, the library that runs torch's packed layers on a CPU |
| `packed.py` | Defines widepack's own ops for layers over weights in oneDNN's order |
| `pooling.py` | Computes `max_pool2d` by maxima of slices |
| `projections.py` | Computes the products of a recurrent layer's inputs with their weights |
| `recurrent.py` | Defines widepack's own recurrent ops: one layer in one direction over all steps |
| `recurrent_training.py` | Defines recurrent ops that have derivatives |
| `replacements.py` | Replaces ops that end the process, or lose digits, on operands that a program may have |
| `sequences.py` | Defines the op `sequence_lengths`: the lengths of packed sequences, after a check |
| `streamed.py` | Computes linear layers of few rows, also of rows that have weights of different members |
| `traced_ops.py` | Registers functions in the place of ops with torch, so that a compiler meets ops only |
| `triton_kernels/` | Triton kernels of widepack's own ops, for CUDA devices |
"""
