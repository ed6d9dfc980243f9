"""Tests that errors about fixed or bounded sizes name the input, the axis, the size and the source line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_builds import agree, built, loaded, refused
from torch import Tensor, nn

import widepack
from capture.size_members import BTC, Base, line_in_class
from widepack.capture.example import sizes_without_ones
from widepack.errors import InputError
from widepack_artifacts.reader import Reader
from widepack_cli.commands.inspect import lines


class Table(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.table  # fixes T


class Asserted(Base):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] == 8  # fixes B
        return self.fc(x)


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 6 * 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).flatten(1)
        return self.fc(y)  # fixes H and W


class Masked(Base):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        a = (h @ h.transpose(1, 2)).masked_fill(self.mask == 0, -1e9)  # fixes T
        return a.softmax(-1) @ h


class Integer(Base):
    def forward(self, x: Tensor) -> Tensor:
        t = int(x.shape[1])  # fixes T
        return self.fc(x) / t**0.5


class Counted(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * len(x)  # fixes B


class Ranged(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + torch.arange(8)[:, None]  # fixes T


class Unbound(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.fc(row) for row in x.unbind(0)])  # fixes B


class Remembered(Base):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.cell = nn.Parameter(torch.randn(8, 4)), nn.GRUCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x[:, 0], self.start)  # fixes B


class Windows(Base):
    def forward(self, x: Tensor) -> Tensor:  # [B, H, W, 3]
        b, h, w, c = x.shape
        rows = x.view(b, h // 7, 7, w // 7, 7, c)  # multiples
        return self.fc(rows.permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, c))


class Strict(Base):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today\nnor tomorrow")  # always


class Parted(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, -1).sum(-1)


class Rows(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).reshape(-1, 32)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "spec", "words"),
    [
        (Table, BTC, "x has 8 at axis 1 (T), fixed by ... the example's T = 24 ... Write x=float32[B,8,3]"),
        (
            Asserted,
            BTC,
            "x has 8 at axis 0 (B), fixed by ... B = 4: AssertionError ... Write x=float32[8,T,3] ... "
            "remove the assert",
        ),
        (
            Flattened,
            "x=float32[B,3,H,W]",
            "x has 6 at axis 2 (H) and x has 6 at axis 3 (W), fixed by ... Write x=float32[B,3,6,6]",
        ),
        (Masked, BTC, "x has 8 at axis 1 (T), fixed by ... Write x=float32[B,8,3]"),
        (
            Integer,
            BTC,
            "x has 24 at axis 1 (T), fixed by ... Give that size as a number ... remove int() and "
            "float() around sizes",
        ),
        (Counted, BTC, "x has 4 at axis 0 (B), fixed by ... write x.shape[0] for len(x)"),
        (Ranged, BTC, "x has 8 at axis 1 (T), fixed by ... Write x=float32[B,8,3]"),
        (Unbound, BTC, "x has 4 at axis 0 (B), fixed by ... instead of a Python list of its parts"),
        (Remembered, BTC, "x has 8 at axis 0 (B), fixed by ... Write x=float32[8,T,3]"),
    ],
)
def test_a_size_that_the_code_fixes(make: type[nn.Module], spec: str, words: str, tmp_path: Path) -> None:
    message = refused(make, tmp_path, inputs=[spec])
    for word in words.split(" ... "):
        assert word in message, message
    assert line_in_class(message, make).rpartition("# ")[2].startswith("fixes")


@pytest.mark.extended
def test_multiples_are_written_as_such(tmp_path: Path) -> None:
    message = refused(Windows, tmp_path, inputs=["x=float32[B,H,W,3]"])
    assert "takes H and W in multiples of 7 only" in message
    assert "Write x=float32[B,7*H,7*W,3]" in message
    assert line_in_class(message, Windows).endswith("# multiples")


@pytest.mark.extended
def test_a_proposed_spec_is_accepted(tmp_path: Path) -> None:
    for i, (make, spec) in enumerate(
        [(Table, "x=float32[B,8,3]"), (Flattened, "x=float32[B,3,6,6]"), (Windows, "x=float32[B,7*H,7*W,3]")]
    ):
        (tmp_path / str(i)).mkdir()
        entry = Reader(built(make, tmp_path / str(i), inputs=[spec])).manifest.entries["forward"]
        assert entry.inputs[0].type == spec.removeprefix("x=")


def test_a_member_that_accepts_no_input(tmp_path: Path) -> None:
    message = refused(Strict, tmp_path, inputs=["x=float32[B,3]"])
    assert "fails on the example (B = 4), also without widepack" in message
    assert "ValueError: not today. Describe inputs that it takes" in message
    assert line_in_class(message, Strict).endswith("# always")


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "shape", "axis"),
    [(Asserted, (8, 6, 3), 0), (Unbound, (5, 6, 3), 0), (Remembered, (8, 2, 3), 0), (Counted, (5, 6, 3), 0)],
)
def test_a_batch_without_a_named_dim_is_fixed(
    make: type[nn.Module], shape: tuple[int, ...], axis: int, tmp_path: Path
) -> None:
    """Without `dynamic` the size is fixed. The manifest, inspect and a refused call name it and its line."""
    path = built(make, tmp_path, sample=(torch.randn(shape),))
    manifest = Reader(path).manifest
    (sentence,) = manifest.entries["forward"].fixed
    assert sentence.startswith(f"x has {shape[axis]} at axis {axis} (B), fixed by test_sizes.py:")
    assert line_in_class(sentence, make).rpartition("# ")[2] == "fixes B"
    assert any(line.strip() == f"fixed   {sentence}" for line in lines("e.wide", manifest, False, False))
    ens, x = widepack.load(path), torch.randn(shape)
    with pytest.raises(InputError) as caught:
        ens(torch.randn(shape[0] + 1, *shape[1:]))
    assert f"input x has {shape[0] + 1} at axis 0" in str(caught.value)
    assert f"the model takes {shape[0]} there" in str(caught.value)
    assert sentence.partition("), ")[2] in str(caught.value)
    agree(ens, make, x)


def test_a_size_that_the_example_met_by_chance(tmp_path: Path) -> None:
    """widepack draws a batch of 4, which `view(4, -1)` accepts, and then tries another batch."""
    ens = loaded(Parted, tmp_path, BTC)
    for b in (8, 12, 20):
        agree(ens, Parted, torch.randn(b, 7, 3))
    with pytest.raises(InputError, match=r"B % 4 == 0|may be wrong there"):
        ens(torch.randn(3, 5, 3))


class AtMost(Base):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[0] <= 100  # bounds B
        return self.fc(x)


class Beyond(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 100:  # bounds B
            return self.fc(x) * 2
        return self.fc(x)


class Sliced(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(100, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.table[: x.shape[1]]  # bounds T


class Least(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] >= 5:  # bounds T
            return self.fc(x)
        return self.fc(x) * 2


class Between(Base):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] >= 4
        if x.shape[1] <= 50:  # bounds T
            return self.fc(x)
        return -self.fc(x)


class Upsampled(nn.Module):
    """Copies a batch of 64 or more first, as upsampling in diffusers does. The bound is in the member."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] >= 64:  # bounds B
            x = x.contiguous()
        return self.conv(nn.functional.interpolate(x, scale_factor=2.0))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "spec", "letter", "inside", "outside"),
    [
        (AtMost, BTC, "B", (100, 2, 3), (101, 2, 3)),
        (Beyond, BTC, "B", (100, 2, 3), (101, 2, 3)),
        (Sliced, BTC, "T", (2, 100, 3), (2, 101, 3)),
        (Least, BTC, "T", (2, 5, 3), (2, 4, 3)),
        (Between, BTC, "T", (2, 50, 3), (2, 51, 3)),
        (Upsampled, "x=float32[B,3,H,W]", "B", (63, 3, 4, 4), (64, 3, 4, 4)),
    ],
)
def test_a_bound_names_its_line(
    make: type[nn.Module],
    spec: str,
    letter: str,
    inside: tuple[int, ...],
    outside: tuple[int, ...],
    tmp_path: Path,
) -> None:
    path = built(make, tmp_path, inputs=[spec])
    manifest = Reader(path).manifest
    source = manifest.entries["forward"].dims[letter].source
    code = line_in_class(source.rpartition(" and ")[2], make)
    assert code.endswith(f"# bounds {letter}")
    assert any(
        line.strip().startswith(f"dim     {letter} from") and line.endswith(f"({source})")
        for line in lines("e.wide", manifest, False, False)
    )
    ens, x = widepack.load(path), torch.randn(inside)
    agree(ens, make, x)
    with pytest.raises(InputError) as caught:
        ens(torch.randn(outside))
    assert f"{letter} = {outside['BT'.index(letter)]}" in str(caught.value)
    assert source in str(caught.value)


