"""Lists the networks of the suite `real`: published architectures at sizes that a CPU serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..models.factory import MODELS

MEMBERS = (4, 8, 16)
BATCHES = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class RealNetwork:
    """A network at its published size.

    title: its name in the table. size: width and depth in words. factory: `file:function` in `models/`.
    inputs: specs of `widepack build --input`. options: of the factory.
    """

    name: str
    title: str
    size: str
    factory: str
    inputs: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> str:
        """Returns the factory as `--model` takes it."""
        return f"{MODELS}.{self.factory}"


def _image(name: str, pixels: int) -> tuple[str]:
    return (f"{name}=float32[B,3,{pixels},{pixels}]",)


def _words(length: int) -> tuple[str, str]:
    return f"ids=int64[B,{length}]:0..30521", f"mask=int64[B,{length}]:0..1"


NETWORKS: tuple[RealNetwork, ...] = (
    RealNetwork("tabular-mlp", "tabular MLP", "width 512, 4 layers", "mlp:tabular", ("input=float32[B,64]",)),
    RealNetwork(
        "ft-transformer", "FT-Transformer", "width 192, 3 blocks", "transformer:ft", ("x=float32[B,32]",)
    ),
    RealNetwork(
        "lstm-forecaster",
        "LSTM forecaster",
        "width 256, 2 layers",
        "recurrent:lstm_forecaster",
        ("x=float32[B,96,16]",),
    ),
    RealNetwork(
        "gru-forecaster",
        "GRU forecaster",
        "width 256, 2 layers",
        "recurrent:gru_forecaster",
        ("x=float32[B,96,16]",),
    ),
    RealNetwork("resnet18-64", "ResNet-18", "width 64, 18 layers", "resnet:resnet18", _image("x", 64)),
    RealNetwork("resnet18-224", "ResNet-18", "width 64, 18 layers", "resnet:resnet18", _image("x", 224)),
    RealNetwork(
        "mobilenetv3",
        "MobileNetV3-Large",
        "width 16 to 960, 15 blocks",
        "mobilenet:mobilenetv3",
        _image("input", 224),
    ),
    RealNetwork(
        "convnext-atto",
        "ConvNeXt-atto",
        "width 40 to 320, 12 blocks",
        "convnext:convnext_atto",
        _image("input", 224),
    ),
    RealNetwork("vit-s", "ViT-S/16", "width 384, 12 blocks", "transformer:vit", _image("x", 224)),
    RealNetwork(
        "decoder", "decoder", "width 768, 6 blocks", "transformer:decoder", ("ids=int64[B,64]:0..31999",)
    ),
    RealNetwork(
        "distilbert", "DistilBERT", "width 768, 6 blocks", "transformer:bert", _words(128), {"depth": 6}
    ),
    RealNetwork("bert-base", "BERT-base", "width 768, 12 blocks", "transformer:bert", _words(128)),
)


def chosen_networks(names: Sequence[str]) -> list[RealNetwork]:
    """Returns networks by name; all where none is named. Raises: UsageError with the known ones."""
    from widepack.errors import UsageError

    known = [network.name for network in NETWORKS]
    unknown = [n for n in names if n not in known]
    if unknown:
        raise UsageError(
            f"the suite real has no network {', '.join(map(repr, unknown))}; "
            f"its networks are {', '.join(known)}"
        )
    return [network for network in NETWORKS if not names or network.name in names]
