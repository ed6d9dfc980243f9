"""Triton kernels of widepack's own ops, for CUDA devices: one for all members and several steps or layers.

Each op has an implementation in plain torch, which runs on every device. On a CUDA device an op takes its
Triton kernel if Triton is installed, the shape fits, no operand needs a gradient, and the kernel is predicted
to be faster. `WIDEPACK_TRITON=0` in the environment switches all of them off. Only `launches.py` imports the
modules that import Triton, when it starts the first kernel.

| in | out | start reading |
|---|---|---|
| the operands of an op | its answer, or None: then the op runs in plain torch | `launches.py` |

| file | what it does |
|---|---|
| `available.py` | Decides whether a kernel may run, and runs it with a fallback |
| `chain.py` | Defines the Triton kernel of a chain of linear layers and activations |
| `launches.py` | Starts the kernels, with sizes and precisions chosen by rule |
| `predictions.py` | Predicts the times of the kernels and of plain torch on an H100 |
| `steps.py` | Defines the Triton kernels of recurrent layers |
| `tiles.py` | Provides the parts that widepack's Triton kernels share |
"""
