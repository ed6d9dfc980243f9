"""Tests calls that run by graphs, on the CPU with a stand-in for CUDA graphs: answers, padding, threads,
swaps.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from graph_cases import (
    MEMBERS,
    SIZES,
    artifact,
    check_entries,
    check_equal,
    check_patterns,
    check_swaps,
    check_swaps_during_calls,
    check_threads,
    drawn,
    drawn_ids,
    exact,
    of_member,
)
from graph_stand_in import StandInRecorder, use_stand_in
from inside import artifact_of
from torch import Tensor

import widepack
from fleet.small_fleets import INPUTS, Net, write_fleet
from widepack import UsageError, load
from widepack.inference.graph_pool import GraphUse
from widepack.inference.model import WideModel
from widepack.inference.routing.row_groups import padding_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StandInRecorder]:
    """Returns the recorders of the loads of a test."""
    return use_stand_in(monkeypatch)


def graphed(folder: Path, case: str = "two", **options: object) -> WideModel:
    return load(artifact(folder, case), graph=True, **options)  # type: ignore[call-overload,no-any-return]


def use_of(ens: WideModel, pattern: str = "shared") -> GraphUse:
    """Returns the use of the smallest batch class, which the batches of these tests are in."""
    return ens.graph_use(pattern)[0]


# ---------------------------------------------------------------- answers


def test_every_pattern_and_batch_has_the_answers_of_members_alone(
    folder: Path, made: list[StandInRecorder]
) -> None:
    ens = graphed(folder, strategies="wide")  # one batch class for every pattern
    check_patterns(ens, "cpu")
    captured = (1, 2, 4, 8, 16, 32, 64)
    assert use_of(ens).captured == use_of(ens, "each").captured == captured
    assert made[0].captures == 3 * len(captured)
    assert len(made[0].memories) == 1, "all graphs of a model share one memory"
    with_graph = sum(rows <= 64 for rows in SIZES)
    assert made[0].memories[0].blocks == 3 * with_graph


def test_two_entries_share_one_memory(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder)
    check_entries(ens, "cpu")
    assert [len(r.memories) for r in made] == [1]
    assert ens.entry("encode").graph_use()[0].captured == (4, 8)


def test_a_row_of_nan_changes_no_bit_of_another_row_or_padding(
    folder: Path, made: list[StandInRecorder]
) -> None:
    ens = graphed(folder)
    x, shift = drawn(0, 5, 6), drawn(1, 8)
    clean = ens(x, shift)["logits"]
    for row in range(5):
        given = x.clone()
        given[row] = float("nan")
        found = ens(given, shift)["logits"]
        others = [b for b in range(5) if b != row]
        assert torch.equal(found[:, others], clean[:, others])
        assert found[:, row].isnan().all()
    assert made[0].captures == 1


def test_padding_repeats_a_row_of_the_call(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder, "from_one")
    ids = drawn_ids(0, 3, 2) + 1
    check_equal(ens(ids)[1], exact("from_one", ens, 1, ids))
    assert made[0].captures == 1


def test_answers_may_be_written_into_and_inputs_do_not_change(
    folder: Path, made: list[StandInRecorder]
) -> None:
    ens = graphed(folder)
    x, shift = drawn(0, 4, 6), drawn(1, 8)
    before = x.clone()
    first = ens(x, shift)
    kept = {k: v.clone() for k, v in first.items()}
    with torch.inference_mode():
        for value in first.values():
            value.fill_(7)
    again = ens(x, shift)
    assert all(torch.equal(again[k], kept[k]) for k in kept)
    assert torch.equal(x, before)


def test_inputs_of_other_strides_are_copied_by_their_values(
    folder: Path, made: list[StandInRecorder]
) -> None:
    ens = graphed(folder)
    shift = drawn(1, 8)
    for x in (drawn(0, 6, 5).T, drawn(0, 10, 6)[::2], drawn(0, 1, 6).expand(5, 6), drawn(0, 5, 12)[:, ::2]):
        answer = ens(x, shift)
        for i in range(MEMBERS):
            check_equal(of_member(answer, i), exact("two", ens, i, x, shift))


def test_routed_rows_and_reductions_are_right(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder)
    x, shift, ids = drawn(0, 7, 6), drawn(1, 8), [0, 2, 1, 1, 0, 2, 2]
    answer = ens.route(x, shift, member=ids)["logits"]
    alone = [exact("two", ens, i, x, shift)["logits"] for i in range(MEMBERS)]
    for row, i in enumerate(ids):
        check_equal(answer[row], alone[i][row])
    check_equal(ens.mean(x, shift, output="logits"), torch.stack(alone).mean(0))


def test_routed_rows_that_run_padded_run_by_graphs(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder, "conv")
    x, ids = drawn(0, 7, 3, 8, 8), [0, 2, 1, 1, 0, 2, 1]
    before = padding_rows()
    answer = ens.route(x, member=ids)
    assert padding_rows() - before == 2, "each member has three rows"
    for row, i in enumerate(ids):
        check_equal(answer[row], exact("conv", ens, i, x)[row])
    assert use_of(ens, "each").captured == (4,)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("memory", ["auto", "least", "most"])
def test_fine_tunes_of_one_base(
    tmp_path_factory: pytest.TempPathFactory, made: list[StandInRecorder], memory: str
) -> None:
    folder = tmp_path_factory.mktemp("fleet")
    fleet = write_fleet(folder)
    path = folder / "fleet.wide"
    widepack.build(fleet.adapters, path, base=fleet.base, model=Net, inputs=INPUTS, budget=0, pt2=False)
    ens = load(path, graph=True, memory=memory)
    for rows in (3, 4, 4000, 2):
        x = drawn(rows, rows, 48)
        answer = ens(x)
        for i in range(len(ens)):
            alone = Net().double()
            alone.load_state_dict({k: v.double() for k, v in ens.state_dict(i).items()})
            with torch.no_grad():
                check_equal(answer[i], alone(x.double()))
    assert {size for use in ens.graph_use() for size in use.captured} == {2, 4}
    assert len(made[0].memories) == 1


def test_members_and_parts_of_the_members(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder, members=[2, 0])
    x, shift = drawn(0, 3, 6), drawn(1, 8)
    answer = ens(x, shift)
    for i in range(2):
        check_equal(of_member(answer, i), exact("two", ens, i, x, shift))
        check_equal(ens.member(i)(x, shift), exact("two", ens, i, x, shift))
    assert use_of(ens).captured == (4,)


def test_a_model_over_several_devices(folder: Path, made: list[StandInRecorder]) -> None:
    path = artifact(folder, "two")
    ens = load(path, device=["cpu", "cpu"], graph=True)
    x, shift = drawn(0, 3, 6), drawn(1, 8)
    answer = ens(x, shift)
    for i in range(MEMBERS):
        check_equal(of_member(answer, i), exact("two", ens, i, x, shift))  # type: ignore[arg-type]
    assert [r.captures for r in made] == [1, 1]
    assert ens.graph_use()[0].captured == (4,)


# ---------------------------------------------------------------- calls without a graph


def test_larger_batches_and_other_sizes_run_without_a_graph(
    folder: Path, made: list[StandInRecorder]
) -> None:
    ens = graphed(folder, "steps")
    example = ens.manifest.entries["forward"].dims["T"].example
    for rows, steps in ((65, example), (3, example + 1), (3, 1), (200, 2)):
        ids = drawn_ids(rows, rows, steps)
        answer = ens(ids)
        for i in range(MEMBERS):
            check_equal(answer[i], exact("steps", ens, i, ids))
    assert made[0].captures == 0
    assert use_of(ens).why_not_calls == (
        "B = 65, and the largest graph is for B = 64",
        f"T = {example + 1}, and graphs are for T = {example}",
        f"T = 1, and graphs are for T = {example}",
        f"T = 2, and graphs are for T = {example}",
    )
    ids = drawn_ids(0, 3, example)
    check_equal(ens(ids)[1], exact("steps", ens, 1, ids))
    assert made[0].captures == 1


def test_rows_that_are_mixed_are_not_padded(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder, "centered")
    for rows in (2, 3, 4, 5, 8):
        x = drawn(rows, rows, 4)
        answer = ens(x)
        for i in range(MEMBERS):
            check_equal(answer[i], exact("centered", ens, i, x))
    use = use_of(ens)
    assert use.captured == (2, 4, 8)
    assert "mean" in use.why_not_padded
    assert use.why_not_calls == ("B = 3 would be padded to 4", "B = 5 would be padded to 8")
    assert "other batches run without a graph: its rows are not independent" in str(use)


@pytest.mark.extended
def test_a_batch_of_one_size_needs_no_padding(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder, "fixed")
    for seed in range(3):
        x = drawn(seed, 4, 4)
        check_equal(ens(x)[2], exact("fixed", ens, 2, x))
    assert made[0].captures == 1
    assert str(use_of(ens)) == "shared, batch 1 to any: graphs for batch fixed; captured: 0"


def test_states_are_carried_from_call_to_call(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder, "carried")
    for rows in (4, 3):
        state = ens.state(B=rows)
        alone = [torch.zeros(rows, 3) for _ in range(MEMBERS)]
        for seed in range(3):
            x = drawn(seed, rows, 4)
            y, state = ens(x, state=state)
            for i in range(MEMBERS):
                truth = exact("carried", ens, i, x, alone[i])
                check_equal((y[i], state["h"][i]), truth)
                alone[i] = truth[1]
    assert use_of(ens).captured == (4,)
    assert use_of(ens).why_not_padded == "it has states"


@pytest.mark.parametrize(
    ("case", "reason"),
    [("bags", "embedding_bag.* checks values of its operands on the host"), ("dropping", "random numbers")],
)
def test_programs_that_no_graph_can_run(
    folder: Path, made: list[StandInRecorder], case: str, reason: str
) -> None:
    with pytest.warns(UserWarning, match=f"pattern shared runs without a CUDA graph: .*{reason}"):
        ens = graphed(folder, case)
    x = drawn_ids(0, 4, 5) if case == "bags" else drawn(0, 4, 4)
    answer = ens(x)
    if case == "bags":
        check_equal(answer[1], exact(case, ens, 1, x))
    else:
        assert not torch.equal(answer, ens(x))
    use = use_of(ens)
    assert made[0].captures == 0
    assert use.sizes == ()
    assert ": no graph: " in str(use)


def test_autocast_gradients_and_other_captures(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder)
    x, shift = drawn(0, 3, 6), drawn(1, 8)
    truth = exact("two", ens, 1, x, shift)
    with torch.autocast("cpu", torch.bfloat16):
        check_equal(of_member(ens(x, shift), 1), truth)
        check_equal(of_member(ens(x[:2], shift), 1)["logits"], truth["logits"][:2])
    with torch.inference_mode():
        check_equal(of_member(ens(x, shift), 1), truth)
    with torch.no_grad():
        check_equal(of_member(ens(torch.nn.Parameter(x), shift), 1), truth)
    with pytest.raises(widepack.InputError, match="requires grad"):
        ens(torch.nn.Parameter(x), shift)
    before = made[0].memories[0].blocks
    made[0].outside.capturing = True  # the caller captures a graph of which this call is a part
    check_equal(of_member(ens(x, shift), 1), truth)
    assert made[0].memories[0].blocks == before


def test_tensors_that_the_entry_refuses_are_refused_as_without_graphs(
    folder: Path, made: list[StandInRecorder]
) -> None:
    ens = graphed(folder)
    for x in (drawn(0, 3, 6).double(), drawn(0, 3, 5), drawn(0, 6)):
        with pytest.raises(widepack.InputError):
            ens(x, drawn(1, 8))
    steps = graphed(folder, "steps")
    example = steps.manifest.entries["forward"].dims["T"].example
    ids = drawn_ids(0, 4, example)
    steps(ids)
    wrong = ids.clone()
    wrong[1, 0] = 20
    for given in (wrong, wrong[:3]):
        with pytest.raises(widepack.InputError, match="20"):
            steps(given)
    check_equal(steps(ids)[0], exact("steps", steps, 0, ids))


# ---------------------------------------------------------------- threads, swaps, the end


def test_threads_that_call_at_once_get_their_own_answers(folder: Path, made: list[StandInRecorder]) -> None:
    check_threads(graphed(folder), "cpu")


def test_a_swap_changes_what_captured_graphs_answer(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder)
    check_swaps(ens, artifact(folder, "two").parent, "cpu")
    uses = [use for name in ens.entries for use in ens.entry(name).graph_use()]
    assert {4, 8, 16} <= set(use_of(ens).captured)
    assert made[0].captures == sum(len(use.captured) for use in uses), "no batch was captured twice"


def test_swaps_during_calls(folder: Path, made: list[StandInRecorder]) -> None:
    check_swaps_during_calls(graphed(folder), artifact(folder, "two").parent, "cpu")


def test_a_value_in_other_memory_is_captured_again(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder)
    x, shift = drawn(0, 4, 6), drawn(1, 8)
    before = ens(x, shift)["logits"]
    _, bound = ens.entry("forward").programs.bound()[0]
    run = bound.executable
    with artifact_of(ens).gate.shut():
        run.exchange({k: v * 2 for k, v in enumerate(run.given) if isinstance(v, Tensor)})
    after = ens(x, shift)["logits"]
    with torch.inference_mode():
        expected = run.run(x, shift)
    assert not torch.allclose(after, before)
    assert any(torch.equal(after, e) for e in expected)
    assert made[0].captures == 2


def test_a_closed_model_has_no_graphs(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder)
    kept = ens(drawn(0, 4, 6), drawn(1, 8))["logits"]
    truth = kept.clone()
    assert len(made[0].memories[0].graphs) == 1
    ens.close()
    assert len(made[0].memories[0].graphs) == 0
    assert torch.equal(kept, truth)
    with pytest.raises(UsageError, match="was closed"):
        ens(drawn(0, 4, 6), drawn(1, 8))
    with pytest.raises(UsageError, match="was closed"):
        ens.graph_use()


def test_a_copy_has_graphs_of_its_own(folder: Path, made: list[StandInRecorder]) -> None:
    ens = graphed(folder)
    x, shift = drawn(0, 4, 6), drawn(1, 8)
    other = copy.deepcopy(ens)
    assert torch.equal(ens(x, shift)["logits"], other(x, shift)["logits"])
    assert [r.captures for r in made] == [1, 1]
    assert made[0].memories[0] is not made[1].memories[0]
