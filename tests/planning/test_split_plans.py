"""Tests which batches split factored weights into a base and thin factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from kernel_profiles import scaled
from small import all_kinds, node, program

from widepack.ir.kinds import kinds
from widepack.kernel_times.profile import Profile
from widepack.planning.heuristics import plans
from widepack.planning.plan import REQUESTED, Plan
from widepack.planning.request import StrategyRequest
from widepack.planning.split_plans import LARGE, PLACE, ROWS, row_limit
from widepack.simplify.factored_weights import FactorNames, with_factors
from widepack_artifacts.program import Kind, Program, Ref


def mlp(width: int = 32, tokens: str = "", layers: int = 2, weights: int = 2) -> Program:
    """Returns linear layers with relus between them. weights: how many of them are factored."""
    shape = f"float32[B,{tokens}{width}]"
    nodes, last = [], "x"
    for i in range(layers):
        nodes.append(node(f"l{i}", "linear", Ref(last), Ref(f"w{i}"), out=shape))
        nodes.append(node(f"r{i}", "relu", Ref(f"l{i}"), out=shape))
        last = f"r{i}"
    net = program({f"w{i}": f"float32[{width},{width}]" for i in range(layers)}, {"x": shape}, nodes, [last])
    return factored(net, *(f"w{i}" for i in range(weights)))


def factored(net: Program, *sources: str, rank: int = 2) -> Program:
    parts = {s: FactorNames(f"{s}.base", f"{s}.left", f"{s}.right", rank, "float32") for s in sources}
    return with_factors(net, parts)


def slots_of(net: Program, x: Kind = "stacked") -> dict[str, Kind]:
    own: dict[str, Kind] = {s.name: "stacked" for s in net.weights if not s.source.endswith(".base")}
    return {**all_kinds(net), **own, **{s.name: x for s in net.inputs}}


def plans_of(
    net: Program,
    requested: str | list[str] = "auto",
    device: str = "cpu",
    members: int = 8,
    batch: str = "B",
    sizes: Mapping[str, int] | None = None,
    x: Kind = "stacked",
) -> list[Plan]:
    return plans(
        net,
        slots_of(net, x),
        members,
        sizes or {"B": 4, "T": 6},
        batch,
        device,
        "each",
        StrategyRequest.parse(requested),
    )


def split(plan: Plan) -> set[str]:
    return {n for n, c in plan.choices.items() if c.strategy == "split"}


def test_batches_of_few_rows_split_and_larger_ones_run_over_merged_weights() -> None:
    merged = plans_of(mlp(weights=0))
    small, *rest = plans_of(mlp())
    assert small.batch == (1, ROWS) and split(small) == {"l0", "l1"} and not small.looped()
    assert all(r.strategy == "wide" for r in small.regions)
    assert not any(split(p) for p in rest)
    assert rest[0].batch[0] == ROWS + 1 and rest[-1].batch[1] is None
    later = [p for p in merged if p.batch[1] is None or p.batch[1] > ROWS]
    assert [p.batch[1] for p in rest] == [p.batch[1] for p in later]
    assert [bool(p.looped()) for p in rest] == [bool(p.looped()) for p in later]


def test_a_small_batch_that_would_loop_runs_wide(times: Callable[[Profile], None]) -> None:
    times(scaled("batched|turned|packed|streamed|member", 1e3))
    merged = plans_of(mlp(weights=0))
    assert all(p.looped() for p in merged)
    small, large = plans_of(mlp())
    assert small.batch == (1, ROWS) and split(small) == {"l0", "l1"} and not small.looped()
    assert large.batch == (ROWS + 1, None) and large.looped() >= {"l0", "l1"} and not split(large)


def test_every_batch_has_one_plan() -> None:
    for net in (mlp(), mlp(tokens="T,"), mlp(tokens="16,"), mlp(512), mlp(weights=1)):
        found = plans_of(net)
        assert found[0].batch[0] == 1 and found[-1].batch[1] is None
        assert [p.batch[0] for p in found[1:]] == [
            p.batch[1] + 1 for p in found[:-1] if p.batch[1] is not None
        ]


@pytest.mark.parametrize(
    ("tokens", "most"), [("T,", ROWS // 6), ("16,", ROWS // 16), ("64,", ROWS // 64), (f"{ROWS},", 1)]
)
def test_rows_are_counted_over_all_dims_but_the_last(tokens: str, most: int) -> None:
    assert plans_of(mlp(tokens=tokens))[0].batch == (1, most)


@pytest.mark.parametrize(("rank", "most"), [(1, ROWS), (2, ROWS), (4, ROWS // 2**LARGE)])
def test_large_factors_count_as_more_rows(rank: int, most: int) -> None:
    """Up to an eighth of a weight's numbers the factors take no time: 2 * 64 of 1024."""
    net = mlp(layers=1, weights=0)
    assert plans_of(factored(net, "w0", rank=rank))[0].batch == (1, most)


