"""Tests `load(weights="int8")`: the declared error against float64, the limit, swaps, and what is refused."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built, seeded
from paths import ROOT
from support import fresh, must
from torch import Tensor, nn

import widepack
from widepack import UsageError, VerificationError, load
from widepack.inference.entry_programs import LEAST, ROWS
from widepack.inference.model import WideModel
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights

N, WIDTH = 4, 256


class Net(nn.Module):
    """Has two layers that get int8 weights, and one of few weights that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(32, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.b(torch.relu(self.a(x))))
        return {"h": h, "y": self.out(h)}


def member(seed: int) -> Net:
    found: Net = seeded(Net, seed)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds four members of `Net`. `m77.pt`, in the same folder, is a fifth."""
    folder = tmp_path_factory.mktemp("int8")
    built(folder, Net, map(member, range(N)), "x=float32[B,32]")
    torch.save(member(77).state_dict(), folder / "m77.pt")
    return folder


@pytest.fixture
def ens(folder: Path) -> WideModel:
    return load(folder / "e.wide", weights="int8")


def drawn(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def truth(seeds: list[int], x: Tensor) -> dict[str, Tensor]:
    """Returns the answers of the members alone in float64. x: [B, 32], or [N, B, 32]."""
    own = x if x.dim() == 3 else x.expand(len(seeds), *x.shape)
    with torch.no_grad():
        found = [member(s).double()(x.double()) for s, x in zip(seeds, own)]
    return {k: torch.stack([f[k] for f in found]) for k in found[0]}


def error(found: Tensor, exact: Tensor) -> float:
    """Returns the largest difference of one member's answers as a part of the rms of the exact ones."""
    return float((found.double() - exact).abs().max() / exact.square().mean().sqrt())


def test_errors_are_those_against_the_members_in_float64(folder: Path, ens: WideModel) -> None:
    reader = Reader(folder / "e.wide")
    assert reader.manifest.probe is not None
    x = Weights([reader.path(reader.manifest.probe)]).get("shared.x0").clone()
    found, exact = ens(x), truth(list(range(N)), x)
    errors = ens.weight_errors
    assert [(e.entry, e.pattern, e.output, e.member) for e in errors] == [
        ("forward", "shared", output, f"m{i}") for output in ("h", "y") for i in range(N)
    ]
    for e in errors:
        i = ens.members.index(e.member)
        assert e.largest == pytest.approx(error(found[e.output][i], exact[e.output][i]), rel=1e-3)
        assert 1e-4 < e.largest < 0.2  # more than rounding, and the answers are still these
        assert 0 < e.rms <= e.largest
    assert "largest" in str(errors[0])


def test_each_is_measured_after_its_first_call(ens: WideModel) -> None:
    assert {e.pattern for e in ens.weight_errors} == {"shared"}
    xs = drawn(N, 2, 32)
    found, exact = ens.each(xs), truth(list(range(N)), xs)
    assert {e.pattern for e in ens.weight_errors} == {"shared", "each"}
    declared = max(e.largest for e in ens.weight_errors)
    for i in range(N):
        assert 1e-4 < error(found["y"][i], exact["y"][i]) < 3 * declared


def test_a_layer_is_within_half_a_scale_for_each_weight(tmp_path: Path) -> None:
    """The bound is from the weights alone, and holds for every input."""
    modules = [nn.Linear(WIDTH, WIDTH) for _ in range(N)]
    path = built(tmp_path, lambda: nn.Linear(WIDTH, WIDTH), modules, "input=float32[B,256]")
    ens = load(path, weights="int8")
    for seed in range(5):
        x = drawn(3, WIDTH, seed=seed)
        for module, found in zip(modules, ens(x)):
            weight = module.weight.detach().double()
            exact = x.double() @ weight.T + module.bias.detach().double()
            half = weight.abs().amax(1) / 254
            bound = x.double().abs().sum(1, keepdim=True) * half
            assert bool(((found.double() - exact).abs() <= 1.001 * bound + 1e-5).all())
            assert float((found.double() - exact).abs().max()) > 1e-4


