"""Tests that a member is what `load_state_dict` of the factory's module makes of its file.

The truth is always the factory's module alone, into which torch has loaded the file.
"""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import widepack
from checkpoints.loading_models import (
    FILES,
    QUICK,
    Doubled,
    Make,
    Part,
    Renamed,
    Scaled,
    Turned,
    built,
    loaded,
    norm,
    old_norm,
    same,
    save,
    scaled,
    seeded,
    turned,
    weight_norm,
)
from widepack import CheckpointError, MemberMismatch, UsageError
from widepack.checkpoints.discovery import open_all, places_of
from widepack.checkpoints.factory import Factory
from widepack.checkpoints.loading import MemberLoader, copies, kept, state_of


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", FILES)
def test_round_trips(tmp_path: Path, name: str) -> None:
    make, file = FILES[name]
    paths, ens = built(tmp_path, [file(i) for i in range(2)], make)
    wide, x = tmp_path / "e.wide", torch.randn(5, 4)
    for i, path in enumerate(paths):
        same(ens(x)[i], loaded(make, path), x)
        state = ens.state_dict(i)
        torch.save(state, tmp_path / f"out{i}.pt")
        again = loaded(make, tmp_path / f"out{i}.pt")
        same(ens(x)[i], again, x)
        own = loaded(make, path).state_dict()
        assert set(state) == set(own)
        expected = getattr(own, "_metadata", {})
        assert dict(getattr(state, "_metadata", expected)) == dict(expected)
    other = 0 if name == "buffers of other sizes" else 1
    needed = None if ens.manifest.state_dicts.copies else make  # code of its own may change new weights
    for model, source in ((needed, tmp_path / f"out{other}.pt"), (make, paths[other])):
        ens.swap(0, source, model=model)
        same(ens(x)[0], loaded(make, source), x)
        assert set(ens.state_dict(0)) == set(loaded(make, source).state_dict())
    out = tmp_path / "f.wide"
    widepack.append(wide, [paths[1]], names=["new"], out=out, model=make)
    widepack.update(out, {0: tmp_path / "out0.pt"}, model=needed)
    revised = widepack.load(out)
    same(revised(x)[2], loaded(make, paths[1]), x)
    same(revised(x)[0], loaded(make, paths[0]), x)
    torch.save(revised.state_dict(2), tmp_path / "last.pt")
    same(revised(x)[2], loaded(make, tmp_path / "last.pt"), x)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", ["version 1", "weight_g and weight_v"])
def test_a_file_that_the_model_converts_needs_the_model(tmp_path: Path, name: str) -> None:
    make, file = FILES[name]
    (paths, _), wide = built(tmp_path, [file(i) for i in range(2)], make), tmp_path / "e.wide"
    before = (wide / "manifest.json").read_bytes()
    for change in (
        lambda: widepack.load(wide).swap(0, paths[1]),
        lambda: widepack.update(wide, {0: paths[1]}),
        lambda: widepack.append(wide, [paths[1]], names=["n"]),
    ):
        with pytest.raises(MemberMismatch, match="--model"):
            change()
    assert (wide / "manifest.json").read_bytes() == before


def test_a_module_that_changes_its_own_state(tmp_path: Path) -> None:
    states = [seeded(Doubled, i).state_dict() for i in range(2)]
    check_swap_needs_the_model(tmp_path, states, Doubled)


def check_swap_needs_the_model(folder: Path, states: list[Any], make: Make) -> None:
    (paths, ens), x = built(folder, states, make), torch.randn(5, 4)
    same(ens(x)[1], loaded(make, paths[1]), x)
    with pytest.raises(MemberMismatch, match="changes when it loads it"):
        ens.swap(0, paths[1])
    ens.swap(0, paths[1], model=make)
    same(ens(x)[0], loaded(make, paths[1]), x)


