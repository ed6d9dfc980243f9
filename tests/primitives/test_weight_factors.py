"""Tests layers over weights that are a base of all members plus thin factors, against the members in float64.

The oracle (test_oracle.py) runs `split` over factors that give a weight exactly, with a base of zeros. Here
the base and the factors are random, of several ranks and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from widepack import primitives as primitives  # fills the registry
from widepack.ir import ops
from widepack.ir.ops import full_name
from widepack.ir.values import Shared, Stacked, Value, WeightFactors
from widepack.kernels.checks import OperandError
from widepack.kernels.decompose import decompose
from widepack.kernels.library import FUNCTIONS
from widepack.registry.registry import REGISTRY
from widepack.registry.writer import EagerWriter
from widepack.runtime.executable import Executable
from widepack.runtime.op_costs import cost, rate
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

ULPS = 16
WEIGHT = "widepack.factored_weight.default"
LINEAR = "widepack.delta_linear.default"
CPU = torch.device("cpu")


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(kind: str, seed: int, members: int, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    if kind == "shared":
        return Shared(Value(None, drawn(seed, *shape, dtype=dtype)))
    return Stacked(Value(None, drawn(seed, members, *shape, dtype=dtype)))


def member(x: Any, i: int) -> Any:
    """Returns member i's value in float64."""
    if not isinstance(x, (Shared, Stacked)):
        return x
    value = x.value.fake if isinstance(x, Shared) else x.value.fake[i]
    return value.double() if value.is_floating_point() else value


def factored(
    members: int, shape: Sequence[int], rank: int, dtype: torch.dtype, thin: torch.dtype, scaled: str = ""
) -> tuple[Stacked, Callable[[int], Tensor]]:
    """Returns a merged weight with its factors, and the weight of a member in float64, not rounded.

    scaled: what has a scale: "outputs", the rows of the matrix; "inputs", its columns; or nothing.
    """
    inner = int(torch.Size(shape[1:]).numel())
    base = Shared(Value(None, drawn(1, *shape, dtype=dtype)))
    left = Stacked(Value(None, drawn(2, members, shape[0], rank, dtype=thin)))
    right = Stacked(Value(None, drawn(3, members, rank, inner, dtype=thin)))
    scales = []
    if scaled:
        size = (shape[0], 1) if scaled == "outputs" else (1, inner)
        scales = [Stacked(Value(None, drawn(4, members, *size, dtype=thin)))]
    weight = REGISTRY[WEIGHT].strategies["merged"].rule(EagerWriter(members), base, left, right, *scales)

    def exact(i: int) -> Tensor:
        whole: Tensor = member(base, i).flatten(1) + member(left, i) @ member(right, i)
        return (whole * member(scales[0], i) if scales else whole).reshape(shape)

    return weight, exact


def compare(op: str, members: int, args: list[Any], at: int, exact: Callable[[int], Tensor]) -> None:
    """Runs `split` and compares it with each member. at: the index of the weight."""
    name = full_name(op)
    w = EagerWriter(members)
    w.op = name
    split = REGISTRY[name].strategies["split"]
    assert split.when(w, *args)
    got = split.rule(w, *args)
    dtype = args[at].value.dtype
    assert isinstance(got, Stacked) and got.value.fake.shape[0] == members and got.value.dtype == dtype
    for i in range(members):
        own = [exact(i) if k == at else member(a, i) for k, a in enumerate(args)]
        want = ops.resolve(name)(*own)
        bound = ULPS * torch.finfo(dtype).eps * float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got.value.fake[i].double(), want, rtol=0, atol=bound)


DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]
SCALES = ["outputs", "inputs"]
W = object()
"""Stands for the weight among the arguments of a call."""
Calls = Iterator[tuple[str, list[Any]]]
BATCHES: list[tuple[int, ...]] = [(), (5,), (2, 5), (2, 3, 5)]
Wide = Callable[..., Any]


def linear(x: Wide, b: Wide) -> Calls:
    for batch in BATCHES:
        yield "linear", [x(*batch, 10), W, *b(6)]
    for width in ((), (1,), (5, 6)):  # biases that broadcast
        yield "linear", [x(5, 10), W, *b(*width)]