class Step(nn.Module):
    """One step of a decoder: attention to a cache of keys and values, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:  # [B, 1, WIDTH], [B, T, WIDTH]
        every = torch.cat([cache, x], 1)
        query, key, value = (
            layer(rows).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer, rows in ((self.query, x), (self.key, every), (self.value, every))
        )
        h = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        h = self.norm(x + self.out(h))
        y: Tensor = h + self.down(nn.functional.gelu(self.up(h)))
        return y


@pytest.mark.extended
def test_a_step_of_a_decoder(tmp_path: Path) -> None:
    """Its layers read different numbers of rows; all of them together decide."""
    modules = [seeded(Step, i) for i in range(N)]
    path = built(tmp_path, Step, modules, "x=float32[B,1,256]", "cache=float32[B,3,256]")
    ens, plain = load(path, weights="int8"), load(path)
    assert ens.plan.strategies()["int8"] == 6
    x, cache = drawn(N, 1, 1, WIDTH), drawn(N, 1, 3, WIDTH)
    found = ens.each(x, cache)
    assert not torch.equal(found, plain.each(x, cache))
    declared = max(e.largest for e in ens.weight_errors)
    assert 1e-4 < declared < 0.1
    for module, own, a, b in zip(modules, found, x, cache):
        with torch.no_grad():
            exact = module.double()(a.double(), b.double())
        assert 1e-4 < error(own, exact) < 2 * declared


def test_batches_of_many_rows_run_the_float_weights(folder: Path, ens: WideModel) -> None:
    plain = load(folder / "e.wide")
    few, many = drawn(ROWS, 32), drawn(ROWS + 1, 32)
    assert torch.equal(ens(many)["y"], plain(many)["y"])
    assert not torch.equal(ens(few)["y"], plain(few)["y"])
    assert ens.plans()[0].batch == (1, ROWS)
    strategies = ens.plan.strategies()
    assert strategies["int8"] == 1  # `a` and `out` have few weights


def test_memory_least_runs_int8_weights_at_every_batch(folder: Path) -> None:
    least, most = (load(folder / "e.wide", weights="int8", memory=m) for m in ("least", "most"))
    assert len(most.plans()) > len(least.plans()) == 1
    many = drawn(3 * ROWS, 32)
    rows = torch.cat([least(many[i : i + ROWS])["y"] for i in range(0, 3 * ROWS, ROWS)], 1)
    torch.testing.assert_close(least(many)["y"], rows, rtol=1e-4, atol=1e-5)
    assert not torch.equal(least(many)["y"], most(many)["y"])


def test_members_and_state_dicts_are_those_of_the_files(folder: Path, ens: WideModel) -> None:
    plain, x = load(folder / "e.wide"), drawn(2, 32)
    for i in range(N):
        assert torch.equal(ens.member(i)(x)["y"], plain.member(i)(x)["y"])
        stored = torch.load(folder / f"m{i}.pt")
        assert all(torch.equal(stored[n], t) for n, t in ens.state_dict(i).items())


def test_an_error_over_the_limit_is_refused_with_its_figures(folder: Path, ens: WideModel) -> None:
    worst = max(ens.weight_errors, key=lambda e: e.largest)
    load(folder / "e.wide", weights="int8", max_error=worst.largest * 1.0001)
    with pytest.raises(VerificationError) as refused:
        load(folder / "e.wide", weights="int8", max_error=worst.largest * 0.999)
    text = str(refused.value)
    for part in (worst.output, worst.member, f"{worst.largest:.3g}", "1 of 4 members", "larger max_error"):
        assert part in text
    with pytest.raises(VerificationError, match="4 of 4 members"):
        load(folder / "e.wide", weights="int8", max_error=1e-6)


def test_without_warmup_the_first_call_is_refused(folder: Path) -> None:
    late = load(folder / "e.wide", weights="int8", max_error=1e-6, warmup=False)
    with pytest.raises(VerificationError, match="max_error is 1e-06"):
        late(drawn(1, 32))


def test_probe_measures_again(folder: Path) -> None:
    ens = load(folder / "e.wide", weights="int8", max_error=0.5)
    ens.probe()
    assert {e.pattern for e in ens.weight_errors} == {"shared", "each"}


def test_float_weights_have_no_errors(folder: Path) -> None:
    assert load(folder / "e.wide").weight_errors == ()


# -------------------------------------------------------------------- swap


def test_a_swapped_member_is_quantized_again(folder: Path, ens: WideModel) -> None:
    x = drawn(2, 32)
    before, errors = ens(x), ens.weight_errors
    ens.swap("m2", folder / "m77.pt")
    after, exact = ens(x), truth([0, 1, 77, 3], x)
    for i in range(N):
        assert 1e-4 < error(after["y"][i], exact["y"][i]) < 0.2
        assert torch.equal(after["y"][i], before["y"][i]) == (i != 2)
    changed = {e.member for e, old in zip(ens.weight_errors, errors) if e != old}
    assert changed == {"m2"}
    fresh_copy = load(folder / "e.wide", weights="int8")
    assert torch.equal(fresh_copy(x)["y"][2], before["y"][2])


def test_a_swap_over_the_limit_is_undone(folder: Path, tmp_path: Path) -> None:
    ens = load(folder / "e.wide", weights="int8", max_error=0.5)
    x = drawn(2, 32)
    before, errors = ens(x), ens.weight_errors
    module = member(77)
    with torch.no_grad():
        module.b.weight[:, 0] = 1000.0  # one large number takes the precision of its row
        module.a.weight[0] = 0.0
        module.a.bias[0] = 0.0
    torch.save(module.state_dict(), tmp_path / "outlier.pt")
    with pytest.raises(VerificationError, match=r"(?s)old member is restored.*max_error is 0.5"):
        ens.swap("m1", tmp_path / "outlier.pt")
    assert torch.equal(ens(x)["y"], before["y"])
    assert ens.weight_errors == errors


# -------------------------------------------------------------------- other calls and loads


def test_figures_routes_and_cascades(folder: Path, ens: WideModel) -> None:
    x, plain = drawn(3, 32), load(folder / "e.wide")
    torch.testing.assert_close(ens.mean(x, output="y"), ens(x)["y"].mean(0))
    assert torch.equal(ens.route(x, member=[2, 0, 2])["y"], plain.route(x, member=[2, 0, 2])["y"])
    found = ens.cascade(x, first=1, until=0.99, output="y").mean
    exact = plain.cascade(x, first=1, until=0.99, output="y").mean
    torch.testing.assert_close(found, exact, rtol=0, atol=0.01)


def test_calls_from_several_threads(ens: WideModel) -> None:
    inputs = [drawn(1 + seed % ROWS, 32, seed=seed) for seed in range(24)]
    alone = [ens(x)["y"] for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: ens(x)["y"], inputs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together))


def test_the_page_has_the_limits() -> None:
    page = (ROOT / "docs" / "how-to" / "load-in-another-dtype.md").read_text(encoding="utf-8")
    limits = (ROOT / "docs" / "reference" / "limits.md").read_text(encoding="utf-8")
    assert f"Calls of up to {ROWS} rows" in page
    assert f"{LEAST:,}" in page
    assert f"{LEAST:,}" in limits


def test_some_members_in_another_order(folder: Path, ens: WideModel) -> None:
    some = load(folder / "e.wide", weights="int8", members=["m3", "m0", "m1", "m2"])
    x = drawn(2, 32)
    assert torch.equal(some(x)["y"], ens(x)["y"][[3, 0, 1, 2]])
    assert some.weight_errors[0].member == "m3"


def test_a_copy_has_int8_weights_too(ens: WideModel) -> None:
    x = drawn(2, 32)
    assert torch.equal(copy.copy(ens)(x)["y"], ens(x)["y"])


@pytest.mark.extended
def test_a_fresh_process_gives_the_same_bits(folder: Path, ens: WideModel, tmp_path: Path) -> None:
    x = drawn(3, 32)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch, widepack; ens = widepack.load(sys.argv[1], weights='int8', threads=2); "
        "torch.save(ens(torch.load(sys.argv[2]))['y'].clone(), sys.argv[3])"
    )
    must(fresh(code, folder / "e.wide", tmp_path / "x.pt", tmp_path / "y.pt"))
    assert torch.equal(torch.load(tmp_path / "y.pt"), ens(x)["y"])


def test_float64_weights_are_quantized_in_float32(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    path = built(tmp_path, make, (make() for _ in range(N)), "input=float64[B,256]")
    with pytest.raises(UsageError, match="those of this load are float64; load with dtype='fp32'"):
        load(path, weights="int8")
    ens = load(path, weights="int8", dtype="fp32")
    assert 1e-4 < max(e.largest for e in ens.weight_errors) < 0.1


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    """One member has NaN in a weight: its answers are NaN where they were, and the others keep their bits."""
    modules = list(map(member, range(N)))
    with torch.no_grad():
        modules[1].b.weight[7, 3] = float("nan")
        modules[1].b.weight[9] = 0.0
        modules[1].b.weight[11] *= 1e-40
    built(tmp_path, Net, modules, "x=float32[B,32]")
    ens, x = load(tmp_path / "e.wide", weights="int8"), drawn(2, 32)
    found, plain = ens(x)["h"], load(tmp_path / "e.wide")(x)["h"]
    assert torch.equal(found.isnan(), plain.isnan())
    assert bool(found[1, :, 7].isnan().all())
    assert int(found.isnan().sum()) == 2
    torch.testing.assert_close(found[1, :, [9, 11]], plain[1, :, [9, 11]], rtol=1e-5, atol=1e-6)
    assert all(math.isfinite(e.largest) for e in ens.weight_errors)


def test_a_net_without_layers_for_int8_is_refused(tmp_path: Path) -> None:
    built(tmp_path, lambda: nn.Linear(8, 4), [nn.Linear(8, 4), nn.Linear(8, 4)], "input=float32[B,8]")
    with pytest.raises(UsageError, match=r"no linear layer of this artifact .* Load without weights"):
        load(tmp_path / "e.wide", weights="int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int4"}, "weights='int4' is unknown; known: 'int8'"),
        ({"max_error": 0.1}, "give weights='int8' too"),
        ({"weights": "int8", "max_error": 0}, "max_error=0 is not a limit"),
        ({"weights": "int8", "max_error": float("nan")}, "max_error=nan is not a limit"),
        ({"weights": "int8", "max_error": True}, "max_error=True is not a limit"),
        ({"weights": "int8", "max_error": "1%"}, "max_error='1%' is not a limit"),
        ({"weights": "int8", "backend": "compile"}, "backend='compile': int8 weights run only on 'eager'"),
        ({"weights": "int8", "backend": "onnxruntime"}, "backend='onnxruntime'"),
        ({"weights": "int8", "strategies": "wide"}, "strategies: the plans of int8 weights are made at load"),
        ({"weights": "int8", "prologue": False}, "prologue=False: weights are quantized once"),
        ({"weights": "int8", "verify": "off"}, "verify='off': the error of int8 weights is measured"),
        ({"weights": "int8", "compile": "now"}, "compile='now'"),
        ({"weights": "int8", "dtype": "bf16"}, "those of this load are bfloat16; load with dtype='fp32'"),
        ({"weights": "int8", "device": ["cpu", "cpu"]}, "are for a load on one device"),
    ],
)
def test_what_int8_weights_exclude(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        load(folder / "e.wide", **options)
    assert message in str(refused.value)


def test_fleets_are_refused(tmp_path: Path) -> None:
    base = member(0)
    torch.save(base.state_dict(), tmp_path / "base.pt")
    states = []
    for i in range(2):
        state = {n: t.clone() for n, t in base.state_dict().items()}
        state["b.weight"] += drawn(WIDTH, 2, seed=i) @ drawn(2, WIDTH, seed=9 + i) / 100
        states.append(state)
    built(tmp_path, Net, states, "x=float32[B,32]", base=tmp_path / "base.pt", unmerge=True)
    assert widepack.load(tmp_path / "e.wide").manifest.factored.weights
    with pytest.raises(UsageError, match="stores factors of a base of all members"):
        load(tmp_path / "e.wide", weights="int8")
