"""Tests `route`: each row is answered by its member alone, and what is refused."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded import built, saved
from paths import GOLDEN
from support import Artifacts, leaves, run
from torch import Tensor, nn

import cases
import widepack
from widepack import InputError, UsageError
from widepack.inference.model import WideModel
from widepack.inference.routing.per_row import PerRowProgram
from widepack.runtime.graph_module import graph_module

CASES = ["mlp", "frozen_trunk", "resnet18", "lstm", "textcnn", "bert", "vit", "encoder", "gpt2", "unet"]


def rows_of(value: Any, rows: list[int]) -> Any:
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, dict):
        return {k: rows_of(v, rows) for k, v in value.items()}
    return type(value)(rows_of(v, rows) for v in value) if isinstance(value, (tuple, list)) else value


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("name", CASES)
def test_each_row_is_answered_by_its_member(name: str, artifacts: Artifacts) -> None:
    ens = widepack.load(artifacts(name))
    case = cases.load(name)
    rows = ens.manifest.entries["forward"].rows
    assert rows is not None and rows.independent and rows.proved, rows
    members = [case.member(i) for i in range(case.N)]
    draw = random.Random(name)
    for batch in (1, 2, 7):
        args, kwargs = case.sample(batch, 100 + batch)
        for ids in (
            [draw.randrange(case.N) for _ in range(batch)],
            [case.N - 1] * batch,
            sorted(draw.randrange(case.N) for _ in range(batch)),
        ):
            found = leaves(ens.route(*args, member=ids, **kwargs))
            for row, i in enumerate(ids):
                alone = leaves(run(members[i], rows_of(args, [row]), rows_of(kwargs, [row])))
                for a, b in zip(found, alone, strict=True):
                    torch.testing.assert_close(a[row], b[0], rtol=1e-4, atol=1e-4)


class Heads(nn.Module):
    """A trunk, heads of its own, and what rows may be read by: other dims, a dict, an integer output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.trunk: Any = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        torch.manual_seed(torch.initial_seed() + 1)
        self.head: Any = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        y = self.head(self.trunk(x)) * scale
        return {"y": y.transpose(0, 1), "label": y.argmax(-1), "rows": torch.ones(x.shape[0])}

    def encode(self, x: Tensor) -> Tensor:
        z: Tensor = self.trunk(x)
        return z


def heads(path: Path) -> tuple[list[Any], WideModel]:
    members: list[Any] = [Heads().eval() for _ in range(4)]
    for i, member in enumerate(members):
        with torch.no_grad():
            member.head.weight.mul_(i + 1)
    inputs = ["forward:x=float32[B,6]", "forward:scale=float32[3]", "encode:x=float32[B,6]"]
    names = [f"fold{i}" for i in range(4)]
    return members, widepack.load(
        built(path, Heads, members, *inputs, entries=["forward", "encode"], names=names)
    )


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], WideModel]:
    return heads(tmp_path_factory.mktemp("heads"))


def test_forms_of_members_and_of_answers(trunk: tuple[list[Any], WideModel]) -> None:
    members, ens = trunk
    x, scale, ids = torch.randn(5, 6), torch.randn(3), [2, 0, 2, 3, 0]
    with torch.no_grad():
        alone = [members[i](x[r : r + 1], scale) for r, i in enumerate(ids)]
    names = [ens.members[i] for i in ids]
    for form in (
        ids,
        tuple(ids),
        torch.tensor(ids),
        torch.tensor(ids, dtype=torch.uint8),
        [torch.tensor(i) for i in ids],
        np.array(ids),
        list(np.array(ids)),
        names,
    ):
        found = ens.route(x, scale, member=form)
        torch.testing.assert_close(found["y"], torch.cat([a["y"] for a in alone], 1))
        assert found["label"].tolist() == [int(a["label"]) for a in alone]
        assert found["rows"].tolist() == [1.0] * 5
    one = ens.route(x, scale=scale, member="fold3")
    torch.testing.assert_close(one["y"], members[3](x, scale)["y"])
    for single in (3, np.int64(3), torch.tensor(3), np.array("fold3")):
        torch.testing.assert_close(ens.route(x, scale, member=single)["y"], one["y"])
    in_order = ens.route(x[:4], scale, member=range(4))["y"]
    torch.testing.assert_close(in_order, ens.route(x[:4], scale, member=[0, 1, 2, 3])["y"])
    z = ens.entry("encode").route(x, member=ids)
    torch.testing.assert_close(z, members[0].encode(x))


