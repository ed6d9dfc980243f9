"""Tests what happens to ops without a formula: they are named, totals are lower bounds, and users add one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from counted import flops
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from cases import load
from widepack import primitives  # fills the registry
from widepack.building.costs import model_costs
from widepack.errors import UsageError
from widepack.primitives import formula
from widepack_cli.main import cli

CASE = load("mlp")
MODEL = f"{Path(CASE.__file__ or '').resolve()}:model"


def analyze(*words: Any) -> Result:
    return CliRunner().invoke(cli, ["analyze", *map(str, words)], prog_name="widepack")


def of_case(*words: str) -> Result:
    return analyze(MODEL, *(part for spec in CASE.INPUTS for part in ("--input", spec)), *words)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("op", [torch.ops.aten.addmm, torch.ops.aten.mm])
def test_a_deleted_formula_is_named_and_the_totals_are_lower_bounds(
    op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))  # type: ignore[no-any-return]

    whole = model_costs(Net, ["x=float32[B,8]"])
    monkeypatch.delitem(flop_registry, op)
    costs = model_costs(Net, ["x=float32[B,8]"])
    assert costs.uncounted == {str(op): 1} and costs.lower_bound
    assert 0 < flops(costs, {"B": 3}) < flops(whole, {"B": 3}) and not whole.lower_bound


def test_the_command_names_them_and_strict_exits_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_case("--strict").exit_code == 0
    monkeypatch.delitem(flop_registry, torch.ops.aten.addmm)
    plain, strict = of_case("--at", "B=3"), of_case("--strict")
    assert plain.exit_code == 0 and strict.exit_code == 3
    assert "not counted: aten.addmm (" in plain.output and "FLOP" in plain.output
    (line,) = [x for x in plain.output.splitlines() if x.startswith("FLOP ")]
    assert ">= 0" in line
    found = json.loads(of_case("--json").stdout)
    assert found["lower_bound"] is True and "aten.addmm" in found["costs"]["uncounted"]


def test_an_op_of_a_library_gets_a_formula() -> None:
    @torch.library.custom_op("widepack_costs_test::mixed", mutates_args=())
    def mixed(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @mixed.register_fake
    def _(x: Tensor, w: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], w.shape[1])

    @primitives.register(mixed, "stacked")
    def stacked(w: Any, x: Any, y: Any) -> Any:
        raise NotImplementedError

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(8, 4))

        def forward(self, x: Tensor) -> Any:
            return mixed(x, self.w)

    costs = model_costs(Net, ["x=float32[B,8]"])
    assert costs.uncounted == {"widepack_costs_test.mixed": 1}

    @formula(mixed)
    def mixed_flop(x: Tensor, w: Tensor, *, out_val: Tensor) -> Any:
        return 2 * x.shape[0] * w.numel()

    costs = model_costs(Net, ["x=float32[B,8]"])
    assert flops(costs, {"B": 5}) == 2 * 5 * 8 * 4 and not costs.lower_bound
    with pytest.raises(UsageError, match="mixed has a FLOP formula already, in .*test_uncounted.py"):
        formula("widepack_costs_test::mixed")
    with pytest.raises(UsageError, match="does not name an op"):
        formula("mixed")


def test_elementwise_ops_and_moves_are_counted() -> None:
    """One operation for each element that is made, one for each that a sum reads, none for a copy."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x.relu()], 1).sum(1)

    costs = model_costs(Net, ["x=float32[B,8]"])
    assert costs.totals["ops"] == ("24*B", "0") and not costs.lower_bound
    assert costs.totals["kernels"] == ("3", "0")


def test_sizes_that_values_determine_are_named() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x[x > 0] * 2).sum()

    costs = model_costs(Net, ["x=float32[B,8]"])
    assert costs.lower_bound and "aten.mul" in costs.uncounted


def test_an_embedding_bag_counts_the_rows_that_it_adds_up() -> None:
    """It reads these rows, not the whole table."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.EmbeddingBag(97, 16, mode="mean")

        def forward(self, ids: Tensor) -> Any:
            return self.rows(ids)

    costs = model_costs(Net, ["ids=int64[B,12]:0..96"])
    assert not costs.lower_bound
    assert costs.totals["ops"] == ("0", "192*B") and costs.totals["weights_read"] == ("0", "192*B*w_bytes")


def test_fourier_transforms_are_counted() -> None:
    """5 * log2(n) operations for each complex number, half of that for each real one."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.fft.irfft(torch.fft.fft(torch.fft.rfft(x, dim=-1), dim=1), dim=-1)

    costs = model_costs(Net, ["x=float32[B,8,64]"])
    real, complex_numbers = 8 * 64, 8 * 33
    assert not costs.lower_bound
    assert costs.totals["ops"] == (f"{15 * real + 15 * complex_numbers + 15 * real}*B", "0")


def test_spectrograms_and_back_are_counted() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("window", torch.hann_window(32))

        def forward(self, x: Tensor) -> Any:
            found = torch.stft(x, 32, 8, window=self.window, return_complex=True)  # type: ignore[arg-type]
            return torch.istft(found * 2, 32, 8, window=self.window, length=256)  # type: ignore[arg-type]

    costs = model_costs(Net, ["x=float32[B,256]"])
    assert not costs.uncounted
