"""Tests artifacts of adapters that PEFT writes: their answers are those of PEFT's models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_builds import QUICK
from torch import Tensor, nn

import widepack
from fleet.test_peft import bert, gpt2, llama, trained, vit

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of PEFT

RANKS = (4, 8, 16)
WIDTH = 64  # so that factors of rank 16 take fewer bytes than three weights
IDS, IMAGES = "int64[B,7]:0..59", "float32[B,3,16,16]"


class Plain(nn.Module):
    """A model of transformers with a tensor as its answer, and a cache that is off."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def forward(self, x: Tensor) -> Tensor:
        found = self.model(x) if isinstance(self.model, nn.Sequential) else self.model(x, return_dict=True)
        answer: Tensor = found if isinstance(found, Tensor) else found.logits
        return answer


def without_cache(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = make()
        model.config.use_cache = False
        found: nn.Module = model
        return found

    return made


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2),
        nn.Flatten(),
        nn.Linear(288, 10),
    )


CASES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "BERT": (partial(bert, WIDTH), IDS, {"target_modules": "all-linear", "modules_to_save": ["classifier"]}),
    "ViT": (partial(vit, WIDTH), IMAGES, {"target_modules": "all-linear"}),
    "Llama": (
        without_cache(partial(llama, WIDTH)),
        IDS,
        {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    ),
    "GPT-2": (
        without_cache(partial(gpt2, WIDTH)),
        IDS,
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "embeddings": (partial(bert, WIDTH), IDS, {"target_modules": ["word_embeddings", "query"]}),
    "DoRA": (partial(bert, WIDTH), IDS, {"target_modules": ["query", "value"], "use_dora": True}),
    "GPT-2, DoRA": (
        without_cache(partial(gpt2, WIDTH)),
        IDS,
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "embeddings, DoRA": (
        partial(bert, WIDTH),
        IDS,
        {"target_modules": ["word_embeddings"], "use_dora": True},
    ),
    "convolutions": (convolutions, IMAGES, {"target_modules": ["0", "2", "4"]}),
    "convolutions, DoRA": (convolutions, IMAGES, {"target_modules": ["2", "4"], "use_dora": True}),
}


def inputs_of(spec: str, rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if spec == IDS:
        return torch.randint(0, 60, (rows, 7), generator=generator)
    return torch.randn(rows, 3, 16, 16, generator=generator)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_peft(tmp_path: Path, name: str) -> None:
    make, spec, settings = CASES[name]
    torch.manual_seed(0)
    base = Plain(make)
    state = {n: t.clone() for n, t in base.state_dict().items()}
    torch.save(state, tmp_path / "base.pt")
    models = []
    for seed, rank in enumerate(RANKS):
        own = Plain(make)
        own.load_state_dict(state)
        model = peft.get_peft_model(own, peft.LoraConfig(r=rank, lora_alpha=8, **settings)).eval()
        torch.manual_seed(seed)
        trained(model)
        model.save_pretrained(tmp_path / f"lora{rank}")
        models.append(model)
    out = tmp_path / "fleet.wide"
    report = widepack.build(
        [tmp_path / f"lora{rank}" for rank in RANKS],
        out,
        base=tmp_path / "base.pt",
        model=lambda: Plain(make),
        inputs=[f"x={spec}"],
        **QUICK,
    )
    assert report.fleet is not None
    assert report.fleet["factored"]
    assert all(row["ranks"] == list(RANKS) for row in report.fleet["factored"])
    ens = widepack.load(out)
    x = inputs_of(spec, 3, 1)
    shared = ens(x)
    own_x = [inputs_of(spec, 3, 10 + i) for i in range(len(RANKS))]
    each = ens.each(torch.stack(own_x))
    with torch.inference_mode():
        unmerged = [(model(x), model(own)) for model, own in zip(models, own_x)]
        whole = [model.merge_and_unload() for model in models]
        truth = [(m.double()(x.double() if x.is_floating_point() else x)) for m in whole]
    for i, ((of_all, own), exact) in enumerate(zip(unmerged, truth)):
        scale = float(exact.abs().max())
        torch.testing.assert_close(shared[i], of_all, rtol=0, atol=3e-6 * scale)
        torch.testing.assert_close(shared[i].double(), exact, rtol=0, atol=3e-6 * scale)
        torch.testing.assert_close(each[i], own, rtol=0, atol=3e-6 * float(own.abs().max()))
        merged = {n.replace("base_model.model.", ""): t for n, t in whole[i].float().state_dict().items()}
        for weight, value in ens.state_dict(i).items():
            torch.testing.assert_close(value, merged[weight], rtol=3e-7, atol=3e-8)
