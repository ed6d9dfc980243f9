"""Tests the op `masked_attention`: attention that skips keys which the mask forbids.

The oracle (tests/primitives/test_oracle.py) compares the strategy `blocks` with the op for each member. Its
operands are small, so that the op leaves them to torch. Here every call runs in blocks if it may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from widepack.kernels import masked
from widepack.kernels.checks import OperandError
from widepack.kernels.decompose import decompose
from widepack.kernels.library import FUNCTIONS
from widepack.kernels.masked import mask_blocks
from widepack.runtime.op_costs import cost
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

INF = float("-inf")
OP, PLAIN = FUNCTIONS[masked.OP], torch.ops.aten.scaled_dot_product_attention.default


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Lets every call run in blocks, and returns the queries and keys of each call of torch's kernel."""
    seen: list[tuple[int, int]] = []
    plain = F.scaled_dot_product_attention

    def counted(query: Tensor, key: Tensor, *rest: Any, **named: Any) -> Tensor:
        seen.append((query.shape[-2], key.shape[-2]))
        return plain(query, key, *rest, **named)

    monkeypatch.setattr(masked, "_START", 0.0)
    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    return seen


def ij(t: int, s: int) -> tuple[Tensor, Tensor]:
    return torch.arange(t)[:, None], torch.arange(s)[None]


