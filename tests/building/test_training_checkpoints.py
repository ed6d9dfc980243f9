"""Tests checkpoints of wrapped models, of models with hooks, and of quantized models."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from widepack import build, load
from widepack.checkpoints.differences import under_model_names
from widepack.checkpoints.discovery import open_checkpoint
from widepack.errors import CheckpointError, MemberMismatch, UsageError
from widepack_cli.shared.build_report import build_lines

QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}


def bare(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = bare()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Hooked(Wrapper):
    """A module with hooks that get only the positional inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        self.register_forward_hook(lambda _, args, out: out + args[0].sum(1, keepdim=True))


def save(folder: Path, states: list[dict[str, Any]]) -> list[str]:
    for i, state in enumerate(states):
        torch.save(state, folder / f"{i}.pt")
    return [str(folder / f"{i}.pt") for i in range(len(states))]


def prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


@pytest.mark.parametrize("prefix", ["", "net.", "model.", "module.", "deep.inner."])
@pytest.mark.parametrize("outer", ["net.", "net.body."])
def test_weights_of_a_model_that_is_wrapped(tmp_path: Path, prefix: str, outer: str) -> None:
    state = dict(bare().state_dict())
    (path,) = save(tmp_path, [prefixed(prefix, state)])
    found = under_model_names(open_checkpoint(path), prefixed(outer, state))
    assert set(found.tensors()) == set(prefixed(outer, state))
    assert all(torch.equal(found.get(outer + name), value) for name, value in state.items())


def test_a_wrapped_model_is_built_and_other_names_are_refused(tmp_path: Path) -> None:
    states = [dict(bare().state_dict()) for _ in range(2)]
    inputs = ["x=float32[B,4]"]
    build(save(tmp_path, states), tmp_path / "e.wide", model=Wrapper, inputs=inputs, **QUICK)
    x = torch.randn(3, 4)
    model = bare()
    model.load_state_dict(states[1])
    torch.testing.assert_close(load(tmp_path / "e.wide")(x)[1], model(x))
    for other in ({**states[0], "extra": torch.ones(2)}, dict(list(states[0].items())[1:])):
        with pytest.raises(MemberMismatch):
            build(save(tmp_path, [other]), tmp_path / "f.wide", model=Wrapper, inputs=inputs, **QUICK)


def test_hooks_that_see_positional_inputs(tmp_path: Path) -> None:
    models = [Hooked() for _ in range(2)]
    paths = save(tmp_path, [dict(m.state_dict()) for m in models])
    build(paths, tmp_path / "e.wide", model=Hooked, inputs=["x=float32[B,4]"], **QUICK)
    ens, x = load(tmp_path / "e.wide"), torch.randn(3, 4)
    for answer in (ens(x), ens(x=x)):
        torch.testing.assert_close(answer[1], models[1](x))


@pytest.mark.parametrize("key", ["", "state_dict"])
def test_a_quantized_state_dict_is_named(tmp_path: Path, key: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(bare(), {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-untyped-call]
        state = quantized.state_dict()
    (path,) = save(tmp_path, [{key: state} if key else state])
    with pytest.raises(CheckpointError, match="of a quantized model.*give the checkpoint from before") as e:
        open_checkpoint(path)
    assert len(str(e.value)) < 400 + len(path)
    (path,) = save(tmp_path, [{"w": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)}])
    with pytest.raises(CheckpointError, match="w is quantized.*give the checkpoint from before"):
        open_checkpoint(path)


class Sized(nn.Module):
    def __init__(self, width: int, depth: int = 1, name: str = "a") -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def lightning(folder: Path, *settings: dict[str, Any]) -> list[str]:
    rows = [{k: v for k, v in s.items() if k in ("width", "depth")} for s in settings]
    return save(
        folder,
        [
            {"state_dict": Sized(**row).state_dict(), "hyper_parameters": hyper_parameters, "epoch": 3}
            for row, hyper_parameters in zip(rows, settings)
        ],
    )


def test_arguments_in_the_hyperparameters_are_offered(tmp_path: Path) -> None:
    shared = {"width": 4, "depth": 2, "name": "my net", "optimizer": {"lr": 0.1}, "tags": list(range(99))}
    paths = lightning(tmp_path, {**shared, "lr": 0.1}, {**shared, "lr": 0.2})
    inputs = ["x=float32[B,4]"]
    with pytest.raises(UsageError, match="required positional argument") as missing:
        build(paths, tmp_path / "e.wide", model=Sized, inputs=inputs, **QUICK)
    offered = "give --model-arg width=4 --model-arg depth=2 --model-arg 'name=my net'"
    assert str(missing.value).endswith(offered)
    with pytest.raises(MemberMismatch, match="give --model-arg depth=2 --model-arg 'name=my net'$"):
        build(paths, tmp_path / "e.wide", model=Sized, model_args={"width": 4}, inputs=inputs, **QUICK)
    args = {"width": 4, "depth": 2}
    build(paths, tmp_path / "e.wide", model=Sized, model_args=args, inputs=inputs, **QUICK)
    paths = lightning(tmp_path, {"width": 4}, {"width": 6})
    with pytest.raises(UsageError, match=r"hyper_parameters differ in width: 4 in .*0.pt, 6 in .*1.pt; a"):
        build(paths, tmp_path / "f.wide", model=Sized, inputs=inputs, **QUICK)


class Scaled(nn.Module):
    """Has arguments that change the program (`scale`, `act`), the shapes (`width`), or nothing (`lr`)."""

    def __init__(self, width: int = 4, scale: float = 1.0, act: str = "relu", lr: float = 0.1) -> None:
        super().__init__()
        self.fc, self.scale, self.lr = nn.Linear(width, width), scale, lr
        self.act = {"relu": torch.relu, "tanh": torch.tanh}[act]

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x) * self.scale)


