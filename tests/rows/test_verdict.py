"""Tests which modules have independent rows, and that those that mix rows are named with their line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from row_cases import Examined, Of
from torch import Tensor, nn
from torch.nn import functional as F

LARGE = torch.randn(100, 6, generator=torch.Generator().manual_seed(1))
SYM_MAX: Any = torch.sym_max
NUMBERS = torch.arange(600).view(100, 6)
BIG = NUMBERS % 50
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 0], [1, 3, 5]])


def table(x: Tensor) -> Tensor:
    return torch.arange(60.0).view(10, 6)[x]


MIXED: dict[str, Callable[[Tensor], Any]] = {
    "less the mean of the batch": lambda x: x - x.mean(0),
    "batch statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "the largest of all": lambda x: x / x.abs().amax(),
    "ranks": lambda x: x.argsort(0).float() * x,
    "softmax of the batch": lambda x: x.softmax(0),
    "running sums": lambda x: x.cumsum(0),
    "the first row": lambda x: x - x[0],
    "the last row": lambda x: x + x[-1:],
    "reversed": lambda x: x.flip(0),
    "shifted": lambda x: x + x.roll(1, 0),
    "similarity": lambda x: (x @ x.T) @ x,
    "distances": lambda x: torch.cdist(x, x).amin(1) if x.shape[0] else x,
    "pairs": lambda x: (x[:, None] - x[None]).sum(1),
    "attention over the batch": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "a norm of all": lambda x: x / x.norm(),
    "sorted": lambda x: x.sort(0).values,
    "counts": lambda x: x * (x > 0).sum(),
    "any": lambda x: torch.where((x > 1).any(), x, -x),
    "the best row": lambda x: x * x.sum(1).argmax(),
    "a part of the batch": lambda x: torch.cat([x[:1] * 2, x[1:]]),
    "a product over the batch": lambda x: x * x.prod(0),
    "standard deviation": lambda x: x / (x.std(0) + 1),
    "normalized over the batch": lambda x: F.normalize(x, dim=0),
    "chosen by a row": lambda x: x.index_select(0, x.sum(1).argsort()),
    "a histogram": lambda x: x + torch.histc(x, 4, -1, 1).sum(),
    "written at a mask of all rows": lambda x: x.masked_scatter(x > 0, x.exp()),
    "a norm of columns": lambda x: x.renorm(2, 1, 0.5),
    "any, after an op without a rule": lambda x: x + x.flatten(0).cumsum(0).any(),
}


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize("name", MIXED)
def test_modules_that_mix_rows(name: str) -> None:
    found = Examined(Of(MIXED[name]), [X]).verdict()
    assert not found.independent, name
    assert re.search(r"row_cases\.py:\d+ in forward: ", found.reason), found.reason


def first_marked(x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    z[0] = 1.0
    return x + z


NUMBERED: dict[str, Callable[[Tensor], Any]] = {
    "the number of the row": lambda x: x + torch.arange(x.shape[0])[:, None],
    "the number of rows": lambda x: x * x.shape[0],
    "running ones": lambda x: x * torch.ones(x.shape[0], 1).cumsum(0),
    "the first row is marked": first_marked,
    "padded zeros": lambda x: x + F.pad(torch.ones(x.shape[0], 1), (0, 0, 1, 0))[:-1],
    "a window over ones": lambda x: x * F.avg_pool1d(torch.ones(1, 1, x.shape[0]), 3, 1, 1).view(-1, 1),
    "joined constants": lambda x: x + torch.cat([torch.ones(1, 1), torch.zeros(x.shape[0], 1)])[:-1],
    "positions by the batch": lambda x: x + torch.linspace(0, 1, 6)[: x.shape[0]].sum(),
    "the diagonal": lambda x: x + torch.eye(x.shape[0], 6),
    "repeated in another order": lambda x: x + torch.arange(6.0).repeat(x.shape[0]).view(6, -1).T,
    "a number of a row": lambda x: x + torch.arange(x.shape[0])[-1],
    # the number of rows in a form that is equal for two sizes of the batch
    "odd batches": lambda x: x * (x.shape[0] % 2 + 1),
    "eighths of the batch": lambda x: x * (x.shape[0] // 8 + 1),
    "the larger of the batch and a number": lambda x: x * max(x.shape[0], 10),
    "torch.sym_max of the batch": lambda x: x * SYM_MAX(x.shape[0], 10),
    "ones of a size of the batch": lambda x: x * torch.ones(x.shape[0] // 2 + 1).sum(),
    "columns by the batch": lambda x: x[:, : 2 + x.shape[0] // 8].sum(1),
    "turned by the batch": lambda x: x.roll(x.shape[0] // 8, 1),
    "an entry of a table by the batch": lambda x: x + torch.arange(3)[x.shape[0] % 2],
    "a mask of columns by the batch": lambda x: x * (torch.arange(6) < x.shape[0]),
    # places of a larger constant by the number of the row
    "gathered from a larger table": lambda x: x + NUMBERS.float().gather(0, BIG[: x.shape[0]]),
    "written from a larger table": lambda x: x.scatter(1, torch.ones_like(x).long(), LARGE),
    "added from a larger table": lambda x: x.scatter_add(1, torch.zeros_like(x).long(), LARGE),
    "taken along a larger table": lambda x: x.gather(
        1, torch.arange(600).view(100, 6)[: x.shape[0]] // 6 % 6
    ),
}


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize("name", NUMBERED)
def test_modules_that_depend_on_the_number_of_a_row_or_of_rows(name: str) -> None:
    found = Examined(Of(NUMBERED[name]), [X]).verdict()
    assert not found.independent, found


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(F.max_pool2d(self.norm(self.conv(x)).relu(), 2).flatten(1))
        return y


class Recurrent(nn.Module):
    def __init__(self, kind: Any, batch_first: bool) -> None:
        super().__init__()
        self.rnn = kind(6, 5, 2, batch_first=batch_first, bidirectional=True)
        self.head = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.rnn(x)
        return self.head(y), y.relu()


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.position = nn.Parameter(torch.randn(1, 7, 8))
        self.token = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        first = self.token.expand(x.shape[0], -1, -1)
        y: Tensor = self.layer(torch.cat([first, x], 1) + self.position)
        return y[:, 0]


class LastToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.table(x))
        last = (x != 0).sum(-1) - 1
        found: Tensor = y[torch.arange(x.shape[0]), last]
        return found


class MergedSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c, s = x.shape
        y: Tensor = self.conv(x.reshape(b * t, c, s)).view(b, t, 4, s)
        return y.mean((1, 3))


INDEPENDENT: dict[str, tuple[Callable[[], nn.Module], list[Tensor], list[dict[int, str]]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)), [X], []),
    "convolutions": (Normed, [torch.randn(4, 3, 8, 8)], []),
    "lstm": (lambda: Recurrent(nn.LSTM, True), [torch.randn(4, 3, 6)], []),
    "gru, time first": (lambda: Recurrent(nn.GRU, False), [torch.randn(3, 4, 6)], [{1: "B"}]),
    "transformer": (Attended, [torch.randn(4, 6, 8)], []),
    "last token": (LastToken, [IDS], []),
    "merged steps": (MergedSteps, [torch.randn(4, 3, 6, 5)], []),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)),
        [torch.randn(4, 4, 5, 5)],
        [],
    ),
    "softmax of classes": (lambda: Of(lambda x: x.softmax(-1).log()), [X], []),
    "topk": (lambda: Of(lambda x: x.topk(2).values), [X], []),
    "gathered": (lambda: Of(lambda x: x.gather(1, x.argsort(1)[:, :2])), [X], []),
    "one hot": (lambda: Of(lambda x: F.one_hot(x, 10).float().mean(1)), [IDS], []),
    "a table": (lambda: Of(lambda x: table(x).sum(1)), [IDS], []),
    "einsum": (lambda: Of(lambda x: torch.einsum("bi,bj->bij", x, x)), [X], []),
    "similarity of places": (lambda: Of(lambda x: x[:, :, None] @ x[:, None, :]), [X], []),
    "complex": (lambda: Of(lambda x: torch.fft.rfft(x).abs()), [X], []),
    "parts": (lambda: Of(lambda x: torch.cat(x.chunk(3, 1)[::-1], 1) * x.unbind(1)[0][:, None]), [X], []),
    "masked": (lambda: Of(lambda x: x.masked_fill(x > 0, 0.0).clamp(-1)), [X], []),
    "scaled": (lambda: Of(lambda x: x / x.norm(dim=1, keepdim=True)), [X], []),
    "transformed at a size": (lambda: Of(lambda x: torch.fft.fftn(x, s=(4,)).abs()), [X], []),
    "as another dtype": (lambda: Of(lambda x: x.view(torch.int16).float()), [X], []),
    "parts as another dtype": (
        lambda: Of(lambda x: x.reshape(-1, 3).view(torch.int32).reshape(-1, 12).float()),
        [torch.arange(24).view(4, 6)],
        [],
    ),
    "padded": (lambda: Of(lambda x: F.pad(x, (1, 2)).unfold(1, 3, 2).amax(-1)), [X], []),
    "zeros of the batch": (lambda: Of(lambda x: torch.cat([x, x.new_zeros(x.shape[0], 2)], 1)), [X], []),
    "upsampled": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), [torch.randn(4, 3, 4, 4)], []),
}


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize("name", INDEPENDENT)
def test_modules_with_independent_rows_are_proved(name: str) -> None:
    make, inputs, dims = INDEPENDENT[name]
    found = Examined(make(), inputs, dims).verdict()
    assert found.independent and found.proved, found


class Gated(nn.Module):
    """Adds a function of the input only where a weight is positive, which it is not: no trial sees it."""

    def __init__(self, function: Callable[..., Tensor], layer: Any = None) -> None:
        super().__init__()
        self.gate, self.function, self.layer = nn.Parameter(torch.zeros(())), function, layer

    def forward(self, x: Tensor) -> Tensor:
        found = self.function(x) if self.layer is None else self.function(x, self.layer)
        return torch.where(self.gate > 0, found, x)


def rows_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x[torch.arange(x.shape[0]).to(dtype).long()]


def numbers_of(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0]).to(x)[:, None].expand(-1, 6).contiguous()


def heads_of_rows(x: Tensor) -> Tensor:
    k = torch.arange(12.0).view(1, 2, 1, 6)
    return F.scaled_dot_product_attention(x[None, :, None, :], k, k, enable_gqa=True)[0, :, 0]


HIDDEN: dict[str, tuple[Callable[..., Tensor], Callable[[], Any]]] = {
    "numbers as bytes": (lambda x: rows_to(x, torch.int8), lambda: None),
    "numbers as booleans": (lambda x: rows_to(x, torch.bool), lambda: None),
    "numbers in half precision": (lambda x: rows_to(x, torch.bfloat16), lambda: None),
    "numbers of bytes": (lambda x: x[torch.arange(x.shape[0], dtype=torch.uint8).long()], lambda: None),
    "bits of numbers": (
        lambda x: x[torch.arange(x.shape[0]).view(torch.float64).long()],
        lambda: None,
    ),
    "numbers of limited norm": (
        lambda x: x[torch.renorm(torch.arange(x.shape[0]).float()[:, None], 2, 0, 1.0).long()[:, 0]],
        lambda: None,
    ),
    "numbers on a diagonal": (
        lambda x: x[torch.arange(x.shape[0])[:, None].expand(-1, 3).diag_embed()].sum((1, 2)),
        lambda: None,
    ),
    "numbers as a state": (
        lambda x, rnn: rnn(x[:, None], numbers_of(x)[None])[0][:, 0],
        lambda: nn.GRU(6, 6, batch_first=True),
    ),
    "numbers in a cell": (lambda x, cell: cell(x, numbers_of(x)), lambda: nn.GRUCell(6, 6)),
    "written by fewer rows": (
        lambda x: x.scatter(1, torch.zeros(x.shape[0] - x.shape[0] // 3, 1).long(), 5.0),
        lambda: None,
    ),
    "added to fewer rows": (
        lambda x: torch.zeros_like(x).scatter_add(1, torch.zeros(x.shape[0] - x.shape[0] // 2, 6).long(), x),
        lambda: None,
    ),
    "ones are counted": (
        lambda x: (
            x
            + torch.zeros(x.shape[0]).scatter_add(0, torch.zeros(x.shape[0]).long(), torch.ones(x.shape[0]))[
                :, None
            ]
        ),
        lambda: None,
    ),
    "keys of several heads": (heads_of_rows, lambda: None),
    "shuffled channels": (
        lambda x: (
            F.channel_shuffle(torch.cat([x, x])[None, :, :, None, None], 2)[0, :, :, 0, 0]
            .view(2, x.shape[0], 6)
            .sum(0)
        ),
        lambda: None,
    ),
    "a product over the batch, with a value of one place": (
        lambda x: x * torch.linalg.vecdot(x[:, :1], x.new_ones(x.shape[0]))[:, None],
        lambda: None,
    ),
    "a similarity over the batch, with a value of one place": (
        lambda x: x * F.cosine_similarity(x[:, :1], x.new_ones(x.shape[0]), dim=-1, eps=10.0)[:, None],
        lambda: None,
    ),
    "rows whose numbers are halved": (
        lambda x: x.reshape(-1, 3).view(torch.float16).reshape(2, -1, 6).float().sum(0),
        lambda: None,
    ),
    "a distance of the batch": (
        lambda x: x * F.pairwise_distance(torch.zeros(3, x.shape[0]), torch.ones(3, x.shape[0]))[0],
        lambda: None,
    ),
}


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize("name", HIDDEN)
def test_what_no_trial_sees_is_not_proved(name: str) -> None:
    function, layer = HIDDEN[name]
    x = torch.cat([X, X.flip(0)])
    found = Examined(Gated(function, layer()), [x]).verdict()
    assert not found.proved or not found.independent, found


def counts(x: Tensor) -> Tensor:
    """How often the id of each row is in the batch."""
    found = torch.zeros(100_000).index_add(0, x, torch.ones(x.shape[0]))
    return found[x]


def firsts(x: Tensor) -> Tensor:
    """Whether a row before it is equal, of real rows."""
    equal = (x[:, None] == x[None]).all(-1).tril(-1).any(1)
    return torch.where(equal[:, None], -x, x)


def all_alike(x: Tensor) -> Tensor:
    return x * (x.amax(0) == x.amin(0))


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("function", [counts, firsts, all_alike])
def test_modules_that_compare_rows(function: Callable[[Tensor], Tensor]) -> None:
    """Drawn rows are never equal, so trials copy a row to another one."""
    x = torch.tensor([7, 70_000, 12, 99_999]) if function is counts else X
    found = Examined(Of(function), [x]).verdict()
    assert not found.independent, found


def test_answers_that_are_the_same_for_all_rows_are_proved() -> None:
    found = Examined(Of(lambda x: (x.relu(), torch.zeros(x.shape[0]))), [X]).verdict()
    assert found.independent and found.proved, found


class Even(nn.Module):
    """Takes 4, 6, 8, ... rows, and mixes them in an op that has no rule."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] % 2 or x.shape[0] < 4:
            raise ValueError("takes 4, 6, 8, ... rows")
        return x.tril(1)


def test_a_model_of_some_batches_is_tried_with_those() -> None:
    found = Examined(Even(), [X]).verdict()
    assert not found.independent, found


@pytest.mark.extended
def test_rows_are_along_the_first_dim_along_which_they_are_independent() -> None:
    sums = Examined(Of(lambda x: x.cumsum(0)), [torch.randn(3, 4, 6)], [{0: "T", 1: "B"}]).verdict()
    assert (sums.dim, sums.independent, sums.proved) == ("B", True, True)
    assert str(sums) == "independent along B"
    mixed = Examined(Of(lambda x: x - x.mean((0, 1))), [torch.randn(3, 4, 6)], [{0: "T", 1: "B"}]).verdict()
    assert mixed.dim == "B" and not mixed.independent


def two_columns(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, torch.tensor([1, 2])] = 0.0
    return y


def test_a_model_without_a_rule_for_an_op_is_tried() -> None:
    found = Examined(Of(two_columns), [X]).verdict()
    assert found.independent and not found.proved, found
    words = (
        r"independent along B in trials; not proved: index_put\S*, \w+\.py:\d+ in forward: writes at indices"
    )
    assert re.match(words, str(found)), str(found)