@pytest.mark.extended
def test_a_bound_that_the_user_gave_names_no_line(tmp_path: Path) -> None:
    dims = Reader(built(AtMost, tmp_path, inputs=[BTC, "B=1..50"])).manifest.entries["forward"].dims
    assert (dims["B"].max, dims["B"].source) == (50, "")


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 8, 1)
        self.c, self.d = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.b(self.a(x).relu()).relu()))


@pytest.mark.extended
@pytest.mark.parametrize("threads", [1, 2])
def test_a_convolutions_kernel_bounds_nothing(threads: int, tmp_path: Path) -> None:
    """torch chooses a convolution kernel by batch and threads. The choice must not become a condition."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        path = built(Convolutions, tmp_path, inputs=["x=float32[B,3,H,W]"])
    finally:
        torch.set_num_threads(before)
    entry = Reader(path).manifest.entries["forward"]
    assert [(d.min, d.max) for d in entry.dims.values()] == [(1, None)] * 3
    assert entry.guards == ()
    ens, x = widepack.load(path), torch.randn(70, 3, 5, 6)
    agree(ens, Convolutions, x, rtol=1e-4, atol=1e-5)


def test_the_number_of_output_rows_is_right(tmp_path: Path) -> None:
    ens = loaded(Rows, tmp_path, BTC)
    for b, t in ((4, 2), (2, 12), (6, 4)):
        agree(ens, Rows, torch.randn(b, t, 3))
    with pytest.raises(InputError, match="its program may be wrong there"):
        ens(torch.randn(1, 3, 3))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv1d(3, 4, 5), nn.MaxPool1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(x)).amax(-1)


def test_a_pooled_length_is_dynamic(tmp_path: Path) -> None:
    """The built program accepts lengths of 8 and more, as the member does.

    torch's max_pool1d fixes the length, and torch.export assumes a pooled length above 1.
    """
    ens = widepack.load(built(Pooled, tmp_path, inputs=["x=float32[B,3,T]"]))
    for b, t in ((1, 8), (2, 9), (3, 24), (5, 57)):
        agree(ens, Pooled, torch.randn(b, 3, t), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"from test_sizes\.py:\d+ in forward: return self\.pool"):
        ens(torch.randn(2, 3, 6))


class Distances(Base):
    """Calls torch's cdist, which chooses its method by the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.few = nn.Parameter(torch.randn(30, 4)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, modes = (
            self.fc(x),
            ("use_mm_for_euclid_dist_if_necessary", "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"),
        )
        by_mode = [torch.cdist(y, self.few, compute_mode=m) for m in modes]
        by_p = [torch.functional.cdist(y, self.rows, p) for p in (0.0, 1.0, 1.5, 2.0, float("inf"))]
        return (*by_mode, *by_p, torch.cdist(self.few[None], y[:, None]))


