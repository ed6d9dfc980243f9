"""Reference networks of the suite, written in plain PyTorch, in the sizes of the rows of the suite.

Every file has factories that `widepack build --model widepack_bench.models.<file>:<factory>` takes. Weights
are random (`weights.py`): nothing is trained.

| file | what it does |
|---|---|
| `blocks.py` | Reference blocks by name: what `widepack trace -m NAME` shows |
| `conv.py` | Convolutional networks without residuals: a U-Net, a small net over images, a 1-D CNN |
| `convnext.py` | ConvNeXt: blocks of a depthwise convolution and a two-layer perceptron |
| `embedders.py` | Parts of diffusion transformers outside the blocks: an embedder, norms, attention |
| `factory.py` | Finds the factory of a reference network by its name |
| `flux.py` | Blocks of diffusion transformers like those of FLUX.1 and SD3 |
| `mlp.py` | Multilayer perceptrons |
| `mobilenet.py` | MobileNetV3: inverted residuals with depthwise convolutions and squeeze-excitation |
| `recurrent.py` | Recurrent networks over sequences: LSTM, GRU, a plain RNN, and forecasters |
| `resnet.py` | Residual networks: one block, ResNet-18, ResNet-50 |
| `transformer.py` | Transformers: a vision transformer, BERT, FT-Transformer, a decoder |
| `weights.py` | Random weights and statistics for members |
"""