def products(x: Wide, b: Wide) -> Calls:
    yield "mm", [x(5, 10), W]
    for batch in BATCHES:
        yield "matmul", [x(*batch, 10), W]
    for width in ((6,), (5, 6), (5, 1), ()):
        if bias := b(*width):
            yield "addmm", [*bias, x(5, 10), W]


def convolutions(x: Wide, b: Wide, spatial: int) -> Calls:
    for batch in BATCHES[:2]:
        image = x(*batch, 4, *(7, 6, 6)[:spatial])
        (bias,) = b(6) or [None]
        for stride, padding, dilation in ((1, 0, 1), (2, 1, 1), (1, 1, 2)):
            rest = [[stride] * spatial, [padding] * spatial, [dilation] * spatial]
            yield f"conv{spatial}d", [image, W, bias, *rest, 1]
        yield f"conv{spatial}d.padding", [image, W, bias, [1] * spatial, "same"]


LAYERS: dict[str, tuple[tuple[int, ...], Callable[[Wide, Wide], Calls]]] = {
    "linear": ((6, 10), linear),
    "products": ((10, 6), products),
    "conv1d": ((6, 4, 3), partial(convolutions, spatial=1)),
    "conv2d": ((6, 4, 3, 2), partial(convolutions, spatial=2)),
    "conv3d": ((6, 4, 3, 2, 2), partial(convolutions, spatial=3)),
}
"""The shape of a weight, and the calls over it, of inputs and biases that two functions draw."""


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("kind", ["shared", "stacked"])
@pytest.mark.parametrize(("dtype", "thin"), DTYPES)
@pytest.mark.parametrize("bias", [None, "shared", "stacked"])
@pytest.mark.parametrize(
    ("layer", "scaled"),
    [(k, s) for k in LAYERS for s in ("", *SCALES) if s != "inputs" or not k.startswith("conv")],
)
def test_split_layers_equal_the_members(
    layer: str, scaled: str, bias: str | None, dtype: torch.dtype, thin: torch.dtype, kind: str, members: int
) -> None:
    shape, calls = LAYERS[layer]

    def x(*sizes: int) -> Any:
        return wide(kind, 7, members, *sizes, dtype=dtype)

    def b(*sizes: int) -> list[Any]:
        return [] if bias is None else [wide(bias, 8, members, *sizes, dtype=dtype)]

    for rank in (1, 8):
        weight, exact = factored(members, shape, rank, dtype, thin, scaled)
        for op, args in calls(x, b):
            at = args.index(W)
            compare(op, members, [weight if a is W else a for a in args], at, exact)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("kind", ["shared", "stacked"])
@pytest.mark.parametrize(("dtype", "thin"), DTYPES)
@pytest.mark.parametrize("scaled", ["", *SCALES])
@pytest.mark.parametrize("batch", BATCHES)
def test_split_tables_equal_the_members(
    batch: tuple[int, ...], scaled: str, dtype: torch.dtype, thin: torch.dtype, kind: str, members: int
) -> None:
    weight, exact = factored(members, (9, 6), 3, dtype, thin, scaled)
    shape = (members, *batch) if kind == "stacked" else batch
    ids = Value(None, torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(5)))
    value = Stacked(ids) if kind == "stacked" else Shared(ids)
    compare("embedding", members, [weight, value], 0, exact)
    if batch:
        compare("embedding", members, [weight, value, 2], 0, exact)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize(("dtype", "thin"), DTYPES)
@pytest.mark.parametrize("scaled", ["", *SCALES])
@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("shape", [(6, 10), (6, 4, 3, 2)])
def test_a_merged_weight_is_rounded_once_and_keeps_its_factors(
    shape: tuple[int, ...], rank: int, scaled: str, dtype: torch.dtype, thin: torch.dtype, members: int
) -> None:
    weight, exact = factored(members, shape, rank, dtype, thin, scaled)
    found = weight.factors
    assert found is not None and weight.value.dtype == dtype and (found.scale is not None) == bool(scaled)
    for i in range(members):
        want = exact(i)
        # float32 sums of r + 1 terms, then half an ulp of the base's dtype
        bound = 4e-6 * float(want.abs().max()) + 0.51 * torch.finfo(dtype).eps * want.abs()
        parts = [v.value.fake[i] for v in (found.left, found.right, found.scale) if v is not None]
        alone = FUNCTIONS[WEIGHT](found.base.value.fake, *parts)
        assert alone.dtype == dtype
        for y in (weight.value.fake[i], alone):
            assert bool(((y.double() - want).abs() <= bound).all())