class Flagged(nn.Module):
    """A buffer says whether the weight is stored transposed."""

    flag: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("flag", torch.tensor(0))
        self.register_load_state_dict_pre_hook(self._turn)  # type: ignore[no-untyped-call]

    @staticmethod
    def _turn(module: nn.Module, state: Any, prefix: str, *args: Any) -> None:
        if state[f"{prefix}flag"]:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].T.clone()
            state[f"{prefix}flag"] = torch.tensor(0)

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight


def test_a_hook_that_reads_a_value_needs_the_model(tmp_path: Path) -> None:
    states = [{**seeded(Flagged, i).state_dict(), "flag": torch.tensor(i)} for i in range(2)]
    check_swap_needs_the_model(tmp_path, states, Flagged)


def test_extra_state_that_differs_is_swapped_if_no_answer_depends_on_it(tmp_path: Path) -> None:
    unread = {**scaled(2)["_extra_state"], "classes": ["c"]}
    others = [{**scaled(2), "_extra_state": extra} for extra in ({"scale": 5.0}, unread, {"classes": 1})]
    paths = save(tmp_path, [scaled(0), scaled(1), *others])
    widepack.build(paths[:2], tmp_path / "e.wide", model=Scaled, **QUICK)
    ens = widepack.load(tmp_path / "e.wide")
    refusal = r"other extra state than the members \(_extra_state\)"
    for path, model, why in (
        (paths[2], None, ", and the model may use it in forward"),
        (paths[3], None, ", and the model may use it in forward"),
        (paths[2], Scaled, ", and its answers depend on it"),
    ):
        with pytest.raises(MemberMismatch, match=refusal + why):
            ens.swap(0, path, model=model)
    with pytest.raises(MemberMismatch, match="its module fails at the probe's inputs.*KeyError: 'scale'"):
        ens.swap(0, paths[4], model=Scaled)
    with pytest.raises(widepack.WidepackError):  # its own module does not answer as the program
        widepack.update(tmp_path / "e.wide", {0: paths[2]}, model=Scaled)
    ens.swap(0, paths[3], model=Scaled)
    x = torch.randn(5, 4)
    same(ens(x)[0], loaded(Scaled, paths[3]), x)
    assert ens.state_dict(0)["_extra_state"]["classes"] == ["c"]
    extra: Any = ens.state_dict(1)["_extra_state"]
    assert extra["classes"] == ["a", "b"]
    assert torch.equal(extra["counts"], torch.arange(3))


class Odd:
    pass


VALUES: list[Any] = [
    None,
    {"a": [1, 2.5, True, None, "x"], 3: (1, (2,)), "big": 2**80, "inf": float("-inf")},
    OrderedDict([("z", 1), ("a", {2, 3})]),
    [b"\x00\xff", torch.Size([2, 3]), torch.float16],
    {"tensor": torch.tensor([1.5, float("nan")]), "half": torch.ones(2, 3).half(), "c": torch.zeros(0)},
    {"array": np.arange(6).reshape(2, 3), "number": np.float64(2.5)},
]


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_extra_state_is_kept(tmp_path: Path, value: Any) -> None:
    def make() -> nn.Module:
        found = Scaled()
        found.forward = lambda input: found.fc(input)  # type: ignore[method-assign]
        return found

    trained = [seeded(make, i) for i in range(2)]
    for one in trained:
        one.extra = value
    _, ens = built(tmp_path, [dict(one.state_dict()) for one in trained], make, trust_pickle=True)
    stored = ens.state_dict(1)["_extra_state"]
    assert repr(stored) == repr(value)
    assert type(stored) is type(value)


