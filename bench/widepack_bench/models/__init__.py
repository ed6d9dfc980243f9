"""Reference networks of the suite, written plainly: what a person would write, in the sizes of the suite's
rows.

Every file has factories that `widepack build --model widepack_bench.models.<file>:<factory>` takes. Weights
are random (`weights.py`): nothing is trained.

| file | what it does |
|---|---|
| `blocks.py` | Reference blocks by name: what `widepack trace -m NAME` shows |
| `conv.py` | Convolutional networks that are no residual ones: a U-Net (Ronneberger et al |
| `embedders.py` | Parts of diffusion transformers that are no blocks: an embedder, norms |
| `flux.py` | Blocks of diffusion transformers in the manner of FLUX.1 (Black Forest Labs 2024) |
| `mlp.py` | Multilayer perceptrons |
| `recurrent.py` | Recurrent networks over sequences: LSTM, GRU and a plain RNN, each |
| `resnet.py` | Residual networks (He et al |
| `transformer.py` | Transformers: a vision transformer (Dosovitskiy et al |
| `weights.py` | Random weights and statistics for members |
"""