def test_split_applies_only_where_the_whole_weight_is_factored() -> None:
    w = EagerWriter(3)
    weight, _ = factored(3, (4, 4), 2, torch.float32, torch.float32)
    filters, _ = factored(3, (4, 2, 3, 3), 2, torch.float32, torch.float32)
    plain, x = Stacked(weight.value), wide("stacked", 7, 3, 5, 4)
    image, b = wide("stacked", 7, 3, 5, 4, 6, 6), wide("shared", 8, 3, 4)

    def fits(op: str, *args: Any, **kwargs: Any) -> bool:
        w.op = full_name(op)
        return bool(REGISTRY[w.op].strategies["split"].when(w, *args, **kwargs))

    assert fits("linear", x, weight) and not fits("linear", x, plain)
    assert not fits("mm", weight, plain) and fits("mm", plain, weight)
    assert fits("addmm", b, x, weight)
    assert not fits("addmm", b, x, weight, beta=0.5) and not fits("addmm", b, x, weight, alpha=2)
    assert not fits("conv2d", image, filters, None, [1, 1], [0, 0], [1, 1], 2)
    assert not fits("embedding", plain, x)
    first = {op: next(iter(p.strategies)) for op, p in REGISTRY.items() if "split" in p.strategies}
    assert "split" not in first.values(), "only a plan chooses it"
    assert all(list(REGISTRY[op].strategies)[-1] == "split" for op in first)


OPERANDS: dict[str, tuple[int, ...]] = {"x": (3, 5, 4), "base": (6, 4), "left": (3, 6, 2), "right": (3, 2, 4)}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("x", (2, 5, 4)),
        ("x", (3, 5, 3)),
        ("x", (3, 4)),
        ("base", (5, 4)),
        ("base", (6, 5)),
        ("base", (24,)),
        ("left", (3, 6, 1)),
        ("left", (2, 6, 2)),
        ("right", (3, 2, 5)),
        ("right", (1, 2, 4)),
        ("bias", (2, 6)),
        ("bias", (3, 5)),
        ("bias", (6,)),
    ],
)
def test_delta_linear_refuses_operands_of_other_sizes(name: str, shape: tuple[int, ...]) -> None:
    given = {n: torch.zeros(s) for n, s in OPERANDS.items()} | {"bias": torch.zeros(3, 6)}
    assert FUNCTIONS[LINEAR](*given.values()).shape == (3, 5, 6)
    for bad in (torch.zeros(shape), given[name].double()):
        with pytest.raises(OperandError):
            FUNCTIONS[LINEAR](*{**given, name: bad}.values())