def window(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return (j <= i) & (i - j < 20) | (j == (i + 3) % s)


def causal(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return j <= i


def prefix(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return (j < 30) | (j <= i)


def sinks(t: int, s: int) -> Tensor:
    """A window and the first key: the keys of a block are two ranges."""
    i, j = ij(t, s)
    return (j <= i) & (i - j < 20) | (j == 0)


def blocks(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return i // 50 == j // 50 if t <= s else (i // 50 == j // 50) | (j < 2)


def dilated(t: int, s: int) -> Tensor:
    i, j = ij(t, s)
    return (j <= i) & (j % 5 == 0)


MASKS: dict[str, Callable[[int, int], Tensor]] = {
    f.__name__: f for f in (window, causal, prefix, sinks, blocks, dilated)
}
SIZES = [(128, 128), (200, 200), (130, 300), (300, 150)]
BOUNDS = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}


def qkv(t: int, s: int, *, heads: int = 3, kv_heads: int = 3, dtype: torch.dtype = torch.float32) -> Any:
    g = torch.Generator().manual_seed(t + s)
    shapes = ((2, heads, t, 8), (2, kv_heads, s, 8), (2, kv_heads, s, 8))
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def exact(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Tensor:
    given = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in rest]
    return torch.ops.aten.scaled_dot_product_attention.default(  # type: ignore[no-any-return]
        q.double(), k.double(), v.double(), *given, **named
    )


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("form", ["bool", "inf", "least"])
@pytest.mark.parametrize("name", MASKS)
def test_answers_are_those_of_torch(
    name: str, form: str, dtype: torch.dtype, calls: list[tuple[int, int]]
) -> None:
    pairs = 0
    for t, s in SIZES:
        mask = MASKS[name](t, s)
        if form != "bool":
            number = INF if form == "inf" else torch.finfo(dtype).min
            mask = torch.randn(t, s, dtype=dtype).masked_fill(~mask, number)
        q, k, v = qkv(t, s, dtype=dtype)
        y = OP(q, k, v, mask)
        assert y.dtype == dtype and y.stride() == PLAIN(q, k, v, mask).stride()
        wanted = exact(q, k, v, mask if form == "bool" else mask.masked_fill(mask <= -1e38, INF))
        torch.testing.assert_close(y.double(), wanted, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
        pairs += t * s
    assert sum(t * s for t, s in calls) < 0.95 * pairs


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 3), (1, 3)])
def test_masks_of_batch_and_heads(shape: tuple[int, int], calls: list[tuple[int, int]]) -> None:
    t = 200
    mask = torch.stack([window(t, t).roll(3 * i, 1) for i in range(shape[0] * shape[1])]).view(*shape, t, t)
    q, k, v = qkv(t, t)
    torch.testing.assert_close(OP(q, k, v, mask).double(), exact(q, k, v, mask), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(OP(q, k, v, mask[0]).double(), exact(q, k, v, mask[0]), rtol=2e-6, atol=2e-6)
    assert len(calls) > 2


@pytest.mark.parametrize(("t", "s"), SIZES)
def test_is_causal(t: int, s: int, calls: list[tuple[int, int]]) -> None:
    q, k, v = qkv(t, s)
    y = OP(q, k, v, None, 0.0, True, scale=0.4)
    torch.testing.assert_close(y.double(), exact(q, k, v, None, 0.0, True, scale=0.4), rtol=2e-6, atol=2e-6)
    assert len(calls) == -(-t // masked.BLOCK)


def test_heads_that_share_keys_and_other_memory(calls: list[tuple[int, int]]) -> None:
    q, k, v = qkv(200, 200, heads=6, kv_heads=2)
    mask = window(200, 400)[:, :200]
    for given in ((q, k, v), [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]):
        y = OP(*given, mask, enable_gqa=True)
        assert y.stride() == PLAIN(*given, mask, enable_gqa=True).stride()
        torch.testing.assert_close(y.double(), exact(q, k, v, mask, enable_gqa=True), rtol=2e-6, atol=2e-6)
    assert calls
    one = q[:, :1].expand(-1, 6, -1, -1)
    assert torch.equal(OP(one, q, q, mask), OP(one.contiguous(), q, q, mask))


def test_what_is_left_to_torch(calls: list[tuple[int, int]]) -> None:
    """Few positions, no mask, masks that allow almost all, of one row, or without a key for a query."""
    q, k, v = qkv(200, 200)
    empty = window(200, 200)
    empty[77] = False
    for mask in (
        None,
        torch.ones(200, 200, dtype=torch.bool),
        torch.randn(200, 200),
        torch.rand(2, 1, 1, 200) < 0.5,
        empty,
        torch.zeros(200, 200).masked_fill(~empty, INF),
        torch.zeros(200, 200).masked_fill(~empty, torch.finfo(torch.float32).min),
    ):
        found, wanted = OP(q, k, v, mask), PLAIN(q, k, v, mask)
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert torch.equal(found.isnan(), wanted.isnan())
    mask = window(200, 200)
    for given in ((q[:1], k, v), (q[:, :1], k, v), (q, k[:1], v[:1]), (q, k[:, :1], v)):  # torch repeats some
        torch.testing.assert_close(OP(*given, mask), PLAIN(*given, mask))
    short = qkv(100, 100)
    assert torch.equal(OP(*short, window(100, 100)), PLAIN(*short, window(100, 100)))
    assert not calls


def test_nan_in_a_mask_is_not_skipped(calls: list[tuple[int, int]]) -> None:
    mask = torch.zeros(200, 200).masked_fill(~window(200, 200), INF)
    mask[5, 190] = float("nan")
    q, k, v = qkv(200, 200)
    found, wanted = OP(q, k, v, mask), PLAIN(q, k, v, mask)
    assert torch.equal(found.isnan(), wanted.isnan()) and wanted.isnan().any() and calls


def test_small_calls_start_no_blocks() -> None:
    """Where blocks would take longer to start than they save."""
    assert mask_blocks(causal(128, 128), *qkv(128, 128, heads=1)[:2]) is None
    large = torch.empty(8, 4, 512, 64)
    found = mask_blocks(window(512, 512), large, large)
    assert found is not None and len(found) == 8


def test_wrong_operands_are_refused() -> None:
    q, k, v = qkv(200, 200)
    with pytest.raises(OperandError, match="differ in length"):
        OP(q, k, v[:, :, :100], causal(200, 200))
    with pytest.raises(OperandError, match="bool is needed"):
        OP(q, k, v, causal(200, 200).long())
    with pytest.raises(RuntimeError):
        OP(q, k, v, causal(200, 300))


def test_in_aten_it_is_torchs_op() -> None:
    node = Node("y", masked.OP, (Ref("q"), Ref("q"), Ref("q"), None, 0.0, True), {"scale": 0.5})
    slots = (Slot("q", "q", "stacked", "float32[2,3,4,8]"),)
    program = decompose(Program((), slots, (node,), (Output(Ref("y"), "stacked"),), 2))
    assert [(n.op, n.args, n.kwargs) for n in program.nodes] == [(masked.PLAIN, node.args, node.kwargs)]


def test_its_cost_is_known() -> None:
    given = {n: torch.empty(2, 3, 200, 8, device="meta") for n in ("query", "key", "value")}
    own, plain = (cost(op, (), given, given["query"]) for op in (masked.OP, masked.PLAIN))
    assert own == plain and own.work > 6 * 200 * 200
