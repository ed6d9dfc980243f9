"""Tests FLOP formulas of language models of transformers against torch's counter, at sizes not captured."""

from __future__ import annotations

from typing import Any

import pytest
from counted import flops, torch_flops
from torch import nn

from widepack import primitives as primitives  # fills the registry
from widepack.building.costs import model_costs

transformers: Any = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 200,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "phi": {},
    "phi3": TOKENS,
    "starcoder2": TOKENS,
    "stablelm": TOKENS,
    "olmo": TOKENS,
    "olmo2": TOKENS,
    "granite": TOKENS,
    "cohere": TOKENS,
    "gpt_neox": {},
    "glm": TOKENS,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": TOKENS,
    "electra": {"embedding_size": 32},
    "albert": {"embedding_size": 32},
    "mpnet": {},
    "deberta-v2": {},
    "camembert": TOKENS,
    "xlm-roberta": TOKENS,
}
FEW = ("llama", "bert")
CASES = [*((name, "decoder") for name in DECODERS), *((name, "encoder") for name in ENCODERS)]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "form"),
    [case if case[0] in FEW else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_language_models_equal_torchs_counter(name: str, form: str) -> None:
    more = ENCODERS[name] if form == "encoder" else {**DECODERS[name], "use_cache": False}
    if form == "decoder":
        more = {"num_key_value_heads": 2, **more}
    config = transformers.CONFIG_MAPPING[name](**{**SMALL, **more})
    auto = transformers.AutoModel if form == "encoder" else transformers.AutoModelForCausalLM

    def make() -> nn.Module:
        module: nn.Module = auto.from_config(config).eval()
        return module

    inputs = ["input_ids=int64[B,T]:1..199"]
    costs = model_costs(make, inputs)
    assert not costs.lower_bound, costs.uncounted
    for sizes in ({"B": 1, "T": 7}, {"B": 3, "T": 61}, {"B": 5, "T": 33}):
        assert flops(costs, sizes) == torch_flops(make, inputs, sizes) > 0