def test_extra_state_that_is_code(tmp_path: Path) -> None:
    def make() -> nn.Module:
        found = Scaled()
        found.extra = {"scale": 1.0, "odd": Odd()}
        return found

    paths = save(tmp_path, [make().state_dict()])
    more: dict[str, Any] = {**QUICK, "model": make, "trust_pickle": True}
    with pytest.raises(
        UsageError, match=r"_extra_state contains a .*Odd\. An artifact stores data"
    ) as caught:
        widepack.build(paths, tmp_path / "e.wide", **more)
    assert "--ignore '_extra_state'" in str(caught.value)
    widepack.build(paths, tmp_path / "e.wide", ignore="_extra_state", **more)
    ens = widepack.load(tmp_path / "e.wide")
    assert list(ens.stored_state(0)) == ["fc.weight", "fc.bias"]
    with pytest.raises(UsageError, match="its extra state _extra_state, which the model reads, is not in"):
        ens.state_dict(0)
    with pytest.raises(MemberMismatch, match="does not store the extra state _extra_state"):
        ens.swap(0, paths[0], trust_pickle=True)


@pytest.mark.extended
def test_fused_members_keep_their_extra_state(tmp_path: Path) -> None:
    models: list[Any] = [seeded(Scaled, i) for i in range(2)]
    for one in models:
        one.extra = {"scale": 2.0}
    x = torch.randn(5, 4)
    widepack.fuse(models, x).save(tmp_path / "e.wide", pt2=False)
    ens = widepack.load(tmp_path / "e.wide")
    assert ens.state_dict(1)["_extra_state"] == {"scale": 2.0}
    same(ens(x)[1], models[1], x)
    for one in models:
        one.extra = {"scale": 2.0, "odd": lambda: 0}
    with pytest.raises(UsageError, match=r"member 0: .* contains a builtins\.function\. An artifact stores"):
        widepack.fuse(models, x).save(tmp_path / "f.wide", pt2=False)


# names


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda s: {k.replace("backbone.", "backbone.module."): v for k, v in s.items()},
        lambda s: {k.replace("backbone.1.", "backbone.1._orig_mod."): v for k, v in s.items()},
        lambda s: {f"model.{k.replace('backbone.', 'backbone.module.')}": v for k, v in s.items()},
        lambda s: {
            f"module.{k.replace('backbone.1.', 'backbone.module.1.module.')}": v for k, v in s.items()
        },
    ],
)
def test_wrappers_inside_names(tmp_path: Path, wrapped: Callable[[Any], Any]) -> None:
    models = [seeded(Part, i) for i in range(2)]
    (paths, ens), x = built(tmp_path, [wrapped(m.state_dict()) for m in models], Part), torch.randn(5, 4)
    same(ens(x)[1], models[1], x)
    ens.swap(0, paths[1])
    same(ens(x)[0], models[1], x)


