"""Lists all wide layers by name. A file is imported when one of its layers is first used.

from widepack.primitives import WideLinear
layer = WideLinear.from_modules([nn.Linear(64, 10) for _ in range(8)])
y = layer(x)                          # [8, B, 64] -> [8, B, 10]
linears = layer.to_modules()          # 8 nn.Linear
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from .base import WideLayer

_NAMES_BY_FILE = {
    "linear": "Linear Bilinear PReLU",
    "embedding": "Embedding EmbeddingBag",
    "conv": "Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d",
    "norm": """BatchNorm1d BatchNorm2d BatchNorm3d LayerNorm GroupNorm InstanceNorm1d InstanceNorm2d
        InstanceNorm3d RMSNorm""",
    "attention": "MultiheadAttention",
    "recurrent": "LSTM GRU RNN LSTMCell GRUCell RNNCell",
    "dropout": "Dropout Dropout1d Dropout2d Dropout3d AlphaDropout FeatureAlphaDropout",
    "pool": """MaxPool1d MaxPool2d MaxPool3d AvgPool1d AvgPool2d AvgPool3d
        AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d
        AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d""",
}
LAYERS = {f"Wide{name}": file for file, names in _NAMES_BY_FILE.items() for name in names.split()}
"""The name of each wide layer, and the file of this folder that defines it."""


def layer_class(name: str) -> type[WideLayer]:
    """Returns a wide layer's class by its name, for example `WideLinear`. Raises KeyError."""
    return cast("type[WideLayer]", getattr(import_module(f"{__package__}.{LAYERS[name]}"), name))