@pytest.mark.parametrize(
    "shapes",
    [
        ((6, 4), (5, 2), (2, 4)),
        ((6, 4), (6, 2), (3, 4)),
        ((6, 4), (6, 2), (2, 5)),
        ((6, 4), (6,), (2, 4)),
        ((), (1, 1), (1, 1)),
    ],
)
def test_factored_weight_refuses_operands_of_other_sizes(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(OperandError):
        FUNCTIONS[WEIGHT](*(torch.zeros(s) for s in shapes))
    with pytest.raises(OperandError):
        FUNCTIONS[WEIGHT](torch.zeros(6, 4), torch.zeros(6, 2), torch.zeros(2, 4).double())
    for scale in (torch.zeros(5, 1), torch.zeros(1, 6), torch.zeros(6), torch.zeros(6, 1).double()):
        with pytest.raises(OperandError):
            FUNCTIONS[WEIGHT](torch.zeros(6, 4), torch.zeros(6, 2), torch.zeros(2, 4), scale)
    with pytest.raises(OperandError):
        FUNCTIONS[WEIGHT](torch.zeros(6, 4).long(), torch.zeros(6, 2), torch.zeros(2, 4))


@pytest.mark.parametrize("kind", ["shared", "stacked"])
@pytest.mark.parametrize("bias", [0, 1, 3])
@pytest.mark.parametrize(("rows", "inputs", "rank"), [(5, 4, 2), (0, 4, 2), (1, 4, 96), (5, 0, 2), (5, 4, 0)])
def test_delta_linear_equals_its_decomposition(
    kind: str, bias: int, rows: int, inputs: int, rank: int
) -> None:
    shapes = [(1 if kind == "shared" else 3, rows, inputs), (6, inputs), (3, 6, rank), (3, rank, inputs)]
    if bias:
        shapes.append((bias, 6))
    given = [drawn(i, *s) for i, s in enumerate(shapes)]
    slots = tuple(Slot(f"v{i}", f"v{i}", "shared", f"float32{list(s)}") for i, s in enumerate(shapes))
    args = tuple(Ref(s.name) for s in slots) if bias else (*(Ref(s.name) for s in slots), None)
    program = Program((), slots, (Node("y", LINEAR, args),), (Output(Ref("y"), "stacked"),), 3)
    program.check()
    plainly = decompose(program)
    plainly.check()
    assert plainly.nodes[-1].name == "y" and not any(n.op.startswith("widepack.") for n in plainly.nodes)
    (own,), (aten,) = (Executable(p, {}, CPU).run(*given) for p in (program, plainly))
    x, base, left, right, *rest = (g.double() for g in given)
    want = x @ (base + left @ right).transpose(1, 2) + (rest[0].unsqueeze(1) if rest else 0)
    assert own.shape == want.shape
    bound = ULPS * torch.finfo(torch.float32).eps * float(want.abs().max()) if want.numel() else 0.0
    for y in (own, aten):
        torch.testing.assert_close(y.double(), want, rtol=0, atol=bound)


@pytest.mark.parametrize(("dtype", "thin"), [*DTYPES, (torch.float64, torch.float64)])
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3, 2)])
@pytest.mark.parametrize("scaled", ["", *SCALES])
def test_factored_weight_equals_its_decomposition(
    dtype: torch.dtype, thin: torch.dtype, shape: tuple[int, ...], scaled: str
) -> None:
    inner = int(torch.Size(shape[1:]).numel())
    shapes = [shape, (6, 2), (2, inner), *([(6, 1) if scaled == "outputs" else (1, inner)] if scaled else [])]
    dtypes = [dtype, thin, thin, thin]
    types = [f"{str(d)[6:]}{list(s)}".replace(" ", "") for d, s in zip(dtypes, shapes)]
    slots = tuple(Slot(f"v{i}", f"v{i}", "shared", t) for i, t in enumerate(types))
    node = Node("y", WEIGHT, tuple(Ref(s.name) for s in slots), {}, types[0])
    program = Program((), slots, (node,), (Output(Ref("y"), "shared"),), 3)
    given = [drawn(i, *s, dtype=d) for i, (s, d) in enumerate(zip(shapes, dtypes))]
    (own,), (aten,) = (Executable(p, {}, CPU).run(*given) for p in (program, decompose(program)))
    assert own.dtype == aten.dtype == dtype
    assert torch.equal(own, aten)


def test_a_factored_value_has_low_rank_parts() -> None:
    weight, _ = factored(2, (4, 4), 2, torch.float32, torch.float32)
    assert isinstance(weight.factors, WeightFactors) and Stacked(weight.value).factors is None


@pytest.mark.parametrize("of_all", [1, 3])
def test_costs_count_the_products_with_base_and_factors(of_all: int) -> None:
    shapes = [(of_all, 50, 40), (60, 40), (3, 60, 8), (3, 8, 40)]
    x, base, left, right = (torch.zeros(s, device="meta") for s in shapes)
    out = torch.zeros(3, 50, 60, device="meta")
    pairs = 3 * 50 * (60 * 40 + 8 * (60 + 40))
    found = cost(LINEAR, [x, base, left, right, None], {}, out)
    assert found.work >= pairs * rate(x) and found.room >= 4 * 3 * 50 * 8
    weight = cost(WEIGHT, [base, left[0], right[0]], {}, base)
    assert weight.work >= 60 * 40 * 8 * rate(x) and weight.room >= 4 * 60 * 40
