"""Tests patterns of everyday code in both presets: each is built, loaded, and compared with every member
alone in float64, at several sizes of every dynamic dim.

A case is a small module, its input specs and other sizes of its dims. Members differ in weights, norms and
running statistics. Only the nodes that `ONCE_A_MEMBER` lists with a reason run once for each member.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built
from support import Bound, run, stack
from torch import Tensor, nn

from networks.patterns import CASES
from networks.patterns.case import N, case
from networks.patterns.check import build_case, check_case, exact, member, parts, truth_of
from widepack import load

# Cases in which a node runs once for each member: the ops, and the reason.
ONCE_A_MEMBER: dict[str, tuple[set[str], str]] = {
    "bag_padding_max": (
        {"aten.embedding_bag.padding_idx"},
        "the maximum without padding depends on the place of NaN in a bag",
    ),
    "bag_own_offsets": (
        {"aten.embedding_bag.padding_idx"},
        "the starts of bags are data, which each member checks against its ids",
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
    "two_lengths", "instance_norm", "bag_sum", "mha_key_padding_no_weights", "mha_weights_by_head",
    "conv_same",
    "encoder_layer", "grid_sample_nearest", "in_place_views", "parameter_list", "mha_causal", "dict_output",
    "linear_attention", "film", "half_length", "separable_block", "functional_norms", "text_cnn",
    "einsum_attention", "mask_from_ids", "lstm_time_first", "conv_grouped", "sums",
}  # fmt: skip
# Cases that are also tested with NaN in one member's weights: no bit of another member's answer changes.
ISOLATED = [
    "parted_index", "bilinear", "cdist", "masked_scatter", "in_place_put", "batch_norm_no_statistics",
    "instance_norm_tracked", "mha_bool_mask", "cells",
    "bag_padding_mean", "grid_sample", "fourier_layer", "class_losses",
]  # fmt: skip


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if name in SLOW else []


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=marks(n)) for n in CASES])
def test_every_member_answers_as_alone(name: str, tmp_path: Path) -> None:
    check_case(CASES[name], tmp_path, ONCE_A_MEMBER.get(name, (set(), ""))[0])


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if i % 4 == 0 else [pytest.mark.slow]) for i, n in enumerate(ISOLATED)]
)
def test_nan_in_one_members_weights_reaches_no_other_member(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "ill").mkdir()
    finite, with_nan = build_case(case, tmp_path)[0], build_case(case, tmp_path / "ill", nan_member=1)[0]
    for sizes in case.calls()[:2]:
        calls = [case.draw(sizes, i) for i in range(N)]
        for given in (calls[0], {n: stack([o[n] for o in calls]) for n in calls[0]}):
            clean, changed = (
                parts(e(**given) if given is calls[0] else e.each(**given)) for e in (finite, with_nan)
            )
            assert any(y[1].isnan().any() for y in changed if y.is_floating_point())
            for a, b in zip(clean, changed, strict=True):
                assert torch.equal(a[0], b[0])
                assert torch.equal(a[2], b[2])


class Vocabularies(nn.Module):
    """Has an embedding and heads whose sizes are those of the weights."""

    def __init__(self, words: int, classes: tuple[int, int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.body = nn.Linear(8, 8)
        self.first, self.second = (nn.Linear(8, c) for c in classes)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = torch.relu(self.body(self.embed(ids))).mean(1)
        return {"first": self.first(x).log_softmax(-1), "second": self.second(x), "body": x}


class Codebook(nn.Module):
    """Uses the number of classes in several places: an embedding of the label, the head, a bias for each
    class, and a norm over the classes.
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


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", RAGGED)
def test_sizes_that_differ_by_member(name: str, tmp_path: Path) -> None:
    make, all_sizes, inputs = RAGGED[name]
    cases = [case(partial(make, None, s), *inputs) for s in all_sizes]
    alone, doubles = [member(c, i) for i, c in enumerate(cases)], [exact(c, i) for i, c in enumerate(cases)]
    ens = load(built(tmp_path, make, alone, *inputs), verify="off", warmup=False)
    found: dict[int, Bound] = {}
    for k, sizes in enumerate([*cases[0].calls(), {"B": 16, "T": 5}]):
        calls = [cases[0].draw(sizes, 10 * k + i) for i in range(N)]
        for answer, given in (
            (ens(**calls[0]), [calls[0]] * N),
            (ens.each(**{n: stack([o[n] for o in calls]) for n in calls[0]}), calls),
        ):
            rows = list(answer.values()) if isinstance(answer, Mapping) else [answer]
            for i in range(N):
                answer_alone, truth = (
                    parts(run(alone[i], (), given[i])),
                    parts(truth_of(doubles[i], given[i])),
                )
                for j, (w, m, t) in enumerate(zip(rows, answer_alone, truth, strict=True)):
                    found.setdefault(j, Bound()).add(w[i], m, t)
    for bound in found.values():
        bound.check()
