"""Networks into whose wide programs faults are injected: 38 small ones, with the input of one call each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Self-attention, with a causal mask or a mask of far places."""

    def __init__(self, mask: str = "") -> None:
        super().__init__()
        self.qkv, self.out, self.mask = nn.Linear(12, 36), nn.Linear(12, 12), mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.mask == "far":
            places = torch.arange(x.shape[1])
            near = (places[:, None] - places[None]).abs() < 3
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.mask == "causal")
        return self.out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, part: nn.Module, after: nn.Module | None = None) -> None:
        super().__init__()
        self.part, self.after = part, after

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.part(x)
        return y if self.after is None else self.after(y)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(F.silu(a) * b)  # type: ignore[no-any-return]


class Last(nn.Module):
    """A recurrent layer and a head over its last step."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])  # type: ignore[no-any-return]


class Masked(nn.Module):
    """A softmax over places whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(6, 1), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x).squeeze(-1).masked_fill(x[..., 0] < x.mean((1, 2)).unsqueeze(1), -30.0)
        return (score.softmax(1).unsqueeze(-1) * self.value(x)).sum(1)  # type: ignore[no-any-return]


class Standardised(nn.Module):
    """Inputs with statistics that are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("std", torch.rand(6) + 0.5)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - self.mean) / self.std)  # type: ignore[no-any-return, operator]


class Call(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.net = function, nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.net(x))


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)


@dataclass(frozen=True)
class Network:
    """A network: what makes a member, and the shape of its input. words: the input is ids below it."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: int = 0

    def member(self, seed: int) -> nn.Module:
        """Returns a member in eval mode, as if trained: norms and statistics differ from their start."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.make().eval()
            with torch.no_grad():
                for name, p in [*module.named_parameters(), *module.named_buffers()]:
                    if p.dim() < 2 and p.is_floating_point():
                        p.mul_(1 + 0.2 * torch.rand_like(p)).add_(
                            0.1 * torch.rand_like(p) if name.endswith("var") else 0.3 * torch.randn_like(p)
                        )
        return module

    def sample(self, seed: int, batch: int = 6) -> Tensor:
        """Returns the input of one call."""
        g = torch.Generator().manual_seed(seed)
        if self.words:
            return torch.randint(0, self.words, (batch, *self.shape), generator=g)
        return torch.randn(batch, *self.shape, generator=g)


_S = nn.Sequential
IMAGE = (3, 8, 8)
NETWORKS: dict[str, Network] = {
    "mlp": Network(
        lambda: _S(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), (6,)
    ),
    "mlp_tanh": Network(
        lambda: _S(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), (6,)
    ),
    "mlp_layer_norm": Network(
        lambda: _S(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)), (6,)
    ),
    "norm_first": Network(lambda: _S(nn.LayerNorm(12), nn.Linear(12, 8)), (12,)),
    "norm_only": Network(lambda: _S(nn.LayerNorm(12), nn.Tanh()), (12,)),
    "rms_norm": Network(lambda: _S(nn.RMSNorm(12), nn.Linear(12, 12), nn.SiLU(), nn.RMSNorm(12)), (12,)),
    "batch_norm_1d": Network(
        lambda: _S(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)), (6,)
    ),
    "embedding": Network(lambda: _S(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(40, 4)), (5,), 20),
    "embedding_norm": Network(
        lambda: _S(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU()), (5,), 20
    ),
    "cnn": Network(
        lambda: _S(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)), IMAGE
    ),
    "cnn_batch_norm": Network(
        lambda: _S(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)), IMAGE
    ),
    "cnn_group_norm": Network(
        lambda: _S(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3)), IMAGE
    ),
    "group_norm_first": Network(lambda: _S(nn.GroupNorm(1, 3), nn.Conv2d(3, 4, 3)), IMAGE),
    "grouped_conv": Network(
        lambda: _S(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.GroupNorm(3, 6)), IMAGE
    ),
    "instance_norm": Network(
        lambda: _S(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.Conv2d(6, 3, 3)), IMAGE
    ),
    "conv_1d": Network(
        lambda: _S(nn.Conv1d(4, 8, 3, padding=1), nn.GELU(), nn.GroupNorm(4, 8), nn.Conv1d(8, 4, 3)), (4, 10)
    ),
    "conv_3d": Network(
        lambda: _S(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3)),
        (2, 4, 4, 4),
    ),
    "transposed": Network(
        lambda: _S(nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(6, 2, 3, stride=2)), IMAGE
    ),
    "pools": Network(
        lambda: _S(nn.Conv2d(3, 6, 3), nn.MaxPool2d(2), nn.Conv2d(6, 6, 1), nn.AvgPool2d(2), nn.Flatten()),
        IMAGE,
    ),
    "bottleneck": Network(
        lambda: _S(
            nn.Conv2d(3, 8, 1), Residual(_S(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1)))
        ),
        IMAGE,
    ),
    "upsampling": Network(
        lambda: _S(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(4, 2, 3)),
        IMAGE,
    ),
    "padded": Network(
        lambda: _S(
            nn.ReflectionPad2d(1), nn.Conv2d(3, 4, 3), nn.ELU(), nn.ReplicationPad2d(1), nn.Conv2d(4, 2, 3)
        ),
        IMAGE,
    ),
    "shuffled": Network(
        lambda: _S(nn.Conv2d(3, 8, 3), nn.PixelShuffle(2), nn.PReLU(2), nn.Conv2d(2, 2, 3)), IMAGE
    ),
    "attention": Network(Attention, (5, 12)),
    "causal": Network(lambda: Attention("causal"), (5, 12)),
    "window": Network(lambda: _S(Attention("far"), nn.LayerNorm(12)), (6, 12)),
    "encoder": Network(_encoder, (5, 8)),
    "two_encoders": Network(lambda: _S(_encoder(), _encoder(), nn.LayerNorm(8)), (4, 8)),
    "gated": Network(lambda: Residual(_S(nn.LayerNorm(8), Gated())), (8,)),
    "mixer": Network(
        lambda: Call(lambda x: x.transpose(1, 2), nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6)), (6, 6)
    ),
    "lstm": Network(lambda: Last(nn.LSTM(4, 6, batch_first=True), 6), (5, 4)),
    "gru": Network(lambda: Last(nn.GRU(4, 6, batch_first=True), 6), (5, 4)),
    "rnn": Network(lambda: Last(nn.RNN(4, 4, batch_first=True), 4), (5, 4)),
    "masked": Network(Masked, (5, 6)),
    "standardised": Network(Standardised, (6,)),
    "cosine": Network(
        lambda: Call(lambda x: F.normalize(x, dim=-1) @ x.transpose(1, 2), nn.Linear(6, 6)), (4, 6)
    ),
    "log_softmax": Network(
        lambda: Call(lambda x: x.log_softmax(-1), nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5)), (6,)
    ),
    "sliced": Network(
        lambda: Call(
            lambda x: torch.cat([x[:, 1:5], x[:, :4].cumsum(1)], 1),
            nn.Linear(8, 8),
            nn.ReLU(),
            nn.Linear(8, 8),
        ),
        (8,),
    ),
}
