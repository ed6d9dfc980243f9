"""Tests NumPy arrays in every form of call and of every memory order, and values that are no tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from loaded import saved
from split_models import Cell
from torch import Tensor, nn

import widepack
from widepack import InputError, UsageError
from widepack.inference.model import WideModel


class Mixed(nn.Module):
    """Has inputs of four dtypes, one without dims, and a second entry."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table = nn.Linear(4, 3), nn.Embedding(5, 3)

    def forward(self, x: Tensor, ids: Tensor, keep: Tensor, scale: Tensor) -> Tensor:
        y: Tensor = torch.where(keep, self.fc(x) + self.table(ids), 0.0) * scale
        return y

    def encode(self, x: Tensor) -> Tensor:
        z: Tensor = self.fc(x).relu()
        return z


SPECS = ["x=float32[B,4]", "ids=int64[B]:0..4", "keep=bool[B,1]", "scale=float32[]"]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    specs = [*(f"forward:{s}" for s in SPECS), "encode:x=float32[B,4]"]
    return saved(Mixed, tmp_path_factory.mktemp("mixed"), *specs, members=3, entries=["forward", "encode"])


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    folder = tmp_path_factory.mktemp("cell")
    return saved(Cell, folder, "x=float32[B,4]", "h=float32[B,3]", members=3, state=["h=1"])


def tensors(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(5, 4, generator=g),
        "ids": torch.randint(0, 5, (5,), generator=g),
        "keep": torch.rand(5, 1, generator=g) < 0.7,
        "scale": torch.tensor(1.5),
    }


def arrays(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.numpy(), value)


def same(found: Any, right: Any) -> None:
    a, b = pytree.tree_leaves(found), pytree.tree_leaves(right)
    assert len(a) == len(b) and all(isinstance(t, Tensor) for t in a)
    for x, y in zip(a, b):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


