"""Tests that factored weights read back, and that members' weights come from their factors bit for bit."""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forged import golden
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from widepack import load
from widepack_artifacts import weights as weights_module
from widepack_artifacts.correction import StackedFactors, encode_correction
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.factored import FLOATS, Factored, FactoredWeight
from widepack_artifacts.file_list import File
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.manifest_weights import FACTOR, Weight
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights

HASH = "0123456789abcdef" * 4
CORRECTIONS = f"corrections-{HASH[:16]}.safetensors"
FILES = {CORRECTIONS: File(1, HASH)}
RANKS = [2, 0, 3, 1]
COUNT = len(RANKS)


# -------------------------------------------------------------------- JSON


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Factored, list[Weight], int]:
    """Draws factored weights, their table of stored weights, and the number of members."""
    members = draw(st.integers(1, 5))
    names = draw(st.lists(st.text("abc.@é", min_size=1, max_size=4), min_size=1, max_size=4, unique=True))
    rows, found = [], []
    for i, name in enumerate(names):
        shape = draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
        outputs, inputs = shape[0], math.prod(shape[1:])
        rank = draw(st.integers(1, min(outputs, inputs)))
        base, dtype = draw(st.sampled_from(FLOATS)), draw(st.sampled_from(FLOATS))
        rows += [
            Weight(f"{i} base", "shared", base, shape, FACTOR),
            Weight(f"{i} left", "stacked", dtype, [outputs, rank], FACTOR),
            Weight(f"{i} right", "stacked", dtype, [rank, inputs], FACTOR),
        ]
        ranks = draw(st.lists(st.integers(0, rank), min_size=members, max_size=members))
        aliases = [f"{i} alias {k}" for k in range(draw(st.integers(0, 2)))]
        role = draw(st.sampled_from(["parameter", "buffer"]))
        parts = (f"{i} base", f"{i} left", f"{i} right")
        scale = draw(st.sampled_from([None, [outputs, 1], [1, inputs]]))
        if scale is not None:
            rows.append(Weight(f"{i} scale", "stacked", dtype, scale, FACTOR))
        named = "" if scale is None else f"{i} scale"
        found.append(FactoredWeight(name, role, *parts, ranks, aliases, named))
    return Factored(tuple(found), draw(st.sampled_from(["", CORRECTIONS]))), rows, members


@given(drawn())
def test_factored_weights_read_back(case: tuple[Factored, list[Weight], int]) -> None:
    factored, rows, members = case
    assert Factored.from_json(factored.to_json(), rows, members, FILES) == factored
    for weight in factored.weights:
        assert FactoredWeight.from_json(weight.to_json()) == weight


@given(drawn())
def test_manifests_with_factored_weights_read_back(case: tuple[Factored, list[Weight], int]) -> None:
    factored, rows, members = case
    old = Reader(golden("mlp")).manifest
    entry = old.entries["forward"]
    row = Weight("more", "shared", "float32", [2], "parameter")
    manifest = replace(
        old,
        members=tuple(replace(old.members[0], name=f"m{i}") for i in range(members)),
        weights=(*rows, row),
        factored=factored,
        entries={"forward": replace(entry, signatures=[0] * members)},
    ).sealed({**old.files, **FILES})
    assert manifest.version == (1, 4)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    table = {w.name: w for w in rows}
    assert manifest.member_weights == (row, *(w.weight(table) for w in factored.weights))
    for found, weight in zip(manifest.member_weights[1:], factored.weights):
        base = table[weight.base]
        assert (found.name, found.role, found.aliases) == (weight.name, weight.role, weight.aliases)
        assert (found.kind, found.dtype, found.shape) == ("stacked", base.dtype, base.shape)


@given(drawn(), st.data())
def test_no_change_of_a_number_or_text_is_read_as_another_error(
    case: tuple[Factored, list[Weight], int], data: st.DataObject
) -> None:
    """A changed value is refused with an ArtifactError, or reads back as it is."""
    factored, rows, members = case
    document: Any = factored.to_json()
    row = data.draw(st.sampled_from(document["weights"]))
    values = (
        st.none() | st.integers(-2, 7) | st.text("a0 @", max_size=3) | st.lists(st.integers(0, 3), max_size=4)
    )
    row[data.draw(st.sampled_from(sorted(row)))] = data.draw(values)
    try:
        found = Factored.from_json(document, rows, members, FILES)
    except ArtifactError:
        return
    assert found.to_json() == document


