"""Tests folders of transformers 5, whose files have other names than the modules: `--model hf`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from widepack import MemberMismatch, build, load
from widepack.checkpoints import hugging_face_weights
from widepack.checkpoints.checkpoint import Checkpoint
from widepack.checkpoints.discovery import open_checkpoint
from widepack.checkpoints.loading import MemberLoader, filled
from widepack.checkpoints.named_factory import find_factory

transformers = pytest.importorskip("transformers", minversion="5")

QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",), "budget": 0}
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
IMAGE = {"image_size": 16, "patch_size": 8}
DECODER = {**SIZES, "num_key_value_heads": 1, "vocab_size": 40, "max_position_embeddings": 32}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SWIN = {"image_size": 16, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}
SEGFORMER: dict[str, Any] = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "decoder_hidden_size": 16,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", {**SIZES, **IMAGE}),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {**SIZES, **IMAGE}),
    "beit": ("BeitForImageClassification", "BeitConfig", {**SIZES, **IMAGE}),
    "dinov2": ("Dinov2Model", "Dinov2Config", {**SIZES, **IMAGE}),
    "swin": ("SwinForImageClassification", "SwinConfig", {**SWIN, "window_size": 4}),
    "segformer": ("SegformerForSemanticSegmentation", "SegformerConfig", SEGFORMER),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**DECODER, **EXPERTS}),
}
PIXELS = ["pixel_values=float32[B,3,16,16]"]


def saved(kind: str, folder: Path, seed: int = 0, **changes: Any) -> str:
    """Saves a model with random weights, and returns its folder."""
    model_class, config, sizes = MODELS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = getattr(transformers, config)(**{**sizes, **changes})
        getattr(transformers, model_class)(made).save_pretrained(folder / f"{kind}-{seed}")
    return str(folder / f"{kind}-{seed}")


def member(folder: str, *, ignore: str = "", dtype: torch.dtype | None = None) -> Checkpoint:
    factory = find_factory("hf", None, [folder])
    factory.dtype = dtype
    opened = open_checkpoint(folder)
    loader = MemberLoader(factory, [ignore] if ignore else [])
    return loader.load(opened if dtype is None else opened.as_dtype(dtype))


def change(folder: str, **changes: Any) -> None:
    """Changes tensors of a folder's file. None removes one."""
    path = Path(folder, "model.safetensors")
    state = {**load_file(path), **changes}
    save_file({name: t for name, t in state.items() if t is not None}, path, {"format": "pt"})


@pytest.mark.parametrize("kind", MODELS)
def test_a_member_is_what_from_pretrained_makes(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path)
    alone = getattr(transformers, MODELS[kind][0]).from_pretrained(folder).state_dict()
    stored = load_file(Path(folder, "model.safetensors"))
    assert set(stored) != set(alone), "transformers renames nothing, so the test shows nothing"
    found = member(folder)
    assert list(found.tensors()) == list(alone)
    assert all(torch.equal(found.get(name), alone[name]) for name in alone)
    module = filled(find_factory("hf", None, [folder]), found, "m").state_dict()
    assert all(torch.equal(module[name], alone[name]) for name in alone)


def test_renamed_weights_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("vit", tmp_path)
    monkeypatch.setattr(hugging_face_weights, "kept", None)
    found = member(folder)
    half = member(folder, dtype=torch.bfloat16)
    assert {info.dtype for info in half.tensors().values()} == {"bfloat16"}
    name = "vit.layers.1.attention.v_proj.bias"
    assert torch.equal(half.get(name), found.get(name).to(torch.bfloat16))


def test_a_state_dict_of_the_module_beside_a_config(tmp_path: Path) -> None:
    folder = Path(saved("vit", tmp_path))
    model = transformers.ViTForImageClassification.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "own.pt")
    found = member(str(folder / "own.pt"))
    assert all(torch.equal(found.get(name), tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classifier.bias": None}, "lacks classifier.bias, which the model has"),
        (
            {"vit.encoder.layer.0.attention.attention.query.bias": None},
            "lacks vit.layers.0.attention.q_proj.bias",
        ),
        ({"classifier.bias": torch.zeros(5)}, r"classifier.bias: .* shape torch.Size\(\[5\]\)"),
        (
            {"criterion.w": torch.zeros(5)},
            r"criterion.w, which the model does not have.*--ignore 'criterion.\*'",
        ),
    ],
)
def test_what_the_class_does_not_take(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = saved("vit", tmp_path)
    change(folder, **changes)
    with pytest.raises(MemberMismatch, match=words):
        member(folder)
    if "criterion.w" in changes:
        member(folder, ignore="criterion.*")


def test_experts_of_which_one_is_missing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = saved("mixtral", tmp_path)
    stored = load_file(Path(folder, "model.safetensors"))
    change(folder, **{next(name for name in stored if ".experts.3." in name): None})
    capfd.readouterr()
    with pytest.raises(MemberMismatch, match=r"cannot convert its weights: Error: .*\.experts\.") as caught:
        member(folder)
    assert "\n" not in str(caught.value) and not capfd.readouterr().err


def test_fields_of_a_config_that_would_change_the_class(tmp_path: Path) -> None:
    folder = saved("vit", tmp_path)
    path = Path(folder, "config.json")
    fused = {"fusion_config": {"patch_embeddings": True}, "quantization_config": {"quant_method": "awq"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **fused}))
    before = dict(vars(transformers.ViTForImageClassification))
    member(folder)
    assert vars(transformers.ViTForImageClassification).keys() == before.keys()


@pytest.mark.parametrize("kind", ["vit", pytest.param("mixtral", marks=pytest.mark.extended)])
def test_a_build_and_a_swap(kind: str, tmp_path: Path) -> None:
    paths = [saved(kind, tmp_path, seed, num_hidden_layers=1) for seed in range(3)]
    inputs = PIXELS if kind == "vit" else ["input_ids=int64[B,T]:0..39", "T=2..16"]
    build(paths[:2], tmp_path / "e.wide", model="hf", inputs=inputs, **QUICK)
    ens = load(tmp_path / "e.wide")
    x = torch.randn(3, 3, 16, 16) if kind == "vit" else torch.randint(0, 40, (3, 5))
    with pytest.raises(MemberMismatch, match="if the model's code renames or changes what it loads, name it"):
        ens.swap(1, paths[2])
    ens.swap(1, paths[2], model="hf")
    for path, answer in zip([paths[0], paths[2]], ens(x).logits):
        alone = getattr(transformers, MODELS[kind][0]).from_pretrained(path).eval()
        with torch.no_grad():
            torch.testing.assert_close(answer, alone(x).logits, rtol=1e-4, atol=1e-5)
