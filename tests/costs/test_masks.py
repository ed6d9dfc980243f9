"""Tests the FLOP of attention that masks forbid, against pairs that are counted one by one in real masks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from attention_masks import (
    HEADS,
    INF,
    INPUTS,
    SIZES,
    WIDTH,
    Attention,
    Maker,
    Several,
    additive,
    check,
    forbidden,
    ij,
)
from click.testing import CliRunner
from torch import Tensor, nn

from widepack import primitives as primitives  # fills the registry
from widepack.building.model_costs import model_costs
from widepack_artifacts.costs import FORMAT, MASKED_FORMAT, documents, read_documents
from widepack_artifacts.errors import ArtifactError
from widepack_cli.main import cli


def causal(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return j <= i


def window(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return (i >= j) & (i - j < 4)


def both_sides(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return (i - j).abs() <= 2


def prefix(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return (j < 3) | (j <= i)


def sinks(t: int, s: int) -> Tensor:
    """A window, and the first two keys for all."""
    i, j = ij(t, s)
    return torch.logical_and(i >= j, torch.logical_or(i - j < 3, j < 2))


def tril(t: int, s: int) -> Tensor:
    return torch.tril(torch.ones(t, s, dtype=torch.bool), diagonal=1)


def upside_down(t: int, s: int) -> Tensor:
    return ~torch.triu(torch.ones(t, s), 1).bool()


def transposed(t: int, s: int) -> Tensor:
    return causal(s, t).transpose(0, 1).logical_not() | (ij(t, s)[0] == ij(t, s)[1])


def last_keys(t: int, s: int) -> Tensor:
    """Queries are the last of the positions."""
    i, j = ij(t, s)
    return j <= i + (s - t)


def viewed(t: int, s: int) -> Tensor:
    i, j = torch.arange(t).view(1, t, 1), torch.arange(s).reshape(1, 1, s)
    return (j <= i).expand(1, t, s)[0][None, None]


def read_at(t: int, s: int) -> Tensor:
    """Positions that are read from a table, as transformers does."""
    rows, columns = (torch.arange(n)[None].expand(2, -1) for n in (t, s))
    first = torch.arange(2)[:, None, None]
    i, j = rows[first, torch.arange(t)[None, :, None]], columns[first, torch.arange(s)[None, None]]
    return ((j <= i) & (j > i - 4))[:1]


def one_query(t: int, s: int) -> Tensor:
    """What the second query sees, for all."""
    return window(t, s)[1:2].expand(t, s)


def one_key(t: int, s: int) -> Tensor:
    """Who sees the second key, for all keys; and positions with one row only."""
    rows = torch.arange(1)[:, None] + 1
    return causal(t, s)[:, 1:2] & (rows >= torch.arange(s)[None] - 3)


BOOLS: dict[str, Maker] = {
    f.__name__: f
    for f in (
        *(causal, window, both_sides, prefix, sinks, tril, upside_down),
        *(transposed, last_keys, viewed, read_at, one_query, one_key),
    )
}


def added_form(mask: Maker) -> Maker:
    def made(t: int, s: int) -> Tensor:
        return additive(mask(t, s))

    return made


def full_triu(t: int, s: int) -> Tensor:
    return torch.full((t, s), INF).triu(1)


def times_least(t: int, s: int) -> Tensor:
    return (1.0 - causal(t, s).float()) * torch.finfo(torch.float32).min


def where_window(t: int, s: int) -> Tensor:
    return torch.where(window(t, s), 0.0, -1e9)


def triu_of_window(t: int, s: int) -> Tensor:
    """Two forbidden triangles."""
    i, j = ij(t, s)
    return torch.full((t, s), INF).triu(1) + torch.zeros(t, s).masked_fill(i - j >= 5, INF)


FLOATS: dict[str, Maker] = {f.__name__: f for f in (full_triu, times_least, where_window, triu_of_window)}
FLOATS |= {f"additive {name}": added_form(mask) for name, mask in BOOLS.items()}


@pytest.mark.extended
def test_boolean_masks() -> None:
    check([(mask, "argument") for mask in BOOLS.values()])


@pytest.mark.extended
def test_masks_that_are_added() -> None:
    check([(mask, "argument") for mask in FLOATS.values()])


@pytest.mark.extended
def test_attention_that_is_written_out() -> None:
    check([(mask, how) for mask in (causal, window, prefix) for how in ("added", "filled", "where")])


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("how", ["argument", "added"])
def test_wide_programs(how: str) -> None:
    check([(window, how)], wide=4)


class Own(nn.Module):
    """Attention of projected rows: every member has its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, window(x.shape[1], x.shape[1]))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("wide", [0, 4])