def test_a_manifest_without_factored_weights_has_no_such_key() -> None:
    manifest = Reader(golden("parts")).manifest
    assert "factored" not in manifest.to_json() and manifest.factored == Factored()
    assert manifest.member_weights == manifest.weights


# -------------------------------------------------------------------- the members' weights


def numbers(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Stored:
    """Files of one factored weight `w` of four members. Their factors are not 0 after their rank, which no
    reader reads for a member.
    """

    def __init__(
        self,
        folder: Path,
        base: torch.dtype,
        factors: torch.dtype,
        shape: list[int],
        corrected: bool,
        scaled: str = "",
    ) -> None:
        self.base = numbers(shape, base, 0)
        inputs = math.prod(shape[1:])
        self.left, self.right = (
            numbers([COUNT, shape[0], 3], factors, 1),
            numbers([COUNT, 3, inputs], factors, 2),
        )
        stored = {"b": self.base, "l": self.left, "r": self.right}
        self.scale = None
        if scaled:
            size = [shape[0], 1] if scaled == "outputs" else [1, inputs]
            self.scale = stored["s"] = numbers([COUNT, *size], factors, 3)
        save_file(stored, folder / "weights.safetensors")
        row = FactoredWeight("w", "parameter", "b", "l", "r", RANKS, scale="s" if scaled else "")
        self.factored = Factored((row,))
        self.members = [numbers(shape, base, 10 + i) for i in range(COUNT)]
        self.corrections = folder / "corrections.safetensors" if corrected else None
        if self.corrections is not None:
            save_file({f"w@{i}": self.correction(i) for i in (0, 1, 3)}, self.corrections)
        self.weights = Weights([folder / "weights.safetensors"], self.factored, self.corrections)

    def correction(self, i: int) -> Tensor:
        factors = StackedFactors(self.base, self.left, self.right, RANKS, self.scale)
        return torch.frombuffer(bytearray(encode_correction(self.members[i], factors, i)), dtype=torch.uint8)

    def product(self, i: int, rank: int) -> Tensor:
        """Returns the weight that the factors give, by Python's floats, which are float64."""
        base, left, right = (t.double().tolist() for t in (self.base.flatten(1), self.left[i], self.right[i]))
        rows = []
        for o, row in enumerate(base):
            for k, number in enumerate(row):
                total = left[o][0] * right[0][k] if rank else 0.0
                for j in range(1, rank):
                    total = total + left[o][j] * right[j][k]
                total = total + number if rank else number
                if self.scale is not None:
                    of = self.scale[i].double()
                    total = total * float(of[o, 0] if of.shape[1] == 1 else of[0, k])
                rows.append(total)
        exact = torch.tensor(rows, dtype=torch.float64)
        if self.base.dtype in (torch.float16, torch.bfloat16):
            exact = exact.float()
        return exact.to(self.base.dtype).reshape(self.base.shape)


def bits(x: Tensor) -> bytes:
    return bytes(x.contiguous().flatten().view(torch.uint8).tolist())


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.extended(keep=64)
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("factors", DTYPES)
@pytest.mark.parametrize("base", DTYPES)
@pytest.mark.parametrize("shape", [[6, 5], [4, 2, 3, 1]])
@pytest.mark.parametrize("scaled", ["", "outputs", "inputs"])
def test_a_members_weight_bit_for_bit(
    tmp_path: Path, base: torch.dtype, factors: torch.dtype, shape: list[int], corrected: bool, scaled: str
) -> None:
    stored = Stored(tmp_path, base, factors, shape, corrected, scaled)
    for i, rank in enumerate(RANKS):
        found = stored.weights.of_member("w", "stacked", i)
        exact = stored.members[i] if corrected and i != 2 else stored.product(i, rank)
        assert (found.dtype, list(found.shape)) == (base, shape)
        assert bits(found) == bits(exact), i
    assert bits(stored.weights.get("b")) == bits(stored.base), "no weight is computed in the mapped memory"


def test_halves_are_rounded_to_float32_first(tmp_path: Path) -> None:
    """1 + 2^-8 + 2^-40 is nearer to 1 + 2^-7 than to 1. Rounded to float32, it is halfway, and becomes 1."""
    stored = Stored(tmp_path, torch.bfloat16, torch.float64, [2, 2], False)
    stored.weights.get("b").fill_(1.0)
    stored.weights.get("l").fill_(1.0)
    stored.weights.get("r").fill_(2.0**-8 + 2.0**-40)
    assert stored.weights.of_member("w", "stacked", 3).tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_factors_that_were_replaced(tmp_path: Path) -> None:
    stored = Stored(tmp_path, torch.float32, torch.float32, [6, 5], True)
    weights = stored.weights
    assert weights.computed("w", 0) is None
    held = weights.of_member("w", "stacked", 0)
    assert weights.computed("w", 0) is held is weights.of_member("w", "stacked", 0)
    assert weights.computed("w", 1) is None
    assert weights.factors_of("w", 0)[0] == 2 and weights.factors_of("w", 2) == (3, b"")
    weights.replace_factors("w", 0, 3, b"")
    assert weights.factors_of("w", 0) == (3, b"")
    assert weights.of_member("w", "stacked", 0) is held, "the caller writes into it"
    del held
    gc.collect()
    assert weights.computed("w", 0) is None
    assert bits(weights.of_member("w", "stacked", 0)) == bits(stored.product(0, 3))
    other = bytes(stored.correction(3).tolist())
    weights.replace_factors("w", 3, 1, other)
    assert bits(weights.of_member("w", "stacked", 3)) == bits(stored.members[3])
    weights.replace_factors("w", 2, 1, other)
    with pytest.raises(
        ArtifactError, match="weight w: the correction of member 2: it gives a weight of another"
    ):
        weights.of_member("w", "stacked", 2)


# -------------------------------------------------------------------- what is read when


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The corrections that are read and the members' weights that are computed, in order."""
    done: list[str] = []

    def recorded(name: str) -> None:
        plain = getattr(weights_module, name)

        def function(*args: Any) -> Any:
            done.append(name)
            return plain(*args)

        monkeypatch.setattr(weights_module, name, function)

    for name in ("views", "whole", "rounded"):
        recorded(name)
    return done


def test_no_correction_is_read_before_a_members_weight_is(tmp_path: Path, read: list[str]) -> None:
    stored = Stored(tmp_path, torch.float32, torch.float32, [6, 5], True)
    rows = [
        Weight("b", "shared", "float32", [6, 5], FACTOR),
        Weight("l", "stacked", "float32", [6, 3], FACTOR),
        Weight("r", "stacked", "float32", [3, 5], FACTOR),
    ]
    stored.weights.check(rows, COUNT)
    stored.weights.check_unchanged()
    assert stored.weights.slice("l", 1).shape == (6, 3) and stored.weights.names == ["b", "l", "r"]
    assert read == []
    stored.weights.of_member("w", "stacked", 2)
    assert read == ["rounded"]
    stored.weights.of_member("w", "stacked", 1)
    assert read == ["rounded", "views", "whole"]


def test_calls_of_all_members_read_no_correction(read: list[str]) -> None:
    ens = load(golden("fleet"))
    ens(torch.zeros(2, 24))
    ens.each(torch.zeros(3, 2, 24))
    assert read == []
    ens.member(1)(torch.zeros(2, 24))
    assert read.count("whole") == 2 and "rounded" not in read


def test_corrections_that_change_in_place_are_noticed(tmp_path: Path) -> None:
    stored = Stored(tmp_path, torch.float32, torch.float32, [6, 5], True)
    assert stored.corrections is not None
    stored.weights.check_unchanged()
    data = bytearray(stored.corrections.read_bytes())
    data[-1] ^= 1
    with open(stored.corrections, "r+b") as file:
        file.write(data)
    with pytest.raises(ArtifactError, match="corrections"):
        stored.weights.check_unchanged()