class Module(nn.Module):
    """A part of it is called module."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.module(input))  # type: ignore[no-any-return]


def test_a_part_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    paths, ens = built(tmp_path, [seeded(Module, i).state_dict() for i in range(2)], Module)
    x = torch.randn(5, 4)
    same(ens(x)[1], loaded(Module, paths[1]), x)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("prefix", ["", "model.", "module."])
def test_names_that_are_ignored(tmp_path: Path, prefix: str) -> None:
    states = [
        {
            **{prefix + k: v for k, v in old_norm(i).items()},
            "criterion.pos_weight": torch.ones(3),
            "epoch": 3,
            "note": "b",
        }
        for i in range(2)
    ]
    paths, wide, x = save(tmp_path, states), tmp_path / "e.wide", torch.randn(5, 4)
    if prefix != "model.":  # the part under `model.` is the model, and the rest is not
        with pytest.raises(MemberMismatch, match=r"--ignore 'criterion\.\*' --ignore epoch --ignore note"):
            widepack.build(paths, wide, model=norm, **QUICK)
    widepack.build(paths, wide, model=norm, ignore=["criterion.*", "epoch", "note"], **QUICK)
    ens = widepack.load(wide)
    truth = norm().eval()
    truth.load_state_dict(old_norm(1))
    same(ens(x)[1], truth, x)
    ens.swap(0, paths[1])
    same(ens(x)[0], truth, x)
    widepack.append(wide, [paths[1]], names=["n"])
    same(widepack.load(wide)(x)[2], truth, x)
    with pytest.raises(UsageError, match=r"the pattern '0\.\*' matches 0.weight, a weight of the model"):
        widepack.build(paths, wide, model=norm, ignore=["criterion.*", "epoch", "note", "0.*"], **QUICK)


def test_a_model_without_weights(tmp_path: Path) -> None:
    with pytest.raises(MemberMismatch, match="which the model does not have"):
        widepack.build(save(tmp_path, [old_norm(0)]), tmp_path / "e.wide", model=torch.nn.ReLU, **QUICK)


def test_versions_under_a_prefix(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    models = [seeded(turned, i) for i in range(2)]
    _, ens = built(tmp_path, [{"state_dict": Wrapper(m).state_dict()} for m in models], turned)
    x = torch.randn(5, 4)
    same(ens(x)[1], models[1], x)


def test_a_factory_that_reads_sizes_under_a_prefix(tmp_path: Path) -> None:
    def sized(state_dict: Any) -> nn.Module:
        return nn.Linear(*reversed(state_dict["weight"].shape))

    layers = [nn.Linear(4, 2 + i) for i in range(2)]
    _, ens = built(tmp_path, [{f"net.{k}": v for k, v in net.state_dict().items()} for net in layers], sized)
    x = torch.randn(5, 4)
    same(ens(x)[1], layers[1], x)


# what is read


def test_a_load_that_only_copies_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = save(tmp_path, [seeded(norm, i).state_dict() for i in range(2)])
    monkeypatch.setattr(nn.Module, "load_state_dict", lambda *_: pytest.fail("was loaded"))
    loader = MemberLoader(Factory("norm", norm, {}))
    found = [loader.load(checkpoint) for checkpoint in open_all(places_of([str(path) for path in paths]))]
    assert loader.copies
    assert all(checkpoint.given is None for checkpoint in found)


def test_what_differs_from_the_file_is_kept(tmp_path: Path) -> None:
    big = 1 << 19  # over the size of a copy in memory

    class Net(Renamed):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(big, 1)

    state = seeded(Net, 0).state_dict()
    (path,) = save(tmp_path, [{"fc.weight": state["inner.weight"], "inner.bias": state["inner.bias"]}])
    found = MemberLoader(Factory("net", Net, {})).load(open_all(places_of([str(path)]))[0])
    assert all(torch.equal(found.get(name), value) for name, value in state.items())
    assert found.get("inner.weight").data_ptr() == found.get("inner.weight").data_ptr()


def test_which_modules_only_copy() -> None:
    hooked, patched, own = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    hooked.register_load_state_dict_post_hook(lambda module, keys: None)  # type: ignore[no-untyped-call]
    patched.state_dict = lambda *_, **__: {}  # type: ignore[method-assign,assignment]
    own.register_buffer("rows", own.weight.detach()[:1])  # writes of one load overlap
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    assert copies(norm())
    assert copies(tied)
    for module in (hooked, patched, own, Turned(), Scaled(), weight_norm(), nn.LazyLinear(2)):
        assert not copies(nn.Sequential(module)), module


# versions of submodules that are not those of the model


class Spread(nn.BatchNorm1d):
    """Its variance was stored as a deviation before version 3."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if (metadata.get("version") or 1) < 3:
            state[f"{prefix}running_var"] = state[f"{prefix}running_var"].square()
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def spread() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), Spread(3))


