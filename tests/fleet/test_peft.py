"""Tests adapters that PEFT writes: merged into the base, they equal what PEFT's merge_and_unload gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleet.peft_merge import merged
from widepack.fleet.adapter import read_adapter

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of PEFT


def bert(width: int = 32) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=60,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=3 * width // 2,
        max_position_embeddings=20,
        num_labels=3,
    )
    found: nn.Module = transformers.BertForSequenceClassification(config)
    return found


def vit(width: int = 32) -> nn.Module:
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=3 * width // 2,
        num_labels=5,
    )
    found: nn.Module = transformers.ViTForImageClassification(config)
    return found


def llama(width: int = 32) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=3 * width // 2,
        max_position_embeddings=20,
    )
    found: nn.Module = transformers.LlamaForCausalLM(config)
    return found


def gpt2(width: int = 32) -> nn.Module:
    config = transformers.GPT2Config(vocab_size=60, n_embd=width, n_layer=2, n_head=4, n_positions=20)
    found: nn.Module = transformers.GPT2LMHeadModel(config)
    return found


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.Flatten(), nn.Linear(6, 4))


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "BERT": (bert, {"target_modules": ["query", "value"], "r": 8}),
    "BERT, all linears, mixed ranks": (
        bert,
        {
            "target_modules": "all-linear",
            "r": 8,
            "lora_alpha": 16,
            "rank_pattern": {"query": 4, r"layer\.1.*dense": 16},
            "alpha_pattern": {"layer.0.attention.self.value": 5},
            "modules_to_save": ["classifier"],
        },
    ),
    "BERT, rsLoRA, biases": (bert, {"target_modules": ["query", "dense"], "use_rslora": True, "bias": "all"}),
    "BERT, DoRA": (bert, {"target_modules": "all-linear", "use_dora": True, "bias": "lora_only"}),
    "BERT, embeddings": (bert, {"target_modules": ["word_embeddings", "query"], "r": 4}),
    "BERT, DoRA on embeddings": (bert, {"target_modules": ["word_embeddings"], "use_dora": True}),
    "ViT": (vit, {"target_modules": "all-linear", "r": 16, "modules_to_save": ["classifier"]}),
    "ViT, patches": (vit, {"target_modules": ["projection", "fc1"], "r": 4}),
    "ViT, DoRA": (vit, {"target_modules": ["projection"], "use_dora": True}),
    "Llama": (llama, {"target_modules": ["q_proj", "v_proj"], "r": 4}),
    "Llama, all linears": (
        llama,
        {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"down_proj": 4}},
    ),
    "Llama, embeddings": (llama, {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    "GPT-2": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "GPT-2, DoRA": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    "convolutions": (convolutions, {"target_modules": ["0", "2", "4"], "r": 4}),
    "convolutions, DoRA": (convolutions, {"target_modules": ["0", "2"], "r": 4, "use_dora": True}),
}


def trained(model: Any) -> None:
    """Changes all parameters that PEFT trains, as training would."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                if "magnitude" in name:
                    parameter.mul_(1 + 0.1 * noise)
                else:
                    parameter.add_(0.05 * noise)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_equal_those_of_peft(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    check(tmp_path, name, dtype, safe=True)


def test_bin_files_of_peft(tmp_path: Path) -> None:
    check(tmp_path, "BERT", torch.float32, safe=False)


def check(tmp_path: Path, name: str, dtype: torch.dtype, safe: bool) -> None:
    """Compares an adapter that PEFT writes, read and merged by widepack, with PEFT's own merge."""
    make, settings = CASES[name]
    torch.manual_seed(0)
    base = make().to(dtype)
    before = {key: value.clone() for key, value in base.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings))
    trained(model)
    model.save_pretrained(tmp_path, safe_serialization=safe)
    assert safe or (tmp_path / "adapter_model.bin").exists()
    expected = model.merge_and_unload().state_dict()

    adapter = read_adapter(tmp_path)
    assert set(adapter.deltas) | set(adapter.replaced) <= set(before)
    found = before | {key: value.to(dtype) for key, value in adapter.replaced.items()}
    for key, delta in adapter.deltas.items():
        found[key] = merged(found[key], delta, dtype)
    changed = {key for key in expected if not torch.equal(expected[key], before[key])}
    named = set(adapter.deltas) | set(adapter.replaced)
    tied = {"lm_head.weight", "transformer.wte.weight"}
    assert changed - tied <= named
    for key in named:
        if dtype == torch.float32 and key in adapter.deltas:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(found[key], expected[key]), key


def test_ranks_and_scales_are_those_of_peft(tmp_path: Path) -> None:
    make, settings = CASES["BERT, all linears, mixed ranks"]
    model = peft.get_peft_model(make(), peft.LoraConfig(**settings))
    trained(model)
    model.save_pretrained(tmp_path)
    adapter = read_adapter(tmp_path)
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }
    assert {f"{name}.weight" for name in layers} == set(adapter.deltas)
    for name, layer in layers.items():
        delta = adapter.deltas[f"{name}.weight"]
        assert delta.rank == layer.r["default"] and delta.scale == layer.scaling["default"]
    assert {delta.rank for delta in adapter.deltas.values()} == {4, 8, 16}


@pytest.mark.parametrize("kind", ["LoHaConfig", "LoKrConfig", "IA3Config", "VeraConfig"])
def test_other_methods_are_refused(tmp_path: Path, kind: str) -> None:
    settings: dict[str, Any] = {"target_modules": ["query"]}
    if kind == "IA3Config":
        settings["feedforward_modules"] = []
    peft.get_peft_model(bert(), getattr(peft, kind)(**settings)).save_pretrained(tmp_path)
    with pytest.raises(Exception, match="peft_type is"):
        read_adapter(tmp_path)


def test_pissa_is_refused(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["query"], init_lora_weights="pissa")
    peft.get_peft_model(bert(), config).save_pretrained(tmp_path)
    with pytest.raises(Exception, match="can change the base's weights"):
        read_adapter(tmp_path)
