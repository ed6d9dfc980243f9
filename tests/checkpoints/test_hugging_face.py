"""Tests members from Hugging Face folders: `--model hf`."""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from widepack import build, load
from widepack.checkpoints import hugging_face
from widepack.checkpoints.discovery import open_checkpoint
from widepack.checkpoints.hugging_face import ConnectionRefused, no_network
from widepack.checkpoints.named_factory import find_factory
from widepack.errors import UsageError, VerificationError

QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hf")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    for i in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(i)
            model = transformers.GPT2LMHeadModel(config).eval()
        model.save_pretrained(folder / f"checkpoint-{i}", max_shard_size="5KB" if i else "5GB")
    return [str(folder / f"checkpoint-{i}") for i in range(2)]


IDS: dict[str, Any] = {**QUICK, "inputs": ["input_ids=int64[B,T]:0..49", "T=2..32"]}


@pytest.mark.extended
def test_hugging_face_folders(folders: list[str], tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    assert len(list(Path(folders[1]).glob("*.safetensors"))) > 1
    report = build(folders, tmp_path / "e.wide", model="hf", **IDS)
    assert report.members == ("checkpoint-0", "checkpoint-1")
    ids = torch.randint(0, 50, (3, 7))
    ens = load(tmp_path / "e.wide")
    with torch.no_grad():
        expected = [GPT2LMHeadModel.from_pretrained(f)(ids).logits for f in folders]
        torch.testing.assert_close(ens(ids).logits, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert ens.state_dict(0).keys() >= {
        "lm_head.weight",
        "transformer.wte.weight",
    }  # tied weights: the folder has one of the two
    assert find_factory("hf", {"folder": folders[0], "n_layer": 1}, ["elsewhere"])().config.n_layer == 1  # type: ignore[union-attr]


@pytest.mark.extended
def test_the_dtype_of_a_folder(folders: list[str], tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    GPT2LMHeadModel.from_pretrained(folders[0]).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    factory = find_factory("hf", None, [str(tmp_path / "half")])
    assert {p.dtype for p in factory().parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32
    build([tmp_path / "half"], tmp_path / "e.wide", model="hf", dtype="float32", **IDS)


def classifier(folder: Path, labels: int, seed: int, **changes: Any) -> str:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 8)
    config = BertConfig(
        vocab_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=labels,
        **sizes,
        **changes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        BertForSequenceClassification(config).eval().save_pretrained(folder)
    return str(folder)


@pytest.mark.extended
def test_folders_with_other_numbers_of_labels(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    paths = [classifier(tmp_path / f"run{i}", labels, i) for i, labels in enumerate((2, 3, 2))]
    build(paths, tmp_path / "e.wide", model="hf", inputs=["input_ids=int64[B,7]:0..19"], **QUICK)
    ids = torch.randint(0, 20, (3, 7))
    answers = load(tmp_path / "e.wide")(ids).logits
    for path, answer in zip(paths, answers):
        alone = transformers.BertForSequenceClassification.from_pretrained(path).eval()
        with torch.no_grad():
            torch.testing.assert_close(answer, alone(ids).logits, rtol=1e-4, atol=1e-5)
    factory = find_factory("hf", None, paths)
    states = [load(tmp_path / "e.wide").state_dict(i) for i in range(3)]
    assert [factory(state_dict=s).config.num_labels for s in states] == [2, 3, 2]  # type: ignore[union-attr]
    change = {"problem_type": "regression"}
    config = json.loads(Path(paths[1], "config.json").read_text())
    Path(paths[1], "config.json").write_text(json.dumps({**config, **change}))
    Path(paths[2], "config.json").unlink()  # the config of the first folder is used
    factory = find_factory("hf", None, paths)
    models: list[Any] = [factory.of(open_checkpoint(path), states[0]) for path in paths]
    assert [m.config.problem_type for m in models] == [None, "regression", None]
    assert [m.config.num_labels for m in models] == [2, 3, 2]


@pytest.mark.extended
def test_folders_of_other_programs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    paths = [classifier(tmp_path / f"run{i}", 2, i, hidden_act=act) for i, act in enumerate(("gelu", "relu"))]
    with pytest.raises(VerificationError, match="config.hidden_act: 'gelu' in member run0, 'relu' in member"):
        build(paths, tmp_path / "e.wide", model="hf", inputs=["input_ids=int64[B,7]:0..19"], **QUICK)


def test_a_config_that_would_download(folders: list[str], tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model_type": "detr",
        "architectures": ["DetrForObjectDetection"],
        "backbone": "resnet50",
    }
    config |= {"use_timm_backbone": False, "use_pretrained_backbone": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="--model hf downloads nothing; save the model with a config that"):
        build([tmp_path], tmp_path / "e.wide", model="hf", inputs=["pixel_values=float32[B,3,32,32]"])


def test_connections_of_libraries_are_blocked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(type=socket.SOCK_DGRAM) as sender:
        address = server.getsockname()
        calls: list[Callable[[], object]] = [
            lambda: socket.create_connection(address),
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{address[1]}"),
            lambda: sender.sendto(b"x", address),
            lambda: socket.getaddrinfo("huggingface.co", 443),
        ]
        for connect in calls:
            with pytest.raises(ConnectionRefused, match=r"connects to"), no_network():
                connect()
        socket.create_connection(address).close()


def test_pretrained_weights_of_parts_are_switched_off(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    parts = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    config = transformers.DetrConfig(backbone_config=parts)
    config.use_pretrained_backbone = config.backbone_config.use_pretrained_backbone = True
    hugging_face.without_pretrained_parts(config)
    assert not config.use_pretrained_backbone
    assert not config.backbone_config.use_pretrained_backbone


def test_folders_that_are_not_models_are_refused(
    folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(change: dict[str, Any] | None, **args: Any) -> str:
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        save_file({"w": torch.ones(1)}, folder / "model.safetensors")
        config = json.loads(Path(folders[0], "config.json").read_text())
        if change is not None:
            (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UsageError) as caught:
            build([folder], tmp_path / "e.wide", model="hf", model_args=args, **IDS)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert (
        f"needs the config.json that save_pretrained writes, but {tmp_path / 'folder'} has none"
        in refused(None)
    )
    assert "names the architecture MyNet, but transformers" in refused({"architectures": ["MyNet"]})
    remote_code = {"architectures": ["MyNet"], "auto_map": {"AutoModel": "modeling.MyNet"}}
    assert (
        "but its code is in the folder, and code of a folder is not run; name a factory of your own"
        in refused(remote_code)
    )
    assert "has no 'layers'" in refused({}, layers=3)
    assert "raised" in refused({"architectures": None, "model_type": "no-such-model"})
    (tmp_path / "folder" / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(None)
    (tmp_path / "folder" / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs transformers, which is not installed: pip install 'widepack[hf]'" in refused(None)
