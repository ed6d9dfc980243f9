"""Tests adapters in PEFT's format that are written by hand: what is read, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from widepack.errors import CheckpointError
from widepack.fleet.adapter import LoraDelta, difference_of, is_adapter, read_adapter

LAYER = "base_model.model.block.0.linear"
BASE = "base_model.model."


def factors(rank: int = 4, rows: int = 6, columns: int = 10, module: str = LAYER) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {
        f"{module}.lora_A.weight": torch.randn(rank, columns, generator=generator),
        f"{module}.lora_B.weight": torch.randn(rows, rank, generator=generator),
    }


def settings_of(**settings: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["linear"]} | settings


def written(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(settings_of(**settings)), encoding="utf-8")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def matrix(base: Tensor, delta: LoraDelta) -> Tensor:
    """Returns a weight with its difference as the matrix [O, I]."""
    left, right, scale = difference_of(base, delta)
    full = base.flatten(1) + left @ right
    return full if scale is None else full * scale


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as found:
        read_adapter(folder)
    message = str(found.value)
    assert message.startswith(f"adapter {folder}: ") and len(message.splitlines()) <= 5
    for word in words:
        assert word in message, message


def test_one_layer(tmp_path: Path) -> None:
    tensors = factors()
    adapter = read_adapter(written(tmp_path, tensors, base_model_name_or_path="org/base"))
    assert is_adapter(tmp_path) and adapter.path == str(tmp_path)
    assert list(adapter.deltas) == ["block.0.linear.weight"] and adapter.replaced == {}
    delta = adapter.deltas["block.0.linear.weight"]
    assert torch.equal(delta.left, tensors[f"{LAYER}.lora_B.weight"])
    assert torch.equal(delta.right, tensors[f"{LAYER}.lora_A.weight"])
    assert (delta.scale, delta.rank, delta.magnitude, delta.transposed) == (2.0, 4, None, False)
    assert adapter.config.base_model == "org/base"


def test_bin_files(tmp_path: Path) -> None:
    written(tmp_path, factors())
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(factors(), tmp_path / "adapter_model.bin")
    assert list(read_adapter(tmp_path).deltas) == ["block.0.linear.weight"]


def test_pickles_do_not_run(tmp_path: Path) -> None:
    class Writes:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    written(tmp_path, factors())
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(factors() | {"x": Writes()}, tmp_path / "adapter_model.bin")
    try:
        read_adapter(tmp_path)
    except CheckpointError as error:
        assert "adapter_model.bin" in str(error)
    assert not (tmp_path / "ran").exists()


def test_patterns_and_rslora(tmp_path: Path) -> None:
    other, third = f"{BASE}block.1.linear", f"{BASE}head"
    adapter = read_adapter(
        written(
            tmp_path,
            factors() | factors(2, module=other) | factors(9, module=third),
            rank_pattern={"block.1.linear": 2, "^head$": 9},
            alpha_pattern={r"block\.\d+\.linear": 3},
            use_rslora=True,
        )
    )
    ranks = {name: (d.rank, d.scale) for name, d in adapter.deltas.items()}
    assert ranks["block.0.linear.weight"] == (4, 1.5)
    assert ranks["block.1.linear.weight"] == (2, 3 / 2**0.5)
    assert ranks["head.weight"] == (9, 8 / 3)


def test_replaced_tensors(tmp_path: Path) -> None:
    tensors = factors() | {
        f"{BASE}classifier.weight": torch.ones(3, 6),
        f"{BASE}classifier.inner.scale": torch.ones(3),
        f"{LAYER}.base_layer.bias": torch.ones(6),
        f"{BASE}norm.bias": torch.ones(6),
        f"{BASE}embed_tokens.base_layer.weight": torch.ones(20, 6),
        f"{BASE}embed_tokens.lora_embedding_A": torch.ones(4, 20),
        f"{BASE}embed_tokens.lora_embedding_B": torch.ones(6, 4),
    }
    adapter = read_adapter(written(tmp_path, tensors, bias="all", modules_to_save=["classifier"]))
    assert set(adapter.replaced) == {
        "classifier.weight",
        "classifier.inner.scale",
        "block.0.linear.bias",
        "norm.bias",
        "embed_tokens.weight",
    }
    delta = adapter.deltas["embed_tokens.weight"]
    assert delta.transposed and delta.left.shape == (6, 4) and delta.right.shape == (4, 20)
    assert torch.equal(matrix(torch.zeros(20, 6), delta), torch.full((20, 6), 8.0))


def test_biases_of_saved_modules(tmp_path: Path) -> None:
    """With bias="all", PEFT writes the biases of a saved module under three names."""
    saved = torch.ones(3)
    tensors = factors() | {
        f"{BASE}head.bias": saved,
        f"{BASE}head.weight": torch.ones(3, 6),
        f"{BASE}head.modules_to_save.bias": saved.clone(),
        f"{BASE}head.original_module.bias": torch.zeros(3),
    }
    adapter = read_adapter(written(tmp_path, tensors, bias="all", modules_to_save=["head"]))
    assert set(adapter.replaced) == {"head.weight", "head.bias"}
    assert torch.equal(adapter.replaced["head.bias"], saved)


def test_dora_and_convolutions(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    conv = f"{BASE}conv"
    tensors = factors() | {
        f"{LAYER}.lora_magnitude_vector": torch.rand(6, generator=generator),
        f"{conv}.lora_A.weight": torch.randn(4, 5, 3, 3, generator=generator),
        f"{conv}.lora_B.weight": torch.randn(7, 4, 1, 1, generator=generator),
        f"{conv}.lora_magnitude_vector": torch.rand(1, 7, 1, 1, generator=generator),
    }
    adapter = read_adapter(written(tmp_path, tensors, use_dora=True))
    for name, shape in (("block.0.linear.weight", (6, 10)), ("conv.weight", (7, 5, 3, 3))):
        delta, base = adapter.deltas[name], torch.randn(shape, generator=generator)
        assert delta.magnitude is not None
        full = base.flatten(1) + delta.scale * delta.left @ delta.right
        expected = delta.magnitude[:, None] * full / full.norm(dim=1, keepdim=True)
        torch.testing.assert_close(matrix(base, delta), expected)


@pytest.mark.parametrize("rows", [6, 10])
def test_shape_decides_over_fan_in_fan_out(rows: int) -> None:
    """Only where a weight is square is the setting of the file needed."""
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(rows, 2, generator=generator), torch.randn(2, 10, generator=generator)
    product = left @ right
    for said in (True, False):
        delta = LoraDelta(left, right, 1.0, None, said)
        if rows == 10:
            expected = product.t() if said else product
            torch.testing.assert_close(matrix(torch.zeros(10, 10), delta), expected)
        else:
            torch.testing.assert_close(matrix(torch.zeros(6, 10), delta), product)
            torch.testing.assert_close(matrix(torch.zeros(10, 6), delta), product.t())
    with pytest.raises(CheckpointError, match=r"changes a weight of \[\d+, 10\], and the base has \[3, 3\]"):
        difference_of(torch.zeros(3, 3), LoraDelta(left, right, 1.0, None, transposed=False))


def test_factors_are_float32_at_least_and_the_base_stays() -> None:
    linear = nn.Linear(10, 2, bias=False)
    for dtype, factors_ in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        base = torch.zeros(6, 10, dtype=dtype)
        delta = LoraDelta(torch.ones(6, 2), linear.weight.detach(), 1.0, torch.ones(6), transposed=False)
        found = difference_of(base, delta)
        assert {t.dtype for t in found if t is not None} == {factors_} and not base.any()
        assert found.scale is not None and found.scale.shape == (6, 1)
        turned = difference_of(base.t(), delta)
        assert turned.scale is not None and turned.scale.shape == (1, 6)


@pytest.mark.parametrize("kind", ["LOHA", "LOKR", "IA3", "VERA", "ADALORA", "PROMPT_TUNING", None, 3])
def test_other_kinds_of_adapters_are_refused(tmp_path: Path, kind: object) -> None:
    refused(written(tmp_path, factors(), peft_type=kind), "adapter_config.json: peft_type is", "merge")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_bias": True}, ("lora_bias adds a bias",)),
        ({"layer_replication": [[0, 2]]}, ("layer_replication repeats layers",)),
        ({"trainable_token_indices": [1]}, ("trainable_token_indices",)),
        ({"target_parameters": ["w"]}, ("target_parameters",)),
        ({"use_qalora": True}, ("does not know the setting 'use_qalora' = True",)),
        ({"new_setting": {"a": 1}}, ("does not know the setting 'new_setting'",)),
        ({"init_lora_weights": "pissa_niter_4"}, ("init_lora_weights is 'pissa_niter_4'",)),
        ({"init_lora_weights": "loftq"}, ("can change the base's weights",)),
        ({"bias": "some"}, ("bias is 'some'; known: none, all, lora_only",)),
        ({"r": 0}, ("r is '0', not a positive integer",)),
        ({"r": True}, ("not a positive integer",)),
        ({"lora_alpha": "8"}, ("lora_alpha is '8', not a finite number",)),
        ({"use_rslora": 1}, ("use_rslora is '1', not true or false",)),
        ({"modules_to_save": "head"}, ("modules_to_save is not a list of names",)),
        ({"rank_pattern": ["a"]}, ("rank_pattern is not an object",)),
        ({"rank_pattern": {"(?=a)": 4}}, ("the pattern '(?=a)' of rank_pattern: it has '?' at 1",)),
        ({"rank_pattern": {"a{2,}": 4}}, ("it has '{' at 1, which is not read",)),
        ({"rank_pattern": {"a" * 300: 4}}, ("it has 300 characters; at most 200 are read",)),
        ({"rank_pattern": {"(a": 4}}, ("the pattern '(a' of rank_pattern: it has a '(' without ')'",)),
        ({"alpha_pattern": {"a": None}}, ("alpha_pattern 'a' is 'None', not a finite number",)),
        ({"r": 5}, ("of rank 5, which adapter_config.json says", LAYER.removeprefix(BASE))),
        ({"use_dora": True}, ("has no lora_magnitude_vector", "use_dora")),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(written(tmp_path, factors(), **settings), *words)


def test_settings_without_effect_are_read(tmp_path: Path) -> None:
    settings = {"loftq_config": {"a": 1}, "lora_dropout": 0.1, "megatron_config": None, "use_bdlora": None}
    assert read_adapter(written(tmp_path, factors(), **settings)).deltas


@pytest.mark.parametrize("text", ['{"r": NaN}', '{"r": 1e999}', '{"r": 1, "r": 2}', "[]", "{", "[" * 5000])
def test_damaged_settings_are_refused(tmp_path: Path, text: str) -> None:
    written(tmp_path, factors())
    (tmp_path / "adapter_config.json").write_text(text, encoding="utf-8")
    refused(tmp_path, "adapter_config.json")


def test_infinite_alpha_is_refused(tmp_path: Path) -> None:
    written(tmp_path, factors())
    text = json.dumps(settings_of(lora_alpha=float("inf")))
    (tmp_path / "adapter_config.json").write_text(text, encoding="utf-8")
    refused(tmp_path, "adapter_config.json: Infinity is not JSON")


def test_large_settings_are_refused(tmp_path: Path) -> None:
    written(tmp_path, factors(), base_model_name_or_path="x" * (1 << 20))
    refused(tmp_path, "adapter_config.json has", "at most 1,048,576 are read")


def without(tensors: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if name != key}


def with_shape(ending: str, *shape: int) -> dict[str, Tensor]:
    return factors() | {f"{LAYER}.{ending}": torch.ones(shape)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (without(factors(), f"{LAYER}.lora_B.weight"), ("it has no factors",)),
        (
            without(factors(), f"{LAYER}.lora_A.weight"),
            ("lora_B.weight has no", "lora_A.weight"),
        ),
        (
            factors() | without(factors(module=f"{BASE}b"), f"{BASE}b.lora_B.weight"),
            ("b.lora_A.weight has no b.lora_B.weight beside it",),
        ),
        (factors() | {f"{BASE}b.weight": torch.ones(2)}, ("does not explain the tensor b.weight",)),
        (
            factors() | {f"{BASE}b.bias": torch.ones(2)},
            ("tensor b.bias", "bias is 'none'"),
        ),
        (factors() | {f"{LAYER}.lora_B.bias": torch.ones(6)}, ("does not know the tensor", "lora_B.bias")),
        (factors() | {f"{LAYER}.lora_E": torch.ones(4, 1)}, ("does not know the tensor", "lora_E")),
        (
            factors() | {"other.weight": torch.ones(2)},
            ("'other.weight' does not begin with",),
        ),
        (with_shape("lora_magnitude_vector", 6), ("has a lora_magnitude_vector", "does not say use_dora")),
        (with_shape("lora_A.weight", 3, 10), ("[6, 4] and [3, 10]; of rank 4",)),
        (with_shape("lora_A.weight", 4), ("[6, 4] and [4]; of rank 4",)),
        (with_shape("lora_B.weight", 6, 4, 3, 3), ("[6, 4, 3, 3] and [4, 10]",)),
        (with_shape("lora_B.weight", 0, 4), ("[0, 4] and [4, 10]",)),
        (
            factors() | {f"{LAYER}.lora_A.weight": torch.ones(4, 10, dtype=torch.int32)},
            ("the factors of block.0.linear are torch.int32",),
        ),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, Tensor], words: tuple[str, ...]) -> None:
    refused(written(tmp_path, tensors), "adapter_model.safetensors: ", *words)


def test_magnitudes_of_another_number_are_refused(tmp_path: Path) -> None:
    tensors = with_shape("lora_magnitude_vector", 5)
    refused(written(tmp_path, tensors, use_dora=True), "has 5 magnitudes for 6 outputs")


def test_grouped_convolutions_are_refused(tmp_path: Path) -> None:
    """PEFT cannot merge them either."""
    tensors = with_shape("lora_A.weight", 4, 8, 3, 3) | {f"{LAYER}.lora_B.weight": torch.ones(8, 2, 1, 1)}
    refused(written(tmp_path, tensors), "[8, 2, 1, 1] and [4, 8, 3, 3]; of rank 4")


def test_folders_that_are_no_adapters(tmp_path: Path) -> None:
    refused(tmp_path / "none", "there is no such file")
    refused(tmp_path, "adapter_config.json there is no such file")
    assert not is_adapter(tmp_path)
    file = tmp_path / "file"
    file.write_bytes(b"x")
    refused(file, "is not a folder")
    written(tmp_path, factors())
    (tmp_path / "adapter_model.safetensors").unlink()
    refused(tmp_path, "has no adapter_model.safetensors or adapter_model.bin")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(tmp_path, "adapter_model.safetensors: is a Git LFS pointer")
    (tmp_path / "adapter_model.safetensors").unlink()
    os.mkfifo(tmp_path / "adapter_model.safetensors")
    refused(tmp_path, "adapter_model.safetensors: is not a plain file")
