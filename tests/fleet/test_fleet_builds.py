"""Tests artifacts of fine-tunes of one base: builds, loads, swaps and revisions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from loaded import save_members
from torch import nn

import widepack
from fleet.small_fleets import (
    INPUTS,
    SIZE,
    Net,
    SmallFleet,
    assert_right,
    assert_rows_right,
    build_of,
    equal_states,
    write_adapter,
    write_fleet,
)
from widepack.inference.programs import merged_weights
from widepack.inference.routing.gathered_rows import GatheredCall
from widepack.tuning.tune import measure_new
from widepack_cli.main import cli


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> SmallFleet:
    return write_fleet(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def of_adapters(fleet: SmallFleet) -> Path:
    out = fleet.base.parent / "adapters.wide"
    report = build_of(fleet.adapters, out, base=fleet.base, pt2=True)
    assert report.fleet is not None
    found = {row["weight"]: row for row in report.fleet["factored"]}
    assert set(found) == {"first.weight", "second.weight"}
    assert all(row["ranks"] == [2, 4, 4] and row["base"] == "given" for row in found.values())
    assert {row["weight"] for row in report.fleet["stacked"]} == {"head.weight", "head.bias"}
    return out


@pytest.fixture(scope="module")
def of_merged(fleet: SmallFleet) -> Path:
    out = fleet.base.parent / "merged.wide"
    report = build_of(fleet.merged, out, base=fleet.base, unmerge=True, pt2=True)
    assert report.fleet is not None
    assert {row["weight"]: row["ranks"] for row in report.fleet["factored"]} == {
        "first.weight": [2, 4, 4],
        "second.weight": [2, 4, 4],
    }
    return out


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("memory", ["auto", "least", "most"])
def test_answers_of_adapters_are_those_of_the_merged_models(
    fleet: SmallFleet, of_adapters: Path, memory: str
) -> None:
    ens = widepack.load(of_adapters, memory=memory)
    for rows in (1, 3, 400):
        assert_right(ens, fleet.states, rows)
    for i, state in enumerate(fleet.states):
        found = ens.state_dict(i)
        assert set(found) == set(state)
        for name, value in state.items():
            torch.testing.assert_close(found[name], value, rtol=2e-7, atol=3e-8)


def test_merged_checkpoints_come_back_bit_for_bit(fleet: SmallFleet, of_merged: Path) -> None:
    ens = widepack.load(of_merged)
    for i, state in enumerate(fleet.states):
        assert equal_states(ens.state_dict(i), state)
        x = torch.randn(5, SIZE)
        torch.testing.assert_close(ens.member(i)(x), ens(x)[i])
    assert_right(ens, fleet.states, 4)


def test_a_base_is_recovered_from_four_members(tmp_path: Path) -> None:
    fleet = write_fleet(tmp_path, (2, 3, 3, 2))
    out = tmp_path / "un.wide"
    report = build_of(fleet.merged, out, unmerge=True)
    assert report.fleet is not None
    assert {row["base"] for row in report.fleet["factored"]} == {"recovered"}
    ens = widepack.load(out)
    assert all(equal_states(ens.state_dict(i), s) for i, s in enumerate(fleet.states))
    recovered = ens.manifest.factored.weights[0]
    assert recovered.ranks == [2, 3, 3, 2]


def test_full_fine_tunes_stay_stacked(tmp_path: Path) -> None:
    out = tmp_path / "full.wide"
    report = build_of(save_members(Net, tmp_path, 3), out, unmerge=True)
    assert report.fleet is not None and report.fleet["factored"] == []
    assert all(row["why"] for row in report.fleet["stacked"])
    assert widepack.load(out).manifest.version <= (1, 3)


def test_a_fleet_takes_less_memory(of_adapters: Path, of_merged: Path, fleet: SmallFleet) -> None:
    manifest = widepack.load(of_adapters, warmup=False).manifest
    assert sum(w.bytes(3) for w in manifest.weights) < sum(w.bytes(3) for w in manifest.member_weights)
    assert manifest.factored.corrections == ""
    assert widepack.load(of_merged, warmup=False).manifest.factored.corrections.startswith("corrections-")


def test_least_memory_binds_no_merged_weights(of_adapters: Path) -> None:
    ens = widepack.load(of_adapters, memory="least")
    ens(torch.randn(4000, SIZE))
    assert all("split" in plan.strategies() for plan in ens.plans())
    merging = widepack.load(of_adapters)
    merging(torch.randn(4000, SIZE))
    assert any("split" not in plan.strategies() for plan in merging.plans())


def test_a_swap_takes_adapters_and_merged_checkpoints(of_merged: Path, fleet: SmallFleet) -> None:
    ens = widepack.load(of_merged)
    ens(torch.randn(4000, SIZE))  # binds merged weights too
    member = ens.member(1)
    held = ens.state_dict(1)
    assert_right(ens, fleet.states, 3)
    ens.swap(1, fleet.merged[2])
    assert equal_states(ens.state_dict(1), fleet.states[2])
    assert equal_states(held, fleet.states[2])  # views of the member, also after the swap
    for rows in (2, 4000):
        assert_right(ens, [fleet.states[i] for i in (0, 2, 2)], rows)
    x = torch.randn(3, SIZE)
    torch.testing.assert_close(member(x), ens(x)[1])
    ens.swap(1, fleet.adapters[0])
    for rows in (2, 4000):
        assert_right(ens, [fleet.states[i] for i in (0, 0, 2)], rows)
    ens.swap(1, fleet.merged[1])
    assert equal_states(ens.state_dict(1), fleet.states[1])
    assert_right(ens, fleet.states, 2)


def test_a_swap_refuses_what_does_not_fit(of_adapters: Path, fleet: SmallFleet, tmp_path: Path) -> None:
    ens = widepack.load(of_adapters)
    torch.manual_seed(5)
    full = {**fleet.states[0], "first.weight": torch.randn(SIZE, SIZE)}
    torch.save(full, tmp_path / "full.pt")
    with pytest.raises(widepack.MemberMismatch, match=r"first\.weight is no low-rank fine-tune"):
        ens.swap(0, tmp_path / "full.pt")
    write_adapter(tmp_path / "large", 6, 8, 9)
    with pytest.raises(widepack.MemberMismatch, match="rank 6 over the artifact's base, and .* have 4"):
        ens.swap(0, tmp_path / "large")
    write_adapter(tmp_path / "headless", 2, 8, 9, head=False)
    with pytest.raises(widepack.MemberMismatch, match=r"head\.(weight|bias)"):
        ens.swap(0, tmp_path / "headless")
    assert_right(ens, fleet.states, 2)


def test_append_update_and_drop(of_merged: Path, fleet: SmallFleet, tmp_path: Path) -> None:
    out = tmp_path / "more.wide"
    write_adapter(tmp_path / "large", 6, 8, 9)
    widepack.append(of_merged, [tmp_path / "large", fleet.merged[1]], out=out, names=["large", "again"])
    ens = widepack.load(out)
    assert [w.ranks for w in ens.manifest.factored.weights] == [[2, 4, 4, 6, 4]] * 2
    assert all(equal_states(ens.state_dict(i), s) for i, s in enumerate(fleet.states))
    assert equal_states(ens.state_dict("again"), fleet.states[1])
    large = ens.state_dict("large")
    widepack.update(out, {"again": fleet.adapters[0]})
    widepack.drop(out, ["m0"])
    ens = widepack.load(out)
    assert ens.members == ("m1", "m2", "large", "again")
    assert equal_states(ens.state_dict("m2"), fleet.states[2])
    assert equal_states(ens.state_dict("large"), large)
    for name, value in fleet.states[0].items():
        torch.testing.assert_close(ens.state_dict("again")[name], value, rtol=2e-7, atol=3e-8)
    assert_right(ens, [fleet.states[1], fleet.states[2], large, fleet.states[0]], 3)


def test_append_of_a_full_fine_tune_is_refused(of_merged: Path, fleet: SmallFleet, tmp_path: Path) -> None:
    torch.save({**fleet.states[0], "first.weight": torch.randn(SIZE, SIZE)}, tmp_path / "full.pt")
    before = (of_merged / "manifest.json").read_bytes()
    with pytest.raises(widepack.MemberMismatch, match="no low-rank fine-tune of the artifact's base"):
        widepack.append(of_merged, [tmp_path / "full.pt"])
    assert (of_merged / "manifest.json").read_bytes() == before


def test_rows_of_a_fleet_are_routed(of_adapters: Path, fleet: SmallFleet) -> None:
    ens = widepack.load(of_adapters)
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 2, 9, 40):
        ids = torch.randint(0, 3, (rows,), generator=generator).tolist()
        x = torch.randn(rows, SIZE, generator=generator)
        assert_rows_right(ens.route(x, member=ids), fleet.states, ids, x)


@pytest.mark.extended
def test_drawn_rows_run_together_over_the_factors(of_adapters: Path, fleet: SmallFleet) -> None:
    ens = widepack.load(of_adapters)
    router = ens.entry("forward").router
    generator = torch.Generator().manual_seed(2)
    exact = [Net().double() for _ in fleet.states]
    for net, state in zip(exact, fleet.states):
        net.load_state_dict(state)
    together = 0
    for _ in range(1000):
        rows = int(torch.randint(1, 20, (1,), generator=generator))
        ids = torch.randint(0, 3, (rows,), generator=generator).tolist()
        x = torch.randn(rows, SIZE, generator=generator)
        together += isinstance(router.prepared([x], ids).together, GatheredCall)
        answers = ens.route(x, member=ids)
        with torch.inference_mode():
            expected = torch.stack([exact[i](x[row].double()) for row, i in enumerate(ids)])
        torch.testing.assert_close(answers.double(), expected, rtol=1e-5, atol=1e-5)
    assert together > 800


def test_many_rows_of_many_members_run_in_parts(tmp_path: Path) -> None:
    fleet = write_fleet(tmp_path, [2] * 12)
    out = tmp_path / "many.wide"
    build_of(fleet.adapters, out, base=fleet.base)
    ens = widepack.load(out, memory="least")
    ids = [i % 12 for i in range(90)]
    x = torch.randn(90, SIZE)
    answers = ens.route(x, member=ids)
    assert_rows_right(answers, fleet.states, ids, x)
    ens.swap("a3", fleet.adapters[0])
    again = ens.route(x, member=ids)
    assert_rows_right(again[3:4], [fleet.states[0]], [0], x[3:4])
    assert torch.equal(again[4], answers[4])


@pytest.mark.extended
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("rows", [2, 4, 8])
def test_rows_of_distinct_members_in_any_order(tmp_path: Path, first: int, rows: int) -> None:
    fleet = write_fleet(tmp_path, [2] * 11)
    out = tmp_path / "many.wide"
    build_of(fleet.adapters, out, base=fleet.base)
    ens = widepack.load(out, memory="least")
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    ids = [first + int(k) for k in order]
    x = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(1))
    answers = ens.route(x, member=ids)
    assert_rows_right(answers, fleet.states, ids, x)
    with torch.inference_mode():
        answers.zero_()  # it is no view of a weight or an input
    assert torch.equal(ens.route(x, member=ids), ens.route(x.clone(), member=ids))
    ens.swap(first, fleet.adapters[10])
    again = ens.route(x, member=ids)
    at = ids.index(first)
    assert_rows_right(again[at : at + 1], [fleet.states[10]], [0], x[at : at + 1])


@pytest.mark.extended
def test_a_fleet_loads_in_a_fresh_process_without_peft(of_merged: Path, fleet: SmallFleet) -> None:
    code = (
        "import sys, torch, widepack\n"
        f"ens = widepack.load({str(of_merged)!r})\n"
        f"state = torch.load({str(fleet.merged[2])!r})\n"
        "assert all(torch.equal(ens.state_dict(2)[k], v) for k, v in state.items())\n"
        "assert 'peft' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_another_dtype(of_adapters: Path, fleet: SmallFleet) -> None:
    ens = widepack.load(of_adapters, dtype="float64")
    x = torch.randn(3, SIZE, dtype=torch.float64)
    for i, answer in enumerate(ens(x)):
        net = Net().double()
        net.load_state_dict(ens.state_dict(i))
        torch.testing.assert_close(answer, net(x).detach(), rtol=1e-7, atol=1e-7)


def test_some_members(of_adapters: Path, fleet: SmallFleet) -> None:
    ens = widepack.load(of_adapters, members=[2, 0])
    assert_right(ens, [fleet.states[2], fleet.states[0]], 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"adapters": True}, "give the base's folder or file with --base"),
        ({"adapters": True, "base": True, "unmerge": True}, "these are adapters"),
        ({"base": True}, "but no adapter; add --unmerge"),
        ({"adapters": True, "mixed": True, "base": True}, "is an adapter, and .* is none"),
        ({"adapters": True, "base": True, "share": "none"}, "a fleet shares its base"),
    ],
)
def test_options_that_exclude_each_other(
    fleet: SmallFleet, tmp_path: Path, options: dict[str, object], words: str
) -> None:
    paths = [*(fleet.adapters if options.get("adapters") else fleet.merged)]
    if options.get("mixed"):
        paths.append(fleet.merged[0])
    with pytest.raises(widepack.UsageError, match=words):
        widepack.build(
            paths,
            tmp_path / "x.wide",
            model=Net,
            inputs=INPUTS,
            base=fleet.base if options.get("base") else None,
            unmerge=bool(options.get("unmerge")),
            share=str(options.get("share", "auto")),
        )
    assert not (tmp_path / "x.wide").exists()


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("base", [False, True])
def test_a_folder_of_adapters_names_them(fleet: SmallFleet, tmp_path: Path, deep: bool, base: bool) -> None:
    parent = tmp_path / "runs" / "checkpoint-9" if deep else tmp_path / "runs"
    for source in fleet.adapters:
        shutil.copytree(source, parent / Path(source).name)
    (tmp_path / "runs" / "training_args.bin").write_bytes(b"x")
    first = parent / Path(fleet.adapters[0]).name
    with pytest.raises(widepack.UsageError, match=f"runs has no adapter_config.json.*with --base: {first}"):
        widepack.build(
            [tmp_path / "runs"],
            tmp_path / "x.wide",
            model=Net,
            inputs=INPUTS,
            base=fleet.base if base else None,
        )


def test_an_adapter_of_another_base_is_refused(fleet: SmallFleet, tmp_path: Path) -> None:
    base = torch.load(fleet.base)
    del base["second.weight"]
    torch.save(base, tmp_path / "other.pt")
    with pytest.raises(widepack.CheckpointError, match=r"lacks second\.weight, which the model has"):
        widepack.build(
            fleet.adapters, tmp_path / "x.wide", base=tmp_path / "other.pt", model=Net, inputs=INPUTS
        )


def test_an_adapter_needs_a_fleet(fleet: SmallFleet, tmp_path: Path) -> None:
    out = tmp_path / "plain.wide"
    build_of(fleet.merged, out)
    with pytest.raises(widepack.UsageError, match="is a LoRA adapter, which needs a base"):
        widepack.append(out, [fleet.adapters[0]])


def test_the_command_line(fleet: SmallFleet, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from fleet.small_fleets import Net\n", encoding="utf-8")
    out = tmp_path / "fleet.wide"
    options = ["--model", f"{tmp_path / 'net.py'}:Net", "--input", INPUTS[0], "--budget", "0"]
    args = ["--base", str(fleet.base), "--adapter", str(fleet.adapters[0].parent / "a*")]
    found = CliRunner().invoke(cli, ["build", *args, "-o", str(out), *options])
    assert found.exit_code == 0, found.output
    assert "2 weights as a base and factors; ranks 2, 4; base given" in found.output
    found = CliRunner().invoke(cli, ["inspect", str(out)])
    assert "2 as a base and factors, ranks 2, 4" in found.output
    found = CliRunner().invoke(cli, ["build", "--unmerge", "--dry-run", *map(str, fleet.merged), *options])
    assert (
        found.exit_code == 0 and "base and factors" in found.output and "nothing was written" in found.output
    )
    assert "stacked      head.weight: " in found.output
    found = CliRunner().invoke(cli, ["verify", str(out)])
    assert found.exit_code == 0, found.output
    found = CliRunner().invoke(cli, ["build", str(fleet.adapters[0]), "-o", str(tmp_path / "n"), *options])
    assert found.exit_code == 2 and "--base" in found.output


class Recurrent(nn.Module):
    """A network whose recurrent layer cannot run over factors."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(SIZE, SIZE, batch_first=True)
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.rnn(x)[0])
        return found


