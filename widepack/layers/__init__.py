"""Wide layers: N modules of one `torch.nn` class as one module, used without an artifact.

`widepack.primitives.WideLinear` and the other 44 layers come from here. A wide layer has the parameters of
its N modules, stacked to `[N, ...]`. It takes inputs `[N, B, ...]` and runs the strategies of the registry on
them.

| in | out | start reading |
|---|---|---|
| `WideLinear.from_modules(modules)` | one `nn.Module`; `.to_modules()` returns N | `base.py` |

| file | what it does |
|---|---|
| `arguments.py` | Checks the modules, and converts arguments and outputs: options, tensors, forms |
| `attention.py` | Defines the wide layer of multi-head attention |
| `base.py` | Defines `WideLayer`, the base class of the wide layers: `WideLinear` for N `nn.Linear` |
| `catalog.py` | Lists all wide layers by name |
| `conv.py` | Defines the wide convolutions and transposed convolutions |
| `dropout.py` | Defines the wide layers of dropout |
| `embedding.py` | Defines the wide layers of embeddings and of embedding bags |
| `linear.py` | Defines the wide linear layers: `WideLinear`, `WideBilinear`, and `WidePReLU` |
| `norm.py` | Defines the wide layers of normalization |
| `pool.py` | Defines the wide layers of pooling: `[N, B, C, *s]` or `[N, C, *s]` to the same |
| `recurrent.py` | Defines the wide recurrent layers and cells |
"""
