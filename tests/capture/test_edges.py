"""Tests code whose problems torch.export does not report.

These are branches on a size of 1, numbers among the outputs, and randomness. Also tests that a caller may
write into answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loaded import files_of
from small_builds import QUICK, agree, loaded, member
from small_builds import built as small_build
from torch import Tensor, nn

import widepack
from widepack.errors import CaptureError, InputError, VerificationError
from widepack.verification import small_sizes
from widepack.verification.rounding import coarsest
from widepack_artifacts.program import Node, Output, Program, Ref, Slot
from widepack_artifacts.reader import Reader

X = ["x=float32[B,8]"]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)


class OneStep(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * 100 if x.shape[1] == 1 else y


class Centred(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y - y.mean(0) if x.shape[0] > 1 else y


class Counts(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.fc(x), x.shape[0]


class Noisy(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + torch.rand_like(x)


class Scaled(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.fc(x) * self.scale, self.scale, self.scale.exp()


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).squeeze()


class SqueezedBatch(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x).squeeze(0))


class SqueezedRows(Base):
    """Drops a dim of the batch's size, and adds one that broadcasts: right also where the size is 1."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return (y[:, None] * y.squeeze(0).unsqueeze(-2)).sum(1)


class Mixer(nn.Module):
    """A module with a norm whose width equals the size of another dim. Only the order of the dims differs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x).transpose(1, 2)) + self.fc(self.norm(x)[:, :, 3]).unsqueeze(1)


class Named(Base):
    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        return self.fc(x) + shared


class ScaledOnce(Base):
    """Changes its weights for inference at the first call."""

    ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.fc.weight.div_(2)
            self.ready = True
        y: Tensor = self.fc(x)
        return y


class ScaledAlways(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.weight.mul_(1.0001)
        y: Tensor = self.fc(x)
        return y


class ScaledByInputs(Base):
    """Changes its weights by its input. Equal calls leave them; other inputs get wrong answers."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.bias.copy_(x.mean(0))
        y: Tensor = self.fc(x)
        return y


class ScaledSeldom(Base):
    """Writes another value only for inputs that are never drawn."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.fc.bias.copy_(torch.where(x.mean() > 50, self.fc.bias * 2, self.fc.bias))
        y: Tensor = self.fc(x)
        return y


class Places(nn.Module):
    """Computes a table for the next call: it replaces one buffer and writes into another."""

    table: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(1, 3), persistent=False)
        self.register_buffer("scale", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[1] != x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype)[None].sin()
        self.scale.copy_(torch.linspace(0.5, 2, 8))
        return (x + self.table) * self.scale


class KeepsTables(Base):
    def __init__(self) -> None:
        super().__init__()
        self.places = Places()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.places(x))
        return y


class FirstRows(nn.Module):
    """Stores its first input."""

    first: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.first.shape[0] == 1:
            self.first = x.mean(0)
        return x - self.first


class SeldomAnother(FirstRows):
    """Stores another value only for inputs that are never drawn."""

    def forward(self, x: Tensor) -> Tensor:
        self.first = torch.where(x.mean() > 50, self.first + 1, self.first)
        return x - self.first


class KeepsFirst(KeepsTables):
    def __init__(self) -> None:
        super().__init__()
        self.places = FirstRows()


class KeepsSeldom(KeepsTables):
    def __init__(self) -> None:
        super().__init__()
        self.places = SeldomAnother()


class ShortAlone(Base):
    """Takes another path for one row with few steps, which the example does not have."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y * 100 if x.shape[0] == 1 and x.shape[1] <= 3 else y


class Single(Base):
    """Broadcasts a value without dims to a value of one dim."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        total, one = self.fc(x).mean(), self.one
        parts = [
            total.squeeze(0) * one.squeeze(-1),
            one.transpose(0, 0) + total.transpose(-1, 0),
            one.squeeze((0,)),
            total.permute([]),
        ]
        more = [
            one.unsqueeze(0).unsqueeze(-1),
            one.flatten(),
            one.softmax(0) + total,
            total.sum(0) * one.cumsum(-1),
            one.flip(0).amax(-1),
            one.reshape(1, 1).squeeze(0),
        ]
        return (*parts, *more)


class Limits(Base):
    """Calls ops with defaults that depend on the dtype."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y: Tensor = self.fc(x)
        ends = y.masked_fill(y < 0, -torch.inf)
        return (
            torch.nan_to_num(ends),
            torch.nan_to_num(-ends, nan=1.0, posinf=7.0),
            torch.nan_to_num(ends.half() - 1).neg(),
        )


