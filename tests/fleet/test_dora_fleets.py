"""Tests fleets whose adapters scale their outputs (DoRA): a base, thin factors, and scales of each member."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import Tensor

import widepack
from fleet.small_fleets import (
    LAYERS,
    SIZE,
    answer_of,
    assert_right,
    assert_rows_right,
    build_of,
    equal_states,
    write_adapter,
    write_fleet,
)
from widepack_cli.main import cli

PREFIX = "base_model.model."
ALPHA = 8
Dora = tuple[Path, list[Path], list[dict[str, Tensor]]]
"""An artifact, its adapters, and the weights of its members."""


def scaled(folder: Path, base: dict[str, Tensor], rank: int, seed: int) -> dict[str, Tensor]:
    """Writes an adapter of DoRA. Returns: the state dict of its member, computed in float64."""
    tensors = write_adapter(folder, rank, ALPHA, seed)
    state = {name: tensors.get(f"{PREFIX}{name}", value) for name, value in base.items()}
    generator = torch.Generator().manual_seed(100 + seed)
    for layer in LAYERS:
        left = tensors[f"{PREFIX}{layer}.lora_B.weight"].double()
        right = tensors[f"{PREFIX}{layer}.lora_A.weight"].double()
        full = base[f"{layer}.weight"].double() + left @ right * (ALPHA / rank)
        norm = full.norm(dim=1)
        magnitude = (norm * (1 + 0.3 * torch.randn(SIZE, generator=generator).double())).float()
        tensors[f"{PREFIX}{layer}.lora_magnitude_vector"] = magnitude
        state[f"{layer}.weight"] = (full * (magnitude.double() / norm).unsqueeze(1)).float()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"use_dora": True}))
    return state


@pytest.fixture
def fleet(tmp_path: Path) -> Dora:
    """Returns an artifact of two adapters of DoRA and one without, the adapters, and the members' weights."""
    small = write_fleet(tmp_path, (2, 4, 4))
    base = torch.load(small.base)
    folders, states = [], []
    for i, rank in enumerate((2, 4)):
        folders.append(tmp_path / f"dora{i}")
        states.append(scaled(folders[-1], base, rank, 20 + i))
    out = tmp_path / "dora.wide"
    report = build_of([*folders, small.adapters[2]], out, base=small.base)
    assert report.fleet is not None
    assert {row["weight"] for row in report.fleet["factored"]} == {"first.weight", "second.weight"}
    return out, [*folders, small.adapters[2]], [*states, small.states[2]]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("memory", ["auto", "least", "most"])
def test_answers_and_weights_are_those_of_the_merged_models(fleet: Dora, memory: str) -> None:
    out, _, states = fleet
    ens = widepack.load(out, memory=memory)
    for rows in (1, 3, 4000):
        assert_right(ens, states, rows)
    for i, state in enumerate(states):
        for name, value in ens.state_dict(i).items():
            torch.testing.assert_close(value, state[name], rtol=3e-7, atol=1e-8)
    factored = ens.manifest.factored.weights
    assert all(w.scale == f"{w.name}@scale" for w in factored)
    assert ens.manifest.factored.corrections == ""


@pytest.mark.extended
def test_rows_run_together_over_factors_and_scales(
    fleet: Dora,
) -> None:
    out, _, states = fleet
    ens = widepack.load(out, memory="least")
    ids = [0, 2, 1, 1, 0, 2, 2]
    x = torch.randn(len(ids), SIZE, generator=torch.Generator().manual_seed(0))
    assert_rows_right(ens.route(x, member=ids), states, ids, x)


def test_a_swap_exchanges_scales(fleet: Dora) -> None:
    out, folders, states = fleet
    ens = widepack.load(out)
    ens(torch.randn(4000, SIZE))  # merges weights
    order = (2, 1, 0)
    for i, j in enumerate(order):
        ens.swap(i, folders[j])
    for rows in (2, 4000):
        assert_right(ens, [states[j] for j in order], rows)
    fresh = widepack.load(out)
    for i, j in enumerate(order):
        assert equal_states(ens.state_dict(i), fresh.state_dict(j))


@pytest.mark.extended
def test_append_update_and_drop_of_scales(fleet: Dora, tmp_path: Path) -> None:
    out, folders, states = fleet
    base = torch.load(tmp_path / "base.pt")
    large = scaled(tmp_path / "large", base, 6, 40)
    widepack.append(out, [tmp_path / "large"], names=["large"])
    widepack.update(out, {"large": tmp_path / "large", "a2": folders[1]})
    widepack.drop(out, ["dora0"])
    ens = widepack.load(out)
    assert ens.members == ("dora1", "a2", "large")
    assert [w.ranks for w in ens.manifest.factored.weights] == [[4, 4, 6]] * 2
    assert equal_states(ens.state_dict("dora1"), ens.state_dict("a2"))
    assert_right(ens, [states[1], states[1], large], 5)


def test_an_artifact_without_scales_refuses_adapters_of_dora(tmp_path: Path) -> None:
    small = write_fleet(tmp_path)
    scaled(tmp_path / "dora", torch.load(small.base), 2, 30)
    out = tmp_path / "plain.wide"
    build_of(small.adapters, out, base=small.base)
    words = r"it has scales \[48, 1\] for first\.weight \(DoRA\), and the artifact stores no scales"
    with pytest.raises(widepack.MemberMismatch, match=words):
        widepack.load(out).swap(0, tmp_path / "dora")
    with pytest.raises(widepack.MemberMismatch, match=words):
        widepack.append(out, [tmp_path / "dora"])


def test_a_scaled_fleet_is_exported_to_onnx(fleet: Dora, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    out, _, states = fleet
    widepack.export(out, tmp_path / "fleet.onnx", to="onnx")
    session = runtime.InferenceSession(str(tmp_path / "fleet.onnx"), providers=["CPUExecutionProvider"])
    x = torch.randn(3, SIZE)
    (answers,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for answer, state in zip(torch.from_numpy(answers), states, strict=True):
        torch.testing.assert_close(answer.double(), answer_of(state, x), rtol=1e-5, atol=1e-5)


def test_verify_takes_the_adapters(fleet: Dora) -> None:
    out, folders, _ = fleet
    for base in ([], ["--base", str(out.parent / "base.pt")]):
        found = CliRunner().invoke(cli, ["verify", str(out), *map(str, folders), *base])
        assert found.exit_code == 0, found.output
        assert "3 adapters over" in found.output
    found = CliRunner().invoke(cli, ["verify", str(out), *map(str, folders[::-1])])
    assert found.exit_code == 1 and "first.weight differs from" in found.output