def test_members_count_each(wide: int) -> None:
    costs = model_costs(Own, ["x=float32[B,T,8]"], wide=wide)
    for b, t, members in ((1, 5, 1), (3, 17, 4), (2, 64, 100)):
        found = costs.at(costs.values({"B": b, "T": t}, members=members))
        assert found["masked_flops"] == members * 4 * b * 8 * forbidden(window(t, t))


def test_is_causal() -> None:
    class Causal(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Any:
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    costs = model_costs(Causal, INPUTS)
    for b, t, s in SIZES:
        found = costs.at(costs.values({"B": b, "T": t, "S": s}))["masked_flops"]
        assert found == 4 * b * HEADS * WIDTH * forbidden(causal(t, s))

    class Square(nn.Module):
        def forward(self, q: Tensor) -> Any:
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    costs = model_costs(Square, INPUTS[:1])
    assert costs.totals["masked_flops"][0] == "32*B*T*(T - 1)"


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_windows_of_a_language_model(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        use_cache=False,
        sliding_window=4,
        attn_implementation=attention,
    )

    def make() -> nn.Module:
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
        return module

    costs = model_costs(make, ["input_ids=int64[B,T]:1..49"])
    for b, t in ((1, 9), (3, 4), (2, 60)):
        found = costs.at(costs.values({"B": b, "T": t}))["masked_flops"]
        assert found == 2 * 4 * b * 32 * forbidden(window(t, t))


def test_what_data_decides_forbids_nothing_here() -> None:
    """The causal part of the mask is forbidden at any input, the padding only at some."""

    class Padded(nn.Module):
        def forward(self, q: Tensor, k: Tensor, pad: Tensor) -> Any:
            mask = causal(q.shape[-2], k.shape[-2]) & pad[:, None, None, :]
            return F.scaled_dot_product_attention(q, k, k, mask)

    class OnlyPadded(nn.Module):
        def forward(self, q: Tensor, k: Tensor, pad: Tensor) -> Any:
            return F.scaled_dot_product_attention(q, k, k, pad[:, None, None, :])

    class Either(nn.Module):
        def forward(self, q: Tensor, k: Tensor, pad: Tensor) -> Any:
            mask = causal(q.shape[-2], k.shape[-2]) | pad[:, None, None, :]
            return F.scaled_dot_product_attention(q, k, k, mask)

    inputs = [*INPUTS, "pad=bool[B,S]"]
    costs = model_costs(Padded, inputs)
    found = costs.at(costs.values({"B": 3, "T": 7, "S": 9}))
    assert found["masked_flops"] == 4 * 3 * HEADS * WIDTH * forbidden(causal(7, 9))
    for make in (OnlyPadded, Either):
        costs = model_costs(make, inputs)
        assert "masked_flops" not in costs.totals
        assert documents({"forward": costs})["format"] == FORMAT


def test_files_of_the_first_format() -> None:
    costs = model_costs(Own, ["x=float32[B,T,8]"])
    document = documents({"forward": costs})
    assert document["format"] == MASKED_FORMAT
    with pytest.raises(ArtifactError, match="masked_flops is a measure of"):
        read_documents({**document, "format": FORMAT})
    with pytest.raises(ArtifactError, match="this widepack reads"):
        read_documents({**document, "format": "widepack.costs/3"})


def test_the_command_shows_the_line() -> None:
    words = ["analyze", f"{__name__}:Own", "--input", "x=float32[B,T,8]", "--at", "B=2,T=30,N=5"]
    text = CliRunner().invoke(cli, words, prog_name="widepack").stdout
    (line,) = [row for row in text.splitlines() if row.startswith("FLOP that masks forbid")]
    assert f"{5 * 4 * 2 * 8 * forbidden(window(30, 30)):,}" in line
    found = json.loads(CliRunner().invoke(cli, [*words, "--json"], prog_name="widepack").stdout)
    assert found["numbers"]["masked_flops"] == 5 * 4 * 2 * 8 * forbidden(window(30, 30))
    linear = ["analyze", "torch.nn.Linear", "--model-arg", "in_features=4", "--model-arg", "out_features=4"]
    plain = CliRunner().invoke(cli, [*linear, "--input", "input=float32[B,4]"], prog_name="widepack").stdout
    assert "masks" not in plain


@pytest.mark.extended
def test_formulas_with_maxima_are_not_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of many forms gave polynomials of ten variables, whose factors took minutes to hours."""

    def factor(expr: Any) -> Any:
        assert not expr.has(sympy.Max), expr
        return expr

    monkeypatch.setattr(sympy, "factor", factor)
    masks = FLOATS.values()
    found = model_costs(lambda: Several([Attention(mask, "argument") for mask in masks]), INPUTS)
    assert any("max(" in text for text in found.totals["masked_flops"])