class Doubled(Base):
    """Reads and writes by a mask that is computed twice."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        z = y.exp()
        z[y > 0] = y[y > 0] * 2 - 1
        return z


class Inverted(Base):
    def forward(self, x: Tensor) -> Tensor:
        m, y = x > self.fc.bias, self.fc(x) + 1
        y[~m] = -y[~m]
        return y


class Numbered(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        z = y * 3
        z[(y > 1).nonzero(as_tuple=True)] = y[y > 1].exp()
        return z


class Crossed(Base):
    """The mask of the written value differs from the mask of the read value."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        y[y > 0] = y[y > 0] - 1
        y[y > 0] = y[y > 0] + 5
        return y


class Island(Base):
    """Returns float32 outputs that a cast and autocast rounded to bfloat16 before."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        loss = nn.functional.cross_entropy(self.fc(x).bfloat16(), x.argmax(1)).float()
        with torch.autocast("cpu", torch.bfloat16):
            y = self.fc(x)
            z = self.fc(y.relu())
        return loss, z, z.float().mean(1, keepdim=True) + self.fc.bias


class Tiny(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y: Tensor = self.fc(x)
        return nn.functional.rms_norm(y * 1e-5, [8]), y / 3


class Halves(Base):
    """Splits a batch in two pieces. A batch of 1 gives one piece."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(p * 2 for p in self.fc(x).chunk(2))


