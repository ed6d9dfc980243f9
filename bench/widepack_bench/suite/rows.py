"""Lists the rows of the suite: the network, the number of members and the batch, in sizes for a CPU and in
full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..models.factory import MODELS


@dataclass(frozen=True, slots=True)
class Form:
    """A row in one size. options: of the factory; inputs: specs of `widepack build --input`."""

    options: Mapping[str, Any]
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SuiteRow:
    """A network of the suite.

    title: its name in the table. factory: `file:function` in `models/`. shared: whether all members have the
    same weight of this name. forms: for a CPU, and in full. by_hand: also time a trunk that is shared by
    hand.
    """

    name: str
    title: str
    factory: str
    members: int
    batch: int
    forms: tuple[Form, Form]
    shared: Callable[[str], bool] = field(default=lambda name: False)
    by_hand: bool = False

    @property
    def model(self) -> str:
        """Returns the factory as `--model` takes it."""
        return f"{MODELS}.{self.factory}"

    def form(self, size: str) -> Form:
        """Returns the form of a size: `cpu` or `full`."""
        return self.forms[0] if size == "cpu" else self.forms[1]


def _same(inputs: str) -> tuple[Form, Form]:
    return Form({}, (inputs,)), Form({}, (inputs,))


def _words(length: int, vocabulary: int) -> tuple[str, ...]:
    return f"ids=int64[B,{length}]:0..{vocabulary - 1}", f"mask=int64[B,{length}]:0..1"


_BERT = (
    Form({"dim": 128, "depth": 2, "heads": 4, "vocabulary": 1000, "length": 64}, _words(32, 1000)),
    Form({}, _words(128, 30522)),
)
_STEPS = (Form({}, ("x=float32[B,16,64]",)), Form({}, ("x=float32[B,64,64]",)))
_IMAGE = Form({}, ("x=float32[B,3,224,224]",))
_SMALL: dict[str, Any] = {"classes": 10, "small": True}
_SMALL_VIT = {"image": 32, "patch": 4, "dim": 96, "depth": 3, "heads": 3, "classes": 10}
_SMALL_FT = {"features": 10, "dim": 32, "depth": 2, "heads": 4}


def _trunk(name: str) -> bool:
    return name.startswith("trunk.")


def _all_but_query_and_value(name: str) -> bool:
    """Whether members with a merged LoRA of query and value share this weight. Their heads differ."""
    return _trunk(name) and not name.endswith(("attention.query.weight", "attention.value.weight"))


ROWS: tuple[SuiteRow, ...] = (
    SuiteRow("mlp-b32", "MLP 64-128-64", "mlp:mlp", 100, 32, _same("input=float32[B,64]")),
    SuiteRow("mlp-b1", "MLP 64-128-64", "mlp:mlp", 100, 1, _same("input=float32[B,64]")),
    SuiteRow("deep-mlp", "deep MLP 8 x 256", "mlp:deep", 20, 32, _same("input=float32[B,64]")),
    SuiteRow(
        "resblock",
        "residual block, 64 channels",
        "resnet:block",
        20,
        8,
        (Form({}, ("x=float32[B,64,8,8]",)), Form({}, ("x=float32[B,64,32,32]",))),
    ),
    SuiteRow(
        "resnet18",
        "ResNet-18",
        "resnet:resnet18",
        10,
        8,
        (Form(_SMALL | {"width": 16}, ("x=float32[B,3,16,16]",)), _IMAGE),
    ),
    SuiteRow("conv-net", "small conv net", "conv:small", 10, 8, _same("input=float32[B,3,32,32]")),
    SuiteRow(
        "resnet50",
        "ResNet-50",
        "resnet:resnet50",
        32,
        1,
        (Form(_SMALL | {"width": 8}, ("x=float32[B,3,32,32]",)), _IMAGE),
    ),
    SuiteRow("vit", "ViT-S", "transformer:vit", 8, 8, (Form(_SMALL_VIT, ("x=float32[B,3,32,32]",)), _IMAGE)),
    SuiteRow("bert", "BERT-base", "transformer:bert", 8, 4, _BERT),
    SuiteRow(
        "bert-frozen",
        "BERT-base, trunk frozen, heads trained",
        "transformer:bert",
        8,
        4,
        _BERT,
        shared=_trunk,
        by_hand=True,
    ),
    SuiteRow(
        "bert-lora",
        "BERT-base, merged LoRA of q and v",
        "transformer:bert",
        8,
        4,
        _BERT,
        shared=_all_but_query_and_value,
    ),
    SuiteRow("lstm", "LSTM 2 x 128", "recurrent:lstm", 16, 8, _STEPS),
    SuiteRow("gru", "GRU 2 x 128", "recurrent:gru", 16, 8, _STEPS),
    SuiteRow("gru-8", "GRU 2 x 128", "recurrent:gru", 8, 8, _STEPS),
    SuiteRow("rnn-8", "RNN 2 x 128", "recurrent:rnn", 8, 8, _STEPS),
    SuiteRow(
        "ft-transformer",
        "FT-Transformer",
        "transformer:ft",
        50,
        64,
        (Form(_SMALL_FT, ("x=float32[B,10]",)), Form({}, ("x=float32[B,32]",))),
    ),
    SuiteRow(
        "unet",
        "U-Net",
        "conv:unet",
        5,
        4,
        (Form({"width": 8}, ("x=float32[B,3,32,32]",)), Form({}, ("x=float32[B,3,256,256]",))),
    ),
    SuiteRow(
        "cnn1d",
        "1-D CNN",
        "conv:signal",
        30,
        16,
        (Form({"width": 32}, ("input=float32[B,8,64]",)), Form({}, ("input=float32[B,8,256]",))),
    ),
)


def chosen(names: Sequence[str]) -> list[SuiteRow]:
    """Returns rows by name; all where none is named. Raises: UsageError with the known ones."""
    from widepack.errors import UsageError

    known = {row.name: row for row in ROWS}
    unknown = [n for n in names if n not in known]
    if unknown:
        raise UsageError(
            f"the suite has no row {', '.join(map(repr, unknown))}; its rows are {', '.join(known)}"
        )
    return [row for row in ROWS if not names or row.name in names]