FORMS: dict[str, Any] = {
    "call by position": lambda ens, t: ens(*t.values()),
    "call by name": lambda ens, t: ens(**t),
    "one input for each member": lambda ens, t: ens(
        widepack.each([t["x"]] * 3), t["ids"], t["keep"], t["scale"]
    ),
    "each": lambda ens, t: ens.each(**{k: [v] * 3 for k, v in t.items()}),
    "route": lambda ens, t: ens.route(**t, member=[2, 0, 0, 1, 2]),
    "reduce": lambda ens, t: ens.reduce("mean", "std", **t),
    "reduce by position": lambda ens, t: ens.reduce(*t.values(), "mean", "vote", of="softmax"),
    "mean": lambda ens, t: ens.mean(**t),
    "std": lambda ens, t: ens.std(*t.values()),
    "vote": lambda ens, t: ens.vote(**t),
    "entry": lambda ens, t: ens.encode(t["x"]),
    "entry, route": lambda ens, t: ens.encode.route(t["x"], member=1),
    "entry, mean": lambda ens, t: ens.encode.mean(x=t["x"]),
    "member": lambda ens, t: ens.member(1)(**t),
    "member by name": lambda ens, t: ens["m2"](*t.values()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_call_takes_arrays(form: str, mixed: WideModel) -> None:
    given = tensors()
    same(FORMS[form](mixed, arrays(given)), FORMS[form](mixed, given))


def test_arrays_say_which_member_and_which_weight(mixed: Any) -> None:
    given = tensors()
    ids = [2, 0, 0, 1, 2]
    same(mixed.route(**arrays(given), member=np.array(ids)), mixed.route(**given, member=ids))
    weights = [0.5, 0.25, 0.25]
    same(
        mixed.reduce("mean", **given, weights=np.array(weights), members=np.array([0, 1, 2])),
        mixed.reduce("mean", **given, weights=weights, members=[0, 1, 2]),
    )
    same(mixed[np.int64(-1)](**given), mixed["m2"](**given))
    same(mixed.member(np.uint8(1))(**given), mixed["m1"](**given))
    with pytest.raises(UsageError, match="there is no member 3; there are 3"):
        mixed.member(np.int64(3))


def test_an_array_says_which_members_are_loaded(mixed: WideModel) -> None:
    ens = widepack.load(mixed.entry("forward").programs.artifact.reader.root, members=np.array([2, 0]))  # type: ignore[call-overload]
    assert ens.members == ("m2", "m0")
    with pytest.raises(UsageError, match="members is empty"):
        widepack.load(mixed.entry("forward").programs.artifact.reader.root, members=np.array([]))  # type: ignore[call-overload]


def test_states_are_arrays(cell: WideModel) -> None:
    x, state = torch.randn(5, 4), {"h": torch.randn(3, 5, 3)}
    same(cell(x.numpy(), state=arrays(state)), cell(x, state=state))
    same(cell.each(torch.stack([x] * 3).numpy(), state=arrays(state)), cell.each([x] * 3, state=state))
    same(cell.mean(x.numpy(), state=arrays(state), output=0), cell.mean(x, state=state, output=0))
    own = {"h": state["h"][1]}
    same(cell[1](x.numpy(), state=arrays(own)), cell[1](x, state=own))
    with pytest.raises(InputError, match=r"state h is float64, the model takes float32; give it .astype"):
        cell(x, state={"h": state["h"].double().numpy()})


def _frozen(a: Any) -> Any:
    copy = a.copy()
    copy.setflags(write=False)
    return copy


ORDERS: dict[str, Any] = {
    "read-only": _frozen,
    "Fortran order": np.asfortranarray,
    "negative strides": lambda a: a[::-1].copy()[::-1],
    "other byte order": lambda a: a.astype(a.dtype.newbyteorder()),
    "every second number": lambda a: np.repeat(a, 2, 0)[::2],
    "broadcast": lambda a: np.broadcast_to(a, a.shape),
    "a subclass": lambda a: a.view(np.matrix) if a.ndim == 2 else a,
    "nothing masked": np.ma.array,
}


@pytest.mark.filterwarnings("ignore:the matrix subclass is not:PendingDeprecationWarning")
@pytest.mark.parametrize("order", ORDERS)
def test_arrays_of_every_memory_order(order: str, mixed: WideModel) -> None:
    given = tensors()
    own = {k: ORDERS[order](v.numpy()) if v.dim() else v.numpy() for k, v in given.items()}
    same(mixed(**own), mixed(**given))
    same(mixed.route(**own, member=[0, 2, 1, 1, 0]), mixed.route(**given, member=[0, 2, 1, 1, 0]))
    same(mixed[2](**own), mixed[2](**given))


def test_arrays_in_a_mapped_file(mixed: WideModel, tmp_path: Path) -> None:
    given = tensors()
    np.save(tmp_path / "x.npy", given["x"].numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    same(mixed(**{**given, "x": mapped}), mixed(**given))


def test_numbers_without_dims(mixed: WideModel) -> None:
    given = tensors()
    for scale in (np.float32(1.5), np.array(1.5, "float32"), np.array(1.5, ">f4"), _frozen(np.float32(1.5))):
        same(mixed(**{**given, "scale": scale}), mixed(**given))


X = tensors()["x"].numpy()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("x", X.astype("float64"), r"x is float64, the model takes float32; give it \.astype\('float32'\)"),
        ("x", X.astype("float16"), r"x is float16, the model takes float32; give it \.astype\('float32'\)"),
        (
            "x",
            X.astype("longdouble"),
            r"NumPy array of (float128|longdouble|float64); the model takes float32",
        ),
        (
            "ids",
            np.arange(5, dtype="int32"),
            r"ids is int32, the model takes int64; give it \.astype\('int64'",
        ),
        ("ids", np.arange(5, dtype="uint16"), "ids is uint16, the model takes int64; give it"),
        ("keep", np.ones((5, 1)), r"keep is float64, the model takes bool; give it \.astype\('bool'\)"),
        ("x", X > 0, r"x is bool, the model takes float32; give it \.astype\('float32'\)"),
        (
            "x",
            X.astype(object),
            r"NumPy array of object; the model takes float32; give it \.astype\('float32'",
        ),
        ("x", np.array([["a"]]), "NumPy array of <U1; the model takes float32"),
        ("x", np.array(["2020"], "M8[D]"), r"NumPy array of datetime64\[D\]; the model takes float32"),
        ("x", np.zeros(2, [("a", "f4")]), r"NumPy array of \[\('a', '<f4'\)\]; the model takes float32"),
        ("x", np.ma.masked_less(X, 0), r"x is a masked array.*give a number.*with \.filled\(\.\.\.\)"),
        ("x", X[0], r"x has 1 dims, \[4\]; the model takes float32\[B,4\], 2 dims"),
        ("x", X[:, :3], "x has 3 at axis 1"),
        (
            "scale",
            1.5,
            r"scale is a float; .*float32\[\]; make one: torch\.tensor\(scale, dtype=torch\.float32",
        ),
        ("x", X.tolist(), r"x is a list of 5; .*; make one: torch\.tensor\(x, dtype=torch\.float32\)$"),
        ("ids", [1, 2, 0, 0, 1], r"make one: torch\.tensor\(ids, dtype=torch\.int64\) \(a tokenizer gives"),
        (
            "x",
            list(X),
            r"x is a list of 5; .*widepack\.each\(x\), and a batch as one tensor \(torch\.stack\)",
        ),
        ("x", list(map(torch.tensor, X)), r"widepack\.each\(x\), and a batch as one tensor"),
        ("x", "text", r"x is a str; the model takes a tensor float32\[B,4\]$"),
        ("x", ["text"], r"x is a list of 1; the model takes a tensor float32\[B,4\]$"),
        ("x", [], r"x is a list of 0; the model takes a tensor float32\[B,4\]$"),
    ],
    ids=str,
)
def test_values_that_are_refused(name: str, value: Any, words: str, mixed: WideModel) -> None:
    given = {**tensors(), name: value}
    calls: list[Any] = [
        lambda: mixed(**given),
        lambda: mixed.route(**given, member=[0] * 5),
        lambda: mixed.mean(**given),
        lambda: mixed[0](**given),
    ]
    for call in calls:
        with pytest.raises(InputError, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)


class Table:
    """Is like a table of pandas: no array, but it can make one."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        return X


def test_other_containers_are_refused_with_the_way_to_an_array(mixed: WideModel) -> None:
    with pytest.raises(InputError, match=r"x is a Table; .*; give it as numpy\.asarray\(x\)$"):
        mixed(**{**tensors(), "x": Table()})


def test_lists_of_numbers_for_each_member_are_refused(mixed: WideModel) -> None:
    given = tensors()
    with pytest.raises(InputError, match=r"make one: torch\.tensor\(x, dtype=torch\.float32\)"):
        mixed.each(**{**{k: [v] * 3 for k, v in given.items()}, "x": [X.tolist()] * 3})
    with pytest.raises(InputError, match="one value for each member needs 3 tensors of one shape"):
        mixed(widepack.each([X.tolist()] * 3), given["ids"], given["keep"], given["scale"])


def test_an_answer_shares_no_memory_with_an_array(tmp_path: Path) -> None:
    ens = saved(Identity, tmp_path, "x=float32[B,4]", members=2)
    kept = X.copy()
    with torch.inference_mode():
        for found in (ens.route(kept, member=[0] * 5), ens.route(kept, member=[0, 1, 0, 1, 1])):
            for leaf in found:
                leaf.fill_(7.0)
    assert np.array_equal(kept, X)


class Identity(nn.Module):
    """Returns its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.fc(x)
