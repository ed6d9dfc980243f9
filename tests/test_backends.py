"""What runs a wide program: what a call costs, and that every backend gives the members' own answers."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import widepack
from support import Artifacts


def seconds(run: Callable[[], object], calls: int = 20) -> float:
    """Of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def test_a_call_costs_little_more_than_the_bare_graph(artifacts: Artifacts) -> None:
    ens = widepack.load(artifacts("mlp"))
    x = torch.randn(1, 64)
    ens(x)
    bare = ens._forward()._programs("shared")[0].executable
    with torch.inference_mode():
        rounds = [(seconds(lambda: bare.forward(*bare.weights, x)), seconds(lambda: ens(x))) for _ in range(100)]
    graph_us, call_us = (1e6 * min(r[i] for r in rounds) for i in (0, 1))  # the least of many: what other processes took is not the call's
    assert call_us - graph_us < 60, "about 12 us where nothing else runs"


def test_a_call_like_one_before_is_checked_as_well(artifacts: Artifacts) -> None:
    ens = widepack.load(artifacts("mlp"))
    x, xs = torch.randn(3, 64), torch.randn(8, 3, 64)
    for _ in range(2):
        assert ens(x).shape == ens.each(xs).shape == (8, 3, 10)
        assert torch.equal(ens(x), ens(input=x))
        assert torch.equal(ens.each(xs), ens(widepack.each(xs)))
        with pytest.raises(widepack.InputError, match="63 at axis 1"):
            ens(torch.randn(3, 63))
        with pytest.raises(widepack.InputError, match="is float64"):
            ens(x.double())
        with pytest.raises(widepack.InputError, match="for one input a member call ens.each"):
            ens(xs)
        with pytest.raises(widepack.InputError, match="takes 1 inputs by position"):
            ens(x, x)
        with pytest.raises(widepack.InputError, match="a list of 3"):
            ens([1, 2, 3])
    ens.close()
    with pytest.raises(widepack.UsageError, match="closed"):
        ens(x)


def test_more_shapes_than_are_remembered(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widepack.wide_entry.SEEN", 3)
    ens = widepack.load(artifacts("mlp"))
    x = torch.randn(9, 64)
    whole = ens(x)
    for batch in (1, 2, 3, 4, 5, 9, 1, 9):
        torch.testing.assert_close(ens(x[:batch]), whole[:, :batch])
        assert len(ens._forward()._seen) <= 3


def test_an_answer_is_the_callers_to_write_into(artifacts: Artifacts) -> None:
    ens = widepack.load(artifacts("mlp"))
    x = torch.randn(2, 64)
    first, kept = ens(x), x.clone()
    want = first.clone()
    with torch.inference_mode():
        first.zero_()
    assert torch.equal(x, kept)
    assert torch.equal(ens(x), want)