def test_layers_that_members_share_run_once(
    trunk: tuple[list[Any], WideModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ens = trunk
    rows: list[int] = []
    real = torch.nn.functional.linear

    def linear(x: Tensor, *weights: Tensor) -> Tensor:
        rows.append(x.shape[0])
        y: Tensor = real(x, *weights)
        return y

    def counted(module: Any, device: Any, **options: Any) -> Any:
        made = graph_module(module, device, **options)
        for node in made.graph.nodes:
            if node.target is real:
                node.target = linear
        made.recompile()
        return made

    monkeypatch.setattr("widepack.inference.routing.routed_members.graph_module", counted)
    monkeypatch.setattr(PerRowProgram, "is_faster", lambda *_: False)
    copy.copy(ens).route(torch.randn(5, 6), torch.randn(3), member=[2, 0, 2, 3, 0])  # loads it again
    assert sorted(rows) == [1, 2, 2, 5, 5]


@pytest.mark.parametrize(
    ("member", "words"),
    [
        ([0, 1], "member has 2 values, and the call has 3 rows"),
        ([0, 1, 4], "member contains 4; the members are 0 to 3"),
        (torch.tensor([0, -1, 2]), "member contains -1; the members are 0 to 3"),
        ([0, 1, True], "member contains True; route takes whole numbers from 0 to 3"),
        ([0, 1, 1.0], "member contains 1.0; route takes whole numbers"),
        (torch.tensor([0.0, 1, 2]), r"member is float32\[3\]; route takes one whole number for each row"),
        (torch.tensor([True, False, True]), r"member is bool\[3\]"),
        (torch.tensor([[0, 1, 2]]), r"member is int64\[1, 3\]"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), r"member is int64\[3\] on the meta device"),
        (torch.zeros(3, dtype=torch.int64).to_sparse(), "member is a sparse tensor"),
        (range(5), "member has 5 values, and the call has 3 rows"),
        ({0: 1}, "member is dict; route takes a number or a name for each row"),
        (None, "member is NoneType"),
        ([0, 1, "fold9"], "fold9"),
        (7, "member contains 7; the members are 0 to 3"),
        (-1, "member contains -1; the members are 0 to 3"),
        (True, "member is bool; route takes a number or a name"),
    ],
)
def test_members_that_are_refused(member: Any, words: str, trunk: tuple[list[Any], WideModel]) -> None:
    with pytest.raises((InputError, UsageError), match=words):
        trunk[1].route(torch.randn(3, 6), torch.randn(3), member=member)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(trunk: tuple[list[Any], WideModel]) -> None:
    ens, x, scale = trunk[1], torch.randn(2, 6), torch.randn(3)
    with pytest.raises(InputError, match="member is a nested tensor; route takes one whole number"):
        ens.route(x, scale, member=torch.nested.nested_tensor([torch.tensor([0, 1])]))
    for nested in (torch.nested.nested_tensor([x]), torch.nested.nested_tensor([x, x[:1]])):
        with pytest.raises(InputError, match="an input of forward is a nested tensor, which has no shape"):
            ens.route(nested, scale, member=[0, 1])
        with pytest.raises(InputError, match="input x is a nested tensor"):
            ens.route(x=nested, scale=scale, member=[0, 1])
        with pytest.raises(InputError, match="input x is a nested tensor"):
            ens.each([nested] * 4, scale)
        with pytest.raises(InputError, match="input x is a nested tensor"):
            ens[0](nested, scale)
        with pytest.raises(InputError, match="input x is a nested tensor"):
            ens.entry("forward").tensor_calls.sizes([nested, scale], [False, False])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_members_are_refused(trunk: tuple[list[Any], WideModel]) -> None:
    members = torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)
    with pytest.raises(InputError, match="member is a quantized tensor; route takes one whole number"):
        trunk[1].route(torch.randn(3, 6), torch.randn(3), member=members)


def test_inputs_that_are_refused(trunk: tuple[list[Any], WideModel]) -> None:
    ens, x, scale = trunk[1], torch.randn(2, 6), torch.randn(3)
    with pytest.raises(InputError, match="the model takes 6"):
        ens.route(torch.randn(2, 5), scale, member=[0, 1])
    with pytest.raises(InputError, match="input x requires grad"):
        ens.route(x.requires_grad_(), scale, member=[0, 1])
    with pytest.raises(InputError, match=r"widepack\.each is for"):
        ens.route(widepack.each(torch.randn(4, 2, 6)), scale, member=[0, 1])


def test_a_swapped_member_answers_its_rows(tmp_path: Path) -> None:
    members, ens = heads(tmp_path)
    x, scale, ids = torch.randn(4, 6), torch.randn(3), [1, 0, 1, 3]
    before = ens.route(x, scale, member=ids)["y"]
    with torch.no_grad():
        members[1].head.weight.add_(1.0)
    torch.save(members[1].state_dict(), tmp_path / "new.pt")
    ens.swap("fold1", tmp_path / "new.pt")
    found = ens.route(x, scale, member=ids)["y"]
    assert torch.equal(found[:, [1, 3]], before[:, [1, 3]])
    torch.testing.assert_close(found[:, [0, 2]], members[1](x[[0, 2]], scale)["y"])
    ens.close()
    with pytest.raises(UsageError, match="was closed"):
        ens.route(x, scale, member=ids)


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x - x.mean(0))
        return y