def test_ops_that_cannot_run_over_factors_read_merged_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, paths = Recurrent().state_dict(), []
    for i in range(4):
        state = {name: value.clone() for name, value in base.items()}
        for name in ("rnn.weight_ih_l0", "rnn.weight_hh_l0", "out.weight"):
            rows, columns = state[name].shape
            state[name] += 0.02 * torch.randn(rows, 3) @ torch.randn(3, columns)
        paths.append(tmp_path / f"{i}.pt")
        torch.save(state, paths[-1])
    out = tmp_path / "recurrent.wide"
    inputs = [f"x=float32[B,3,{SIZE}]"]
    widepack.build(paths, out, unmerge=True, model=Recurrent, inputs=inputs, budget=0)
    for memory in ("auto", "least"):
        ens = widepack.load(out, memory=memory)
        assert len(ens.manifest.factored.weights) == 3
        for rows in (2, 300):
            x = torch.randn(rows, 3, SIZE)
            answers = ens(x)
            for i in range(4):
                torch.testing.assert_close(answers[i], ens.member(i)(x), rtol=1e-5, atol=1e-5)
        ens.swap(0, paths[1])
        answers = ens(x)
        torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)


class Tied(nn.Module):
    """A network whose output layer is its table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE, bias=False)
        self.head = nn.Linear(SIZE, SIZE, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.second(self.first(x)))
        return found


@pytest.mark.parametrize("names", [("first.weight", "head.weight"), ("first.weight",), ("head.weight",)])
def test_an_adapter_of_a_tied_weight_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    state = Tied().state_dict()
    kept = {name: value for name, value in state.items() if name == "second.weight" or name in names}
    torch.save(kept, tmp_path / "base.pt")
    for i in range(3):
        write_adapter(tmp_path / "lora" / f"a{i}", 2, 4, i, head=False)
    with pytest.raises(
        widepack.CheckpointError, match="it changes first.weight, and the model ties|has no first.weight"
    ):
        widepack.build(
            sorted((tmp_path / "lora").iterdir()),
            tmp_path / "x.wide",
            base=tmp_path / "base.pt",
            model=Tied,
            inputs=[f"x=int64[B]:0..{SIZE - 1}"],
        )


def test_without_memory_for_whole_weights_a_race_and_route_run_over_the_factors(
    of_adapters: Path, fleet: SmallFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merged_weights, "available_bytes", lambda: 10_000)
    out = tmp_path / "raced.wide"
    shutil.copytree(of_adapters, out)
    report = measure_new(out, seconds=3)
    assert {row["chosen"] for row in report.to_json()["rows"]} == {"predicted"}
    ens = widepack.load(out)
    for rows in (2, 4000):
        assert_right(ens, fleet.states, rows)
    assert all("split" in plan.strategies() for plan in ens.plans())
    x = torch.randn(60, SIZE)
    router = ens.entry("forward").router
    for ids in ([0] * 60, [i % 3 for i in range(60)]):
        assert isinstance(router.prepared([x], ids).together, GatheredCall)
        assert_rows_right(ens.route(x, member=ids), fleet.states, ids, x, (0, 1, 59))