class Remainders(Base):
    """Divides by a value that is 0 where the mask is false."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        mask, k = y > 0, (x > 0).long()
        z = torch.zeros_like(y)
        z[mask] = (100 % (k[mask] + 1)).float() + torch.frexp(y[mask])[0]
        return z


def built(make: Callable[[], nn.Module], inputs: Sequence[str], folder: Path) -> widepack.WideModel:
    return loaded(make, folder, *inputs, count=3)


@pytest.mark.extended
def test_a_squeezed_size_of_one(tmp_path: Path) -> None:
    ens = built(SqueezedRows, X, tmp_path)
    for x in (torch.randn(1, 8), torch.randn(3, 8)):
        agree(ens, SqueezedRows, x)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "inputs", "call", "letter"),
    [
        (OneStep, ["x=float32[B,T,8]"], (2, 1, 8), "T"),
        *((make, X, (1, 8), "B") for make in (Centred, Squeezed, SqueezedBatch)),
    ],
)
def test_another_path_at_size_one_is_refused(
    make: Callable[[], nn.Module], inputs: list[str], call: tuple[int, ...], letter: str, tmp_path: Path
) -> None:
    ens = built(make, inputs, tmp_path)
    with pytest.raises(InputError, match=f"{letter} = 1 .*2 <= {letter}.* the program may be wrong"):
        ens(torch.randn(call))
    agree(ens, make, torch.randn([3 if s == 1 else s for s in call]))


@pytest.mark.extended
def test_another_path_at_one_row_and_few_steps(tmp_path: Path) -> None:
    ens = built(ShortAlone, ["x=float32[B,T,8]"], tmp_path)
    with pytest.raises(InputError, match=r"B = 1 .*\(at T = "):
        ens(torch.randn(1, 2, 8))
    agree(ens, ShortAlone, torch.randn(2, 2, 8))


@pytest.mark.extended
def test_a_value_without_dims_is_broadcast(tmp_path: Path) -> None:
    ens = built(Single, X, tmp_path)
    for b in (1, 4):
        agree(ens, Single, torch.randn(b, 8))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "dtype"), [(Limits, "float32"), (Limits, "float64"), (Limits, "bfloat16"), (Tiny, "float32")]
)
def test_defaults_that_depend_on_the_dtype_are_those_of_the_member(
    make: type[Base], dtype: str, tmp_path: Path
) -> None:
    path = small_build(make, tmp_path, 3, inputs=[f"x={dtype}[B,8]"], dtype=dtype)
    x, low = torch.randn(4, 8).to(getattr(torch, dtype)), dtype == "bfloat16"
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if low else {"rtol": 1e-3, "atol": 1e-5}
    agree(widepack.load(path), make, x, dtype=x.dtype, **tolerance)
    record = Reader(path).manifest.verification
    assert record["truth"] == "float64"
    # the largest number of a dtype is not stored
    assert all(output["scale"] < 1e3 for rows in record["wide"].values() for output in rows)


@pytest.mark.extended
def test_a_region_of_low_precision_is_accepted(tmp_path: Path) -> None:
    ens = built(Island, X, tmp_path)
    record = Reader(tmp_path / "e.wide").manifest.verification
    assert record["truth"] == "float64"
    assert all(1e-5 < output["own_rms"] / output["scale"] < 1e-1 for output in record["wide"]["shared.0"])
    agree(ens, Island, torch.randn(5, 8), rtol=2e-2, atol=1e-2)


def test_only_rounding_makes_an_output_coarse() -> None:
    def node(name: str, out: str, *args: str) -> Node:
        return Node(name, "aten.relu.default", tuple(map(Ref, args)), {}, out)

    nodes = (
        node("low", "bfloat16[B]", "x"),
        node("back", "float32[B]", "low"),
        node("ids", "int64[B]", "low"),
        node("rows", "float32[B]", "ids", "x"),
    )
    outputs = tuple(Output(Ref(n), "stacked") for n in ("back", "rows", "x"))
    program = Program((), (Slot("x", "x", "stacked", "float32[B]"),), nodes, outputs)
    assert coarsest(program) == [torch.finfo(d).eps for d in (torch.bfloat16, torch.float32, torch.float32)]


class Clamped(Base):
    def forward(self, x: Tensor, most: float = float("inf")) -> Tensor:
        y: Tensor = self.fc(x).clamp(max=most)
        return y


@pytest.mark.extended
def test_a_default_that_is_infinite(tmp_path: Path) -> None:
    agree(built(Clamped, X, tmp_path), Clamped, torch.randn(4, 8))


def double_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    ).double()


@pytest.mark.extended
def test_members_in_float64_may_differ_by_their_rounding(tmp_path: Path) -> None:
    """No reference is more exact than float64, so the recorded error would be 0.

    A different order of sums is not an error.
    """
    path = small_build(double_net, tmp_path, 4, inputs=["input=float64[B,16]"])
    (record,) = Reader(path).manifest.verification["wide"]["shared.0"]
    assert 0 < record["own_rms"] < 1e-15 * record["scale"], "the error is not a few float64 roundings"
    x = torch.randn(5, 16, dtype=torch.float64)
    agree(widepack.load(path), double_net, x, rtol=1e-13, atol=1e-14)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("make", [Doubled, Inverted, Numbered, Crossed])
def test_equal_masks_are_one_mask(make: type[Base], tmp_path: Path) -> None:
    ens = built(make, X, tmp_path)
    reader = Reader(tmp_path / "e.wide")
    small = [
        w for w in reader.manifest.entries["forward"].wide if w.batch[0] == 1
    ]  # large batches run member after member
    loops = [n.op for w in small for n in reader.program(w.file).nodes if n.body is not None]
    assert not loops or make is Crossed
    agree(ens, make, torch.randn(7, 8))


def test_a_condition_that_a_batch_of_1_breaks_does_not_refuse_2(tmp_path: Path) -> None:
    ens = built(Halves, X, tmp_path)
    for b in (2, 3, 5):
        agree(ens, Halves, torch.randn(b, 8))
    with pytest.raises(InputError, match="B = 1"):
        ens(torch.randn(1, 8))


@pytest.mark.parametrize(
    ("fails", "kept"),
    [
        ([], set()),
        ([{"B": 1}], {0}),
        ([{"B": 1, "T": 1}], {2}),  # not needed: the condition on T refuses it
        ([{"T": 2}], {1, 2}),  # T = 1 is refused too; nothing shows that the other condition is not needed
        ([{"B": 1}, {"T": 1}], {0, 2}),
        ([{"T": 1}], {2}),  # the other condition that T = 1 breaks is not needed at T = 2
    ],
)
def test_a_condition_stays_where_it_is_needed(
    fails: list[dict[str, int]], kept: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def way(subject: object, sizes: dict[str, int], *, answered: bool = False) -> str:
        return "another" if any(all(sizes[d] == n for d, n in f.items()) for f in fails) else ""

    monkeypatch.setattr(small_sizes, "_difference_at", way)
    conditions = [["ne", "B", 1], ["gt", ["floordiv", "T", 3], 0], ["ne", "T", 1]]
    subject: Any = SimpleNamespace(sizes={"B": 4, "T": 6}, batch="B", module=lambda i: None)
    gone = small_sizes.needless(subject, {"B": (1, None), "T": (1, None)}, conditions)
    assert set(range(3)) - gone == kept


def test_masked_places_are_not_computed_if_they_could_raise(tmp_path: Path) -> None:
    ens, x = built(Remainders, X, tmp_path), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    agree(ens, Remainders, x, rtol=1e-4, atol=1e-5)


def test_a_number_computed_from_sizes_is_refused_as_an_output(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="a number that depends on the inputs' sizes"):
        built(Counts, X, tmp_path)
    assert not (tmp_path / "e.wide").exists()


def test_weights_that_only_the_first_call_changes_are_built(tmp_path: Path) -> None:
    ens, x = built(ScaledOnce, X, tmp_path), torch.randn(4, 8)
    for _ in range(2):
        agree(ens, ScaledOnce, x)
    assert all(torch.equal(ens.state_dict(1)[n], v) for n, v in member(ScaledOnce, 1).state_dict().items())


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "name"), [(ScaledAlways, "fc.weight"), (ScaledByInputs, "fc.bias"), (ScaledSeldom, "fc.bias")]
)
def test_weights_that_every_call_changes_are_refused(
    make: Callable[[], nn.Module], name: str, tmp_path: Path
) -> None:
    with pytest.raises(
        CaptureError,
        match=f"changes its parameters {name} (at every call of|by what it is given when) forward",
    ):
        built(make, X, tmp_path)
    assert not (tmp_path / "e.wide").exists()


def test_tables_kept_for_the_next_call(tmp_path: Path) -> None:
    ens, x = built(KeepsTables, X, tmp_path), torch.randn(4, 8)
    for _ in range(2):  # the stored value does not change the second call
        agree(ens, KeepsTables, x)


@pytest.mark.parametrize("make", [KeepsFirst, KeepsSeldom])
def test_a_stored_input_must_be_a_state(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError,
        match="changes places.first when forward runs in eval mode.*build with --state places.first",
    ):
        built(make, X, tmp_path)


def test_a_random_member_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="change from run to run: it draws random numbers by aten"):
        built(Noisy, X, tmp_path)
    assert not (tmp_path / "e.wide").exists()


def test_a_caller_may_write_into_an_answer(tmp_path: Path) -> None:
    ens, x = built(Scaled, X, tmp_path), torch.randn(2, 8)
    with torch.inference_mode():
        first = ens(x)[0].clone()
        for again in (ens(x), ens.each(torch.stack([x] * 3))):
            again[1].zero_()
            again[2].zero_()
        assert torch.equal(ens(x)[0], first)


@pytest.mark.extended
def test_a_norm_is_folded_only_along_its_dim(tmp_path: Path) -> None:
    agree(built(Mixer, ["x=float32[B,16,16]"], tmp_path), Mixer, torch.randn(5, 16, 16))


def test_an_input_may_have_the_name_of_a_preset(tmp_path: Path) -> None:
    ens = built(Named, [*X, "shared=float32[B,8]"], tmp_path)
    x, stacked = torch.randn(2, 8), torch.randn(3, 2, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            ens(x, shared=widepack.each(stacked)).clone(),
            torch.stack([member(Named, i)(x, stacked[i]) for i in range(3)]),
        )


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("seed", range(5))
def test_few_numbers_raise_no_false_alarm(seed: int, tmp_path: Path) -> None:
    """The member has one logit for each row. Its rms error is computed over all calls."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    paths = files_of(tmp_path, [member(make, 100 * seed + i) for i in range(8)])
    widepack.build(paths, tmp_path / "e.wide", model=make, inputs=["input=float32[B,16]"], **QUICK)