def test_swaps_beside_the_first_calls(tmp_path: Path) -> None:
    """A call binds members under the lock that a swap holds while it waits for calls."""
    members, _ = heads(tmp_path)
    torch.save(members[1].state_dict(), tmp_path / "new.pt")
    x, scale = torch.randn(4, 6), torch.randn(3)
    for _ in range(5):
        ens = widepack.load(tmp_path / "e.wide")
        errors: list[Exception] = []

        def calls(ens: WideModel = ens, errors: list[Exception] = errors) -> None:
            try:
                for ids in itertools.product(range(4), repeat=2):
                    ens.route(x, scale, member=[*ids, 0, 1])
            except widepack.WidepackError as e:
                errors.append(e)

        def swaps(ens: WideModel = ens) -> None:
            for _ in range(5):
                ens.swap("fold1", tmp_path / "new.pt")

        threads = [threading.Thread(target=f, daemon=True) for f in (calls, calls, swaps)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(t.is_alive() for t in threads) and not errors, errors


def test_an_answer_shares_no_memory_with_inputs_or_weights(tmp_path: Path) -> None:
    ens = saved(Returned, tmp_path, "x=float32[B,6]")
    for ids in ([1, 1, 1], [0, 1, 0]):
        x = torch.randn(3, 6)
        kept = x.clone()
        with torch.inference_mode():
            for leaf in ens.route(x, member=ids):
                leaf.fill_(7.0)
        assert torch.equal(x, kept)
        assert not torch.equal(ens.route(x, member=ids)[1], torch.full((3, 6), 7.0))


class Returned(nn.Module):
    """Returns its input, a view of it, and a weight at each row."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, self.w.expand(x.shape[0], -1), x.view(-1, 2, 3)


@pytest.mark.extended
def test_the_first_route_on_another_default_device(tmp_path: Path) -> None:
    members, ens = heads(tmp_path)
    x, scale, ids = torch.randn(4, 6), torch.randn(3), [1, 0, 1, 3]
    with torch.device("meta"):
        found = ens.route(x, scale, member=ids)["y"]
    for row, i in enumerate(ids):
        torch.testing.assert_close(found[:, row], members[i](x[row : row + 1], scale)["y"][:, 0])


def test_a_model_that_mixes_rows_is_refused_with_its_line(tmp_path: Path) -> None:
    ens = saved(Mixing, tmp_path, "x=float32[B,6]")
    words = r"not known to be independent\.\nmean\.dim, test_route\.py:\d+ in forward: reduces over the rows"
    with pytest.raises(UsageError, match=words):
        ens.route(torch.randn(2, 6), member=[0, 1])
    assert ens(torch.randn(2, 6)).shape == (4, 2, 3)


class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.fc(x) + h
        return h.relu(), h


def test_entries_without_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ens = saved(Carried, tmp_path / "a", "x=float32[B,6]", "h=float32[B,6]", state=["h=1"])
    with pytest.raises(UsageError, match="has states, and route has no place for them"):
        ens.route(torch.randn(2, 6), member=[0, 1])
    fixed = saved(lambda: nn.Linear(6, 3), tmp_path / "b", "input=float32[2,6]")
    with pytest.raises(UsageError, match="so there is no batch"):
        fixed.route(torch.randn(2, 6), member=[0, 1])


def test_members_with_heads_of_different_sizes(artifacts: Artifacts) -> None:
    ens, case = widepack.load(artifacts("ragged_heads")), cases.load("ragged_heads")
    args, kwargs = case.sample(5, 3)
    ids = [0, case.N - 1, 0, 1, 1]
    found = ens.route(*args, member=ids, **kwargs)
    for row, i in enumerate(ids):
        alone = leaves(run(case.member(i), rows_of(args, [row]), rows_of(kwargs, [row])))
        for a, b in zip(leaves(found) if isinstance(found, Tensor) else [found], alone):
            torch.testing.assert_close(a[row], b[0], rtol=1e-4, atol=1e-4)


def test_an_older_artifact_is_examined_when_it_is_routed() -> None:
    ens = widepack.load(next(GOLDEN.glob("*-mlp.wide")))
    assert ens.manifest.entries["forward"].rows is None
    x = torch.randn(4, 6)
    found, whole = ens.route(x, member=[2, 0, 1, 2]), ens(x)
    torch.testing.assert_close(found, torch.stack([whole[i, r] for r, i in enumerate([2, 0, 1, 2])]))