@pytest.mark.extended
def test_distances_of_any_number_of_rows(tmp_path: Path) -> None:
    ens = widepack.load(built(Distances, tmp_path, inputs=["x=float32[B,3]"]))
    for b in (1, 2, 25, 26, 70):
        agree(ens, Distances, torch.randn(b, 3), rtol=1e-4, atol=1e-4)


class Relative(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(31))

    def forward(self, x: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        return self.fc(x) + self.table[i[:, None] - i + 15].sum(1, keepdim=True)  # past the table


def test_an_example_that_only_values_refuse(tmp_path: Path) -> None:
    """torch.export has tensors without values, and does not detect an index outside a table."""
    message = refused(Relative, tmp_path, inputs=[BTC])
    assert "fails on the example's T = 24, also without widepack" in message
    assert "bounds such as T=2..16" in message
    assert line_in_class(message, Relative).endswith("# past the table")
    ens, x = loaded(Relative, tmp_path, BTC, "T=2..16"), torch.randn(3, 16, 3)
    agree(ens, Relative, x)


class Lengths(Base):
    def forward(self, ids: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.fc(rows.data).sum() + ids.sum()


def test_integers_without_bounds_are_named_with_theirs(tmp_path: Path) -> None:
    message = refused(Lengths, tmp_path, inputs=["ids=int64[B]:0..99", "lengths=int64[B]", BTC])
    assert "Length of all samples has to be greater than 0" in message
    way = "where the values 0 and 1 of lengths are wrong, give bounds such as lengths=int64[B]:1..8"
    assert message.endswith(way)


class Strided(nn.Module):
    """A module with five strides of 2. 32 rows give one row, which torch.export would take for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(*[nn.Conv2d(3 if i == 0 else 4, 4, 3, 2, 1) for i in range(5)])
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.convs(x).mean((2, 3)))
        return y


class EveryThird(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)[1::3]
        return y


@pytest.mark.extended
@pytest.mark.parametrize(
    ("make", "inputs", "shapes"),
    [
        (Strided, ["x=float32[B,3,H,W]"], [(2, 3, 64, 96), (2, 3, 32, 32), (1, 3, 20, 200)]),
        (
            Strided,
            ["x=float32[B,3,H,W]", "H=32..512", "W=32..512"],
            [(2, 3, 64, 96), (2, 3, 33, 32), (1, 3, 32, 32)],
        ),
        (EveryThird, ["x=float32[B,3]"], [(4, 3), (5, 3), (17, 3)]),
    ],
)
def test_an_inner_size_of_one_in_the_example_is_not_a_condition(
    make: type[nn.Module], inputs: list[str], shapes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    ens = loaded(make, tmp_path, *inputs)
    for shape in shapes:
        agree(ens, make, torch.randn(shape), rtol=1e-4, atol=1e-5)


def test_sizes_at_which_no_inner_size_is_one() -> None:
    one = ["eq", ["floordiv", "H", 32], 1]
    assert sizes_without_ones({"B": 4, "H": 32}, [one, ["le", "B", 9]], {}) == {"B": 4, "H": 64}
    assert sizes_without_ones({"B": 4, "H": 32}, [one], {"H": (32, 63)}) is None, (
        "a size outside the user's bounds is proposed"
    )
    assert sizes_without_ones({"B": 4, "H": 32}, [["ne", "H", 1], ["eq", ["mod", "H", 32], 0]], {}) is None
    assert sizes_without_ones(
        {"H": 2}, [["eq", ["floordiv", "H", 4096], 1], ["eq", ["floordiv", "H", 2], 1]], {}
    ) == {"H": 4}
    assert sizes_without_ones({"H": 2}, [["eq", ["sub", "H", ["sub", "H", 1]], 1]], {}) is None, "always 1"