def scaled(folder: Path, *settings: dict[str, Any]) -> list[str]:
    rows = [{k: v for k, v in s.items() if k == "width"} for s in settings]
    return save(
        folder,
        [{"state_dict": Scaled(**r).state_dict(), "hyper_parameters": s} for r, s in zip(rows, settings)],
    )


CONTRADICTED: list[tuple[dict[str, Any], str]] = [
    ({"act": "tanh"}, "have act='tanh', and the model is made with act='relu'"),
    ({"scale": 2.0, "lr": 0.5}, "have scale=2.0, and the model is made with scale=1.0"),
]


@pytest.mark.parametrize(("stored", "words"), CONTRADICTED)
def test_a_default_that_contradicts_the_hyperparameters(
    stored: dict[str, Any], words: str, tmp_path: Path
) -> None:
    paths = scaled(tmp_path, stored, stored)
    more: dict[str, Any] = {"model": Scaled, "inputs": ["x=float32[B,4]"], "dry_run": True}
    with pytest.raises(MemberMismatch, match="is another program") as caught:
        build(paths, tmp_path / "e.wide", **more)
    name, value = next(iter(stored.items()))
    assert words in str(caught.value) and f"give --model-arg {name}={value}" in str(caught.value)
    assert "lr" not in str(caught.value)
    report = build(paths, tmp_path / "e.wide", model_args={name: value}, **more)
    assert report.contradicted == {}
    overruled = {name: inspect.signature(Scaled).parameters[name].default}
    report = build(paths, tmp_path / "f.wide", model_args=overruled, **more)
    assert report.contradicted == {name: {"given": overruled[name], "stored": value}}
    assert any(line.startswith("contradicted") for line in build_lines(report, dry_run=True))


def test_hyperparameters_that_change_no_program_or_do_not_fit(tmp_path: Path) -> None:
    paths = scaled(tmp_path, {"lr": 0.5, "tags": [1]}, {"lr": 0.7})
    more: dict[str, Any] = {"model": Scaled, "inputs": ["x=float32[B,4]"], "dry_run": True}
    assert build(paths, tmp_path / "e.wide", **more).contradicted == {}
    for path in paths:  # of another model, of which this one has the weights
        torch.save({**torch.load(path), "hyper_parameters": {"width": 6}}, path)
    assert build(paths, tmp_path / "f.wide", **more).contradicted == {}


def test_members_whose_hyperparameters_contradict_each_other(tmp_path: Path) -> None:
    paths = scaled(tmp_path, {"act": "relu"}, {"act": "tanh"})
    for args in ({}, {"act": "relu"}, {"act": "tanh"}):
        with pytest.raises(MemberMismatch, match="members differ in weights only: build these apart"):
            build(
                paths, tmp_path / "e.wide", model=Scaled, model_args=args, inputs=["x=float32[B,4]"], **QUICK
            )
