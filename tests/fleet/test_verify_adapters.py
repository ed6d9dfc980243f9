"""Tests `widepack verify` with folders of adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from loaded import files_of
from safetensors.torch import save_file

import widepack
from fleet.small_fleets import Net, SmallFleet, build_of, write_adapter, write_fleet
from widepack_cli.main import cli


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> SmallFleet:
    return write_fleet(tmp_path_factory.mktemp("verified"))


@pytest.fixture(scope="module")
def wide(fleet: SmallFleet) -> Path:
    out = fleet.base.parent / "fleet.wide"
    build_of(fleet.adapters, out, base=fleet.base)
    return out


def verified(wide: Path, paths: Sequence[Path], *options: str) -> Result:
    return CliRunner().invoke(cli, ["verify", str(wide), *map(str, paths), *options])


def test_adapters_over_the_base_of_the_artifact(fleet: SmallFleet, wide: Path) -> None:
    found = verified(wide, fleet.adapters)
    assert found.exit_code == 0, found.output
    assert "3 checkpoints (3 adapters over the artifact's base), bit for bit" in found.output
    found = CliRunner().invoke(cli, ["verify", str(wide), str(fleet.adapters[0].parent / "a*"), "--json"])
    assert found.exit_code == 0 and json.loads(found.output)["ok"] is True


def test_adapters_over_a_base_that_is_given(fleet: SmallFleet, wide: Path, tmp_path: Path) -> None:
    found = verified(wide, fleet.adapters, "--base", str(fleet.base))
    assert found.exit_code == 0, found.output
    assert f"3 adapters over {fleet.base}" in found.output
    base = torch.load(fleet.base)
    base["first.weight"][3, 5] += 1e-6
    torch.save(base, tmp_path / "other.pt")
    found = verified(wide, fleet.adapters, "--base", str(tmp_path / "other.pt"))
    assert found.exit_code == 1
    assert f"first.weight differs from {fleet.adapters[0]}" in found.output
    assert f"--base (here: {tmp_path / 'other.pt'})" in found.output
    assert "second.weight differs" not in found.output


def test_another_adapter_is_found(fleet: SmallFleet, wide: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "other", 4, 8, seed=77)
    found = verified(wide, [*fleet.adapters[:2], tmp_path / "other"])
    assert found.exit_code == 1 and f"member a2: first.weight differs from {tmp_path}" in found.output
    found = verified(wide, [fleet.adapters[1], fleet.adapters[0], fleet.adapters[2]])
    assert found.exit_code == 1 and "in the order of the members" in found.output


def test_members_that_were_updated(fleet: SmallFleet, wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "updated.wide"
    write_adapter(tmp_path / "new", 3, 8, seed=50)
    widepack.update(wide, {"a1": fleet.merged[1], "a2": tmp_path / "new"}, out=out)
    found = verified(out, [fleet.adapters[0], fleet.merged[1], tmp_path / "new"])
    assert found.exit_code == 0, found.output
    assert "2 adapters over the artifact's base" in found.output


@pytest.mark.extended
def test_a_head_that_one_adapter_replaces_needs_the_base(fleet: SmallFleet, tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora0", 2, 8, seed=0)
    write_adapter(tmp_path / "lora1", 2, 8, seed=1, head=False)
    paths, out = [tmp_path / "lora0", tmp_path / "lora1"], tmp_path / "heads.wide"
    build_of(paths, out, base=fleet.base)
    found = verified(out, paths)
    assert found.exit_code == 1 and "member lora1: head.bias is not in" in found.output
    assert "--base" in found.output
    assert verified(out, paths, "--base", str(fleet.base)).exit_code == 0


def test_a_fleet_in_bfloat16(fleet: SmallFleet, tmp_path: Path) -> None:
    out = tmp_path / "bf16.wide"
    inputs = ["x=bfloat16[B,48]"]
    options: dict[str, Any] = {"dtype": "bfloat16", "budget": 0, "pt2": False, "targets": ("cpu",)}
    widepack.build(fleet.adapters, out, base=fleet.base, model=Net, inputs=inputs, **options)
    for base in ([], ["--base", str(fleet.base)]):
        found = verified(out, fleet.adapters, *base)
        assert found.exit_code == 0, found.output


def test_an_artifact_of_whole_weights(fleet: SmallFleet, wide: Path, tmp_path: Path) -> None:
    states = [widepack.load(wide).state_dict(i) for i in range(3)]
    out = tmp_path / "whole.wide"
    build_of(files_of(tmp_path, map(dict, states)), out)
    found = verified(out, fleet.adapters)
    assert found.exit_code == 2 and "give the adapter's base with --base" in found.output
    found = verified(out, fleet.adapters, "--base", str(fleet.base))
    assert found.exit_code == 0, found.output


def test_a_base_without_adapters_is_refused(fleet: SmallFleet, wide: Path) -> None:
    for paths in (fleet.merged, []):
        found = verified(wide, paths, "--base", str(fleet.base))
        assert found.exit_code == 2 and "no adapter among CKPT" in found.output


def test_too_few_adapters(fleet: SmallFleet, wide: Path) -> None:
    found = verified(wide, fleet.adapters[:2])
    assert found.exit_code == 1 and "2 were given, the artifact has 3 members" in found.output


def test_answers_are_those_of_modules(fleet: SmallFleet, wide: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from fleet.small_fleets import Net\n", encoding="utf-8")
    found = verified(wide, fleet.adapters, "--model", f"{tmp_path / 'net.py'}:Net")
    assert found.exit_code == 0, found.output
    assert "as your modules" in found.output


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")  # those of transformers
def test_models_of_transformers_are_made_from_the_config_of_the_base(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).eval().save_pretrained(tmp_path / "base")
    layer = "base_model.model.bert.encoder.layer.0.attention.self.query"
    paths = [tmp_path / f"lora{i}" for i in range(2)]
    for path in paths:
        path.mkdir()
        tensors = {"lora_A.weight": torch.randn(2, 32), "lora_B.weight": 0.1 * torch.randn(32, 2)}
        save_file({f"{layer}.{name}": t for name, t in tensors.items()}, path / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["query"]}
        (path / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    out = tmp_path / "bert.wide"
    options: dict[str, Any] = {"model": "hf", "budget": 0, "pt2": False, "targets": ("cpu",)}
    inputs = ["input_ids=int64[B,6]:0..19"]
    widepack.build(paths, out, base=tmp_path / "base", inputs=inputs, **options)
    for given in ([], paths):
        found = verified(out, given, "--model", "hf")
        assert found.exit_code == 0, found.output
        assert "as your modules" in found.output
