"""Patterns of everyday code, each right in both presets: built, loaded, and held to every member alone in
float64, at several sizes of every dynamic dim.

A case is a small module, its input specs and other sizes of its dims. Members have their own weights, norms
and running statistics. No node runs once a member but those that `ONCE_A_MEMBER` names with their reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Bound, run, stack
from torch import Tensor, nn

from networks.patterns import CASES
from networks.patterns.case import QUICK, N, case
from networks.patterns.check import exact, hold, made, member, parts, truth_of
from widepack import build, load

# Cases in which a node runs once a member: the ops, and why.
ONCE_A_MEMBER: dict[str, tuple[set[str], str]] = {
    "bag_padding_max": (
        {"aten.embedding_bag.padding_idx"},
        "the maximum over what is no padding hangs on the order in which a bag meets NaN",
    ),
    "bag_own_offsets": (
        {"aten.embedding_bag.padding_idx"},
        "where bags begin is data, which each member checks against its own ids",
    ),
}
SLOW = {
    "transformer", "decoder", "decoder_layer", "encoder", "encoder_masks", "encoder_causal", "swin_window",
    "grid_sample_bicubic", "gru_layers",
    "conv_circular", "mha_cross", "mha_other_sizes", "pools", "lstm_layers", "losses", "grid_sample",
    "mha", "mha_both_masks", "mha_bias_kv", "bag_mean",
    "mha_zero_attn", "pixel_unshuffle", "activations", "conv_bn_relu_pool", "gru_state", "mha_float_mask",
    "mha_mask_by_head", "gru", "mha_float_padding",
    "mha_bool_mask", "spatial_transformer", "rnn_relu", "mha_unbatched", "mha_time_first",
    "group_norm_in_chain", "upsample", "mha_key_padding",
    "channel_shuffle", "gaussian_log_prob", "encoder_layer_norm_first", "interpolate_like",
    "relative_bias", "mha_no_weights", "unfold_fold",
    "lstm_last_step", "patch_softmax", "spectrogram", "image_multiple", "complex_arithmetic",
}  # fmt: skip
# Cases in which one member's weights are NaN: no bit of another member's answer changes.
ISOLATED = [
    "parted_index", "bilinear", "cdist", "masked_scatter", "in_place_put", "batch_norm_no_statistics",
    "instance_norm_tracked", "mha_bool_mask", "cells",
    "bag_padding_mean", "grid_sample", "fourier_layer", "class_losses",
]  # fmt: skip


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if name in SLOW else []


@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n)) for n in CASES])
def test_every_member_answers_as_alone(name: str, tmp_path: Path) -> None:
    hold(CASES[name], tmp_path, ONCE_A_MEMBER.get(name, (set(), ""))[0])


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if i % 4 == 0 else [pytest.mark.slow]) for i, n in enumerate(ISOLATED)]
)
def test_nan_in_one_members_weights_stays_there(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "ill").mkdir()
    well, ill = made(case, tmp_path)[0], made(case, tmp_path / "ill", ill=1)[0]
    for sizes in case.calls()[:2]:
        own = [case.draw(sizes, i) for i in range(N)]
        for given in (own[0], {n: stack([o[n] for o in own]) for n in own[0]}):
            clean, spoilt = (parts(e(**given) if given is own[0] else e.each(**given)) for e in (well, ill))
            assert any(y[1].isnan().any() for y in spoilt if y.is_floating_point())
            for a, b in zip(clean, spoilt, strict=True):
                assert torch.equal(a[0], b[0])
                assert torch.equal(a[2], b[2])


class Vocabularies(nn.Module):
    """An embedding of as many words, and heads of as many classes, as the weights say."""

    def __init__(self, words: int, classes: tuple[int, int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.body = nn.Linear(8, 8)
        self.first, self.second = (nn.Linear(8, c) for c in classes)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.body(self.embed(ids))).mean(1)
        return {"first": self.first(x).log_softmax(-1), "second": self.second(x), "body": x}


class Codebook(nn.Module):
    """Class counts in several places: an embedding of the label, the head, a bias by class, and a norm over
    the classes.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(4, 6, 3, padding=1)
        self.labels = nn.Embedding(classes, 6)
        self.head = nn.Linear(6, classes)
        self.norm = nn.LayerNorm(classes)
        self.prior = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        y = self.stem(x).mean(-1) + self.labels(label)
        return self.norm(self.head(y) + self.prior)


def vocabularies(
    state_dict: Mapping[str, Tensor] | None = None, sizes: tuple[int, int, int] = (9, 4, 2)
) -> nn.Module:
    words, a, b = (
        sizes
        if state_dict is None
        else (state_dict[k].shape[0] for k in ("embed.weight", "first.weight", "second.weight"))
    )
    return Vocabularies(words, (a, b))


def codebook(state_dict: Mapping[str, Tensor] | None = None, classes: int = 4) -> nn.Module:
    return Codebook(classes if state_dict is None else state_dict["prior"].shape[0])


RAGGED: dict[str, tuple[Callable[..., nn.Module], list[Any], tuple[str, ...]]] = {
    "vocabularies": (vocabularies, [(9, 4, 2), (12, 4, 5), (7, 6, 2)], ("ids=int64[B,T]:0..6",)),
    "one_vocabulary_differs": (vocabularies, [(9, 4, 2), (9, 4, 2), (12, 4, 2)], ("ids=int64[B,T]:0..8",)),
    "codebook": (codebook, [4, 7, 4], ("x=float32[B,4,T]", "label=int64[B]:0..3")),
}


@pytest.mark.parametrize("name", RAGGED)
def test_sizes_that_differ_by_member(name: str, tmp_path: Path) -> None:
    make, all_sizes, inputs = RAGGED[name]
    cases = [case(partial(make, None, s), *inputs) for s in all_sizes]
    alone, right = [member(c, i) for i, c in enumerate(cases)], [exact(c, i) for i, c in enumerate(cases)]
    paths = [tmp_path / f"m{i}.pt" for i in range(N)]
    for path, module in zip(paths, alone):
        torch.save(module.state_dict(), path)
    build(paths, tmp_path / "e.wide", model=make, inputs=inputs, **QUICK)
    ens = load(tmp_path / "e.wide", verify="off", warmup=False)
    found: dict[int, Bound] = {}
    for k, sizes in enumerate([*cases[0].calls(), {"B": 16, "T": 5}]):
        own = [cases[0].draw(sizes, 10 * k + i) for i in range(N)]
        for answer, given in (
            (ens(**own[0]), [own[0]] * N),
            (ens.each(**{n: stack([o[n] for o in own]) for n in own[0]}), own),
        ):
            rows = list(answer.values()) if isinstance(answer, Mapping) else [answer]
            for i in range(N):
                mine, truth = parts(run(alone[i], (), given[i])), parts(truth_of(right[i], given[i]))
                for j, (w, m, t) in enumerate(zip(rows, mine, truth, strict=True)):
                    found.setdefault(j, Bound()).add(w[i], m, t)
    for bound in found.values():
        bound.check()