@pytest.mark.extended
def test_a_norm_with_versions_of_its_own_needs_the_model(tmp_path: Path) -> None:
    states = [seeded(spread, i).state_dict() for i in range(2)]
    older = OrderedDict({**states[1], "1.running_var": torch.full((3,), 3.0)})
    versions = {**vars(states[1])["_metadata"], "1": {"version": 2}}
    vars(older)["_metadata"] = OrderedDict(versions)
    _, ens = built(tmp_path, states, spread, share="none")
    (*_, path), x = save(tmp_path, [*states, older]), torch.randn(5, 4)
    with pytest.raises(MemberMismatch, match="has version 2 of 1, and the artifact's members have version 3"):
        ens.swap(0, path)
    ens.swap(0, path, model=spread)
    same(ens(x)[0], loaded(spread, path), x)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("version", ["two", [2]])
def test_a_version_that_is_no_number(tmp_path: Path, version: Any) -> None:
    states = [seeded(norm, i).state_dict() for i in range(2)]
    odd = OrderedDict({k: v for k, v in states[1].items() if not k.endswith("num_batches_tracked")})
    vars(odd)["_metadata"] = OrderedDict({k.rpartition(".")[0]: {"version": version} for k in odd})
    _, ens = built(tmp_path, states, norm)
    with pytest.raises(MemberMismatch):
        ens.swap(0, save(tmp_path, [*states, odd])[2])
    with pytest.raises(MemberMismatch):
        built(tmp_path, [*states, odd], norm)


def test_a_folder_without_space_for_kept_weights_is_an_error() -> None:
    tensor, before = torch.randn(1 << 20), resource.getrlimit(resource.RLIMIT_FSIZE)
    assert torch.equal(kept(tensor), tensor)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CheckpointError, match="set TMPDIR"):
            kept(tensor)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# drawn modules


@st.composite
def drawn_modules(draw: st.DrawFn) -> tuple[Make, Callable[[int], Any]]:
    """Draws a module of parts with hooks, versions, extra state and norms, and its files, old or new."""
    kinds = draw(
        st.lists(st.sampled_from(["linear", "norm", "turned", "renamed", "scaled"]), min_size=1, max_size=3)
    )
    old, prefix = draw(st.booleans()), draw(st.sampled_from(["", "model.", "module."]))

    def part(kind: str) -> nn.Module:
        if kind == "renamed":
            found = Renamed()
            found.inner = nn.Linear(4, 4)
            return found
        if kind == "scaled":
            scaled_part = Scaled()
            scaled_part.fc = nn.Linear(4, 4)
            return scaled_part
        return {"linear": lambda: nn.Linear(4, 4), "norm": lambda: nn.BatchNorm1d(4), "turned": Turned}[
            kind
        ]()

    def make() -> nn.Module:
        return nn.Sequential(*(part(kind) for kind in kinds))

    def file(i: int) -> Any:
        module = seeded(make, i)
        for child in module.children():
            if isinstance(child, Scaled):
                child.extra = {"scale": 0.5}
        state = module.state_dict()
        if not old:
            return state
        rows = {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
        return {prefix + k.replace(".inner.", ".fc."): v for k, v in rows.items()}

    return make, file


@pytest.mark.extended
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn_modules())
def test_drawn_modules(tmp_path: Path, drawn: tuple[Make, Callable[[int], Any]]) -> None:
    make, file = drawn
    states, x = [file(i) for i in range(2)], torch.randn(5, 4)
    _, ens = built(tmp_path, states, make)
    for i in range(2):
        truth = make().eval()
        first = next(iter(states[i]))
        prefix = next((p for p in ("model.", "module.") if first.startswith(p)), "")
        state = states[i] if not prefix else {k.removeprefix(prefix): v for k, v in states[i].items()}
        truth.load_state_dict(state)
        same(ens(x)[i], truth, x)
        torch.save(ens.state_dict(i), tmp_path / "out.pt")
        same(ens(x)[i], loaded(make, tmp_path / "out.pt"), x)
    assert list(state_of(truth)) == [n for n, v in ens.state_dict(1).items() if isinstance(v, Tensor)]
    ens.swap(0, tmp_path / "out.pt", model=None if ens.manifest.state_dicts.copies else make)
    same(ens(x)[0], truth, x)
