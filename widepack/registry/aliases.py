"""Finds primitives by the names that users type: `conv2d`, `LayerNorm`, `attention`, `nn.LSTM`."""

from __future__ import annotations

from ..ir.ops import full_name
from .registry import REGISTRY, Primitive, families

_OPS = {
    "attention": "scaled_dot_product_attention",
    "multiheadattention": "scaled_dot_product_attention",
    "mha": "scaled_dot_product_attention",
    "sdpa": "scaled_dot_product_attention",
    "linear": "linear",
    "dense": "linear",
    "bilinear": "bilinear",
    "embedding": "embedding",
    "embeddingbag": "embedding_bag.padding_idx embedding_bag",
    **{f"conv{n}d": f"conv{n}d conv{n}d.padding" for n in (1, 2, 3)},
    **{f"convtranspose{n}d": f"conv_transpose{n}d{'' if n == 1 else '.input'}" for n in (1, 2, 3)},
    **dict.fromkeys(
        ["batchnorm", *(f"batchnorm{n}d" for n in (1, 2, 3))],
        "_native_batch_norm_legit_no_training _native_batch_norm_legit_functional "
        "_native_batch_norm_legit.no_stats",
    ),
    **dict.fromkeys(["instancenorm", *(f"instancenorm{n}d" for n in (1, 2, 3))], "instance_norm"),
    "layernorm": "layer_norm",
    "groupnorm": "group_norm",
    "rmsnorm": "rms_norm",
    "lstm": "lstm.input",
    "gru": "gru.input",
    "rnn": "rnn_tanh.input rnn_relu.input",
    "lstmcell": "lstm_cell",
    "grucell": "gru_cell",
    "rnncell": "rnn_tanh_cell rnn_relu_cell",
    "dropout": "dropout native_dropout",
    **dict.fromkeys([f"dropout{n}d" for n in (1, 2, 3)], "feature_dropout"),
    "alphadropout": "alpha_dropout",
    "featurealphadropout": "feature_alpha_dropout",
    "prelu": "prelu",
    **{f"{kind}pool{n}d": f"{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)},
    **{f"adaptive{kind}pool{n}d": f"adaptive_{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)},
}
ALIASES: dict[str, tuple[str, ...]] = {
    name: tuple(map(full_name, text.split())) for name, text in _OPS.items()
}
"""From a name without `nn.`, `_`, `-` and capitals to its ops, the most frequent op first."""


def plain(name: str) -> str:
    """Reduces a name to its key in ALIASES: `nn.Conv2d` and `conv_2d` become `conv2d`."""
    return name.lower().removeprefix("torch.").removeprefix("nn.").replace("_", "").replace("-", "")


def find(name: str) -> list[Primitive]:
    """Finds primitives by name.

    Args:
        name: One of these, tried in this order: an op (`"aten.linear.default"`, `"max.dim"`), a family
            (`"conv"`), or a layer's name (`"nn.Conv2d"`, `"attention"`).

    Returns:
        The primitives with that name; an empty list if there are none. Each has `op`, `family`, `file` and
        `strategies`.

    Example:
        >>> from widepack.primitives import find
        >>> [p.op for p in find("nn.LSTM")]
        ['aten.lstm.input']
        >>> list(find("linear")[0].strategies)[:3]
        ['one_gemm', 'fold', 'bmm']
    """
    for op in (name, full_name(name)):
        if op in REGISTRY:
            return [REGISTRY[op]]
    for family, primitives in families():
        if family == name:
            return primitives
    return [REGISTRY[op] for op in ALIASES.get(plain(name), ())]
