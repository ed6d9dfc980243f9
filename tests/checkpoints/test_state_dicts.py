"""Tests how weights are found in the files of training scripts.

These have common keys, averages next to the weights, and prefixes of wrappers in the names.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from checkpoints.refusals import refusal
from widepack.checkpoints.checkpoint import Checkpoint
from widepack.checkpoints.discovery import open_checkpoint
from widepack.checkpoints.state_dict import without_wrappers
from widepack.errors import CheckpointError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 3)


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


STATE = dict(net().state_dict())
AVERAGE = dict(net(1).state_dict())


class Config(dict[str, Any]):
    """A class of the user that is a dict."""


class Curve(list[float]):
    """A class of the user that is a list."""


class Odd(dict[str, Any]):
    """A class of the user that is a dict, and whose pickled state is not one."""

    def __reduce__(self) -> Any:
        return Odd, (), (1, 2, 3), None, iter({"a": 1}.items())


class Schedule:
    """A class of the user. No object of it may be created from a pickle."""

    def __init__(self) -> None:
        self.step = 3

    def __setstate__(self, state: Any) -> None:
        os.mkdir("schedule-was-here")


def optimizer_state() -> dict[str, Any]:
    model = net()
    adam = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    adam.step()
    return adam.state_dict()


def lightning() -> dict[str, Any]:
    """Returns a checkpoint of Lightning's Trainer. The callback's best models are a dict of tensors too."""
    score = torch.tensor(0.3)
    return {
        "epoch": 3,
        "global_step": 90,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": {**{f"model.{k}": v for k, v in STATE.items()}, "criterion.weight": torch.ones(3)},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'loss'}": {
                "best_model_score": score,
                "best_k_models": {"/runs/a.ckpt": score, "/runs/b.ckpt": score},
            }
        },
        "optimizer_states": [optimizer_state()],
        "lr_schedulers": [{"last_epoch": 3}],
        "hparams_name": "kwargs",
        "hyper_parameters": {
            "width": 4,
            "args": argparse.Namespace(lr=0.1),
            "folder": pathlib.Path("/runs"),
            "rate": np.float64(0.1),
        },
    }


def opened(path: Path, value: Any, key: str | None = None) -> Checkpoint:
    torch.save(value, path)
    return open_checkpoint(path, key)


def refused(path: Path, value: Any, key: str | None = None) -> str:
    torch.save(value, path)
    return refusal(path, key)


def same(found: Checkpoint, state: dict[str, torch.Tensor]) -> bool:
    read = found.state_dict()
    return list(read) == list(state) and all(torch.equal(read[k], v) for k, v in state.items())


@pytest.mark.parametrize(
    "key",
    ["state_dict", "model", "model_state_dict", "model_state", "module", "network", "weights", "params"],
)
def test_the_usual_names_are_found(tmp_path: Path, key: str) -> None:
    assert same(
        opened(
            tmp_path / "a.pt",
            {"epoch": 3, key: STATE, "optimizer_state_dict": optimizer_state(), "loss": torch.tensor(0.5)},
        ),
        STATE,
    )
    assert same(opened(tmp_path / "a.pt", {"state": 1, "model": {key: STATE}}), STATE)


def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    found = opened(tmp_path / "a.ckpt", lightning())
    assert set(found.tensors()) == {f"model.{k}" for k in STATE} | {"criterion.weight"}
    assert same(open_checkpoint(tmp_path / "a.ckpt", "state_dict.model"), STATE)
    assert same(
        open_checkpoint(tmp_path / "a.ckpt", "model"), STATE
    )  # names with this prefix, in the state dict that is found without a key
    assert "has no 'ema'. Dicts of tensors in it: state_dict (10 tensors), callbacks." in refused(
        tmp_path / "a.ckpt", lightning(), "ema"
    )


@pytest.mark.parametrize(
    "save",
    [
        lambda: {"model": STATE, "model_ema": {"module": AVERAGE}},
        lambda: {"model": STATE, "model_ema": {f"module.{k}": v for k, v in AVERAGE.items()}},
        lambda: {
            "model": STATE,
            "model_ema": {"n_averaged": torch.tensor(9), **{f"module.{k}": v for k, v in AVERAGE.items()}},
        },
        lambda: {"model": {**STATE, **{f"model_ema.module.{k}": v for k, v in AVERAGE.items()}}},
        lambda: {**STATE, **{f"model_ema.module.{k}": v for k, v in AVERAGE.items()}},
    ],
    ids=["nested", "names", "counted", "flat in a dict", "flat"],
)
def test_an_average_is_taken_by_its_key(tmp_path: Path, save: Callable[[], Any]) -> None:
    path = tmp_path / "a.pt"
    assert same(opened(path, save(), "model_ema.module"), AVERAGE)
    assert same(open_checkpoint(path, "model_ema"), AVERAGE)


def test_the_user_chooses_between_weights_and_their_average(tmp_path: Path) -> None:
    words = refused(
        tmp_path / "a.pt",
        {
            "model": STATE,
            "ema": AVERAGE,
            "optimizer": optimizer_state(),
            "best": {"score": torch.tensor(1.0)},
        },
    )
    assert (
        f"Dicts of tensors in it: model ({len(STATE)} tensors), ema ({len(STATE)} "
        "tensors), best (1 tensor); name one, for example --key model, or all" in words
    )
    assert "optimizer (dict)" in words
    wrapped = {f"module.{k}": v for k, v in AVERAGE.items()}
    assert "name one, for example --key" in refused(tmp_path / "a.pt", {"model": STATE, "ema": wrapped})
    other = {"model": STATE, "head": {"weight": torch.ones(2)}}  # the weights of another model need no choice
    assert same(opened(tmp_path / "a.pt", other), STATE)
    assert "name one" in refused(
        tmp_path / "a.pt", {"generator": STATE, "discriminator": {"w": torch.ones(1)}}
    )


def test_one_of_a_list_of_models(tmp_path: Path) -> None:
    value = {"models": [STATE, AVERAGE], "folds": (1, 2)}
    assert "models.0 (9 tensors), models.1 (9 tensors); name one, for example --key models.0" in refused(
        tmp_path / "a.pt", value
    )
    assert same(opened(tmp_path / "a.pt", value, "models.1"), AVERAGE)
    assert "has no 'models.2'" in refused(tmp_path / "a.pt", value, "models.2")


def test_many_keys_are_not_all_listed(tmp_path: Path) -> None:
    assert "fold11 (1 tensor) and 8 more; name one" in refused(
        tmp_path / "a.pt", {f"fold{i}": {"w": torch.ones(1)} for i in range(20)}
    )


def test_objects_of_other_classes_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    allowed = set(torch.serialization.get_safe_globals())
    beside = {
        "args": argparse.Namespace(lr=0.1),
        "when": Schedule(),
        "best": np.float64(0.5),
        "curve": np.arange(3.0),
        "folder": pathlib.Path("/x"),
    }
    for legacy in (False, True):
        torch.save({"model": STATE, **beside}, "a.pt", _use_new_zipfile_serialization=not legacy)
        assert same(open_checkpoint("a.pt"), STATE)
    assert not (tmp_path / "schedule-was-here").exists()
    words = refused(tmp_path / "a.pt", {"net": Schedule(), "n": 3})
    assert f"it has net ({__name__}.Schedule), n (int); save the weights alone" in words
    assert words.endswith("or give --trust-pickle if you trust the origin of the file")
    assert (
        f"'net' is a pickled {__name__}.Schedule, not a dict of tensors. Loading it can run code"
        in refused(tmp_path / "a.pt", {"net": Schedule()}, "net")
    )
    dicts = {
        "config": Config(a=1, deep=Config(b=2)),
        "curve": Curve([1.0]),
        "counts": defaultdict(list, {"a": [1]}),
    }
    assert same(opened(tmp_path / "a.pt", {"model": STATE, **dicts}), STATE)
    assert same(opened(tmp_path / "a.pt", Config(model=STATE, epoch=3)), STATE)
    assert f"has a pickled {__name__}.Odd, and loading it can run code" in refused(
        tmp_path / "a.pt", {"model": STATE, "odd": Odd()}
    )
    assert set(torch.serialization.get_safe_globals()) == allowed
    assert not (tmp_path / "schedule-was-here").exists()


def test_a_later_pickle_protocol(tmp_path: Path) -> None:
    torch.save({"model": STATE}, tmp_path / "a.pt", pickle_protocol=4)
    with pytest.raises(
        CheckpointError,
        match=r"is written with a pickle protocol that cannot be read as data; save it again.*--trust-pickle",
    ):
        open_checkpoint(tmp_path / "a.pt")
    assert same(open_checkpoint(tmp_path / "a.pt", trust_pickle=True), STATE)


def test_extra_state_is_kept_beside_the_weights(tmp_path: Path) -> None:
    extra = {"conv._extra_state": b"x", "_extra_state": {"classes": ["a", "b"], "scale": 3}}
    found = opened(tmp_path / "a.pt", {**STATE, **extra})
    assert list(found.tensors()) == list(STATE)
    assert found.extra_state() == extra
    wrapped = {f"module.{name}": value for name, value in {**STATE, **extra}.items()}
    assert opened(tmp_path / "b.pt", wrapped).extra_state() == extra
    tensor = {"conv._extra_state": torch.ones(2)}
    save_file({**STATE, **tensor}, tmp_path / "c.safetensors")
    found = open_checkpoint(tmp_path / "c.safetensors")
    assert set(found.tensors()) == set(STATE)
    assert torch.equal(found.extra_state()["conv._extra_state"], tensor["conv._extra_state"])


def test_prefixes_of_wrappers_are_removed_from_names(tmp_path: Path) -> None:
    averaged = torch.optim.swa_utils.AveragedModel(net()).state_dict()
    assert same(opened(tmp_path / "a.pt", averaged), STATE)
    assert "n_averaged" in open_checkpoint(tmp_path / "a.pt").unstripped().tensors()
    compiled = {
        k.replace("conv.", "conv._orig_mod.").replace(
            "norm.", "_fsdp_wrapped_module.norm._checkpoint_wrapped_module."
        ): v
        for k, v in STATE.items()
    }
    assert same(opened(tmp_path / "a.pt", compiled), STATE)
    save_file({f"module.{k}": v for k, v in compiled.items()}, tmp_path / "a.pt")
    found = open_checkpoint(tmp_path / "a.pt")
    assert set(found.tensors()) == set(STATE)
    assert torch.equal(found.get("conv.bias"), STATE["conv.bias"])


def test_names_that_would_become_equal_are_not_changed() -> None:
    for names in (["a.w", "a._orig_mod.w"], ["my_orig_mod.w", "_orig_mod_.w"], [], ["n_averaged"]):
        assert without_wrappers(names) == {n: n for n in names}


def test_a_key_selects_names_in_safetensors(tmp_path: Path) -> None:
    save_file({**STATE, **{f"ema.module.{k}": v for k, v in AVERAGE.items()}}, tmp_path / "a.safetensors")
    found = open_checkpoint(tmp_path / "a.safetensors", "ema")
    assert found.state_dict().keys() == AVERAGE.keys()
    assert all(torch.equal(found.get(k), v) for k, v in AVERAGE.items())