def test_factors_as_large_as_the_weight_are_merged_at_every_batch() -> None:
    net = mlp(layers=1, weights=0)
    assert not any(split(p) for p in plans_of(factored(net, "w0", rank=16)))


def test_no_batch_splits_where_one_sample_has_too_many_rows() -> None:
    assert not any(split(p) for p in plans_of(mlp(tokens=f"{ROWS + 1},")))


@pytest.mark.parametrize(("tokens", "splits"), [("", True), (f"{ROWS + 1},", False)])
def test_without_a_batch_the_sizes_of_the_example_decide(tokens: str, splits: bool) -> None:
    found = plans_of(mlp(tokens=tokens), batch="")
    assert bool(split(found[0])) is splits
    if splits:
        assert [p.batch for p in found] == [(1, None)]


def test_layers_count_as_often_as_they_have_weights() -> None:
    """A large layer over the batch alone outweighs a small one over 600 places."""
    nodes = [
        node("a", "linear", Ref("x"), Ref("v"), out="float32[B,600,32]"),
        node("p", "select.int", Ref("a"), 1, 0, out="float32[B,32]"),
        node("y", "linear", Ref("p"), Ref("w"), out="float32[B,4000]"),
    ]
    net = program(
        {"v": "float32[32,32]", "w": "float32[4000,32]"}, {"x": "float32[B,600,32]"}, nodes, ["y", "a"]
    )
    mean = (1024 * 600 + 128000) / 129024  # rows of a sample
    most = plans_of(factored(net, "v", "w"))[0].batch[1]
    assert most == int(ROWS / mean)


def test_places_of_an_image_are_the_rows_of_a_convolution() -> None:
    conv = node("c", "conv2d", Ref("x"), Ref("w"), None, [1, 1], [1, 1], [1, 1], 1, out="float32[B,32,4,3]")
    net = program({"w": "float32[32,16,3,3]"}, {"x": "float32[B,16,4,3]"}, [conv], ["c"])
    small = plans_of(factored(net, "w"))[0]
    assert small.batch == (1, ROWS // PLACE // 12) and split(small) == {"c"}


def test_layers_without_a_split_form_do_not_count() -> None:
    nodes = [
        node("g", "conv1d", Ref("x"), Ref("w"), None, [1], [1], [1], 2, out="float32[B,4,5]"),
        node("t", "conv_transpose1d", Ref("x"), Ref("f"), out="float32[B,4,7]"),
        node("m", "addmm", Ref("b"), Ref("z"), Ref("v"), out="float32[B,4]", beta=2),
    ]
    net = program(
        {"w": "float32[4,2,3]", "f": "float32[4,4,3]", "v": "float32[4,4]", "b": "float32[4]"},
        {"x": "float32[B,4,5]", "z": "float32[B,4]"},
        nodes,
        ["g", "t", "m"],
    )
    found = plans_of(factored(net, "w", "f", "v"))
    assert not any(split(p) for p in found)
    made = factored(net, "w", "f", "v")
    assert row_limit(made, kinds(made, slots_of(made)), {"B": 4}, "B") == 0


def test_tables_alone_are_split_at_every_batch() -> None:
    nodes = [
        node("e", "embedding", Ref("w"), Ref("x"), out="float32[B,8]"),
        node("y", "relu", Ref("e"), out="float32[B,8]"),
    ]
    net = factored(program({"w": "float32[9,8]"}, {"x": "int64[B]"}, nodes, ["y"]), "w")
    (only,) = plans_of(net)
    assert split(only) == {"e"} and only.batch == (1, None)


def test_requests_decide_for_every_batch() -> None:
    (only,) = plans_of(mlp(), ["split"])
    assert only.batch == (1, None) and split(only) == {"l0", "l1"} and not only.looped()
    assert all(only.choices[n].requested for n in ("l0", "l1"))
    assert [r.because for r in only.regions][-1] == REQUESTED
    (wide,) = plans_of(mlp(), "wide")
    assert not split(wide) and wide.batch == (1, None)
    (both,) = plans_of(mlp(), ["wide", "split"])
    assert split(both) == {"l0", "l1"}
    (loop,) = plans_of(mlp(), "loop")
    assert loop.looped() and not split(loop)
    first, *_ = plans_of(mlp(weights=1), ["turned"])
    assert first.choices["l0"].strategy == first.choices["l1"].strategy == "turned"


def test_a_request_of_split_changes_no_layer_with_plain_weights() -> None:
    plain = mlp(weights=0)
    assert [p.to_json() for p in plans_of(plain, ["split"])] == [p.to_json() for p in plans_of(plain)]
    (half,) = plans_of(mlp(weights=1), ["split"])
    assert split(half) == {"l0"}


def test_a_gpu_splits_at_every_batch() -> None:
    (only,) = plans_of(mlp(), device="cuda")
    assert only.batch == (1, None) and split(only) == {"l0", "l1"}
