"""Tests that the safetensors library reads weights files, and that writing and mapping make no copies."""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as reference_load
from torch import Tensor

from widepack_artifacts import weights
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.manifest_weights import ITEM_BYTES, Weight
from widepack_artifacts.weights import Weights

DTYPES = [getattr(torch, name) for name in ITEM_BYTES]


def values(shape: list[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns a tensor of random bytes, which includes NaNs and denormals."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = ITEM_BYTES[str(dtype).removeprefix("torch.")]
    return (
        torch.randint(0, 256, [*shape, size], generator=generator, dtype=torch.uint8)
        .view(dtype)
        .reshape(shape)
    )


def whole(value: Tensor) -> weights.Source:
    return lambda: iter([value])


def members(value: Tensor) -> weights.Source:
    return lambda: iter(value.unbind(0))


def bits(value: Tensor) -> bytes:
    return bytes(value.contiguous().view(-1).view(torch.uint8).tolist()) if value.numel() else b""


class Sink(io.BytesIO):
    """A file in memory that records the size of the largest piece written to it."""

    largest = 0

    def write(self, data: memoryview | bytes) -> int:  # type: ignore[override]  # accepts fewer types on purpose
        self.largest = max(self.largest, len(data))
        return super().write(data)


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()), max_size=8
    )
)
def test_the_reference_library_reads_it(rows: list[tuple[torch.dtype, list[int], bool]]) -> None:
    tensors = {
        f"w{i}": values([3, *shape] if stacked else shape, dtype, i)
        for i, (dtype, shape, stacked) in enumerate(rows)
    }
    sources = {
        f"w{i}": members(tensors[f"w{i}"]) if stacked else whole(tensors[f"w{i}"])
        for i, (_, _, stacked) in enumerate(rows)
    }
    file = io.BytesIO()
    size = weights.write(
        file, [(n, list(t.shape), t.dtype, sources[n]) for n, t in tensors.items()], {"format": "pt"}
    )
    assert size == len(file.getvalue())
    found = reference_load(file.getvalue())
    pairs = {n: torch.view_as_real(t) if t.dtype == torch.complex128 else t for n, t in tensors.items()}
    assert {n: (t.dtype, t.shape, bits(t)) for n, t in found.items()} == {
        n: (t.dtype, t.shape, bits(t)) for n, t in pairs.items()
    }


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=2)), max_size=12))
def test_data_is_aligned(rows: list[tuple[torch.dtype, list[int]]]) -> None:
    file = io.BytesIO()
    weights.write(
        file,
        [
            (f"w{i}", shape, dtype, whole(torch.zeros(shape, dtype=dtype)))
            for i, (dtype, shape) in enumerate(rows)
        ],
    )
    (length,) = struct.unpack("<Q", file.getvalue()[:8])
    assert (8 + length) % 64 == 0
    at = 0
    header = json.loads(file.getvalue()[8 : 8 + length])
    header.pop("__metadata__", None)
    for name, row in header.items():
        start, end = row["data_offsets"]
        assert start == at, f"{name}: the data has a hole before it"
        size = end - start
        assert start % min(64, size & -size or 64) == 0, f"{name} of {size} bytes starts at {start}"
        at = end


def test_maps_without_copies(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    a, b = values([3, 4, 5], torch.float32), values([7], torch.int64)
    with path.open("wb") as file:
        weights.write(file, [("a", [3, 4, 5], torch.float32, members(a)), ("b", [7], torch.int64, whole(b))])
    found = Weights([path])
    assert found.names == ["a", "b"] and "a" in found and "c" not in found and len(found) == 2
    assert found.info("a") == ("float32", [3, 4, 5])
    assert bits(found.get("a")) == bits(a) and bits(found.slice("a", 2)) == bits(a[2])
    assert found.get("a").data_ptr() == found.get("a").data_ptr()
    assert found.slice("a", 1).data_ptr() == found.get("a").data_ptr() + 4 * 5 * 4
    assert found.get("b").data_ptr() % 8 == 0


def test_writing_into_a_tensor_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        weights.write(file, [("a", [4], torch.float32, whole(torch.zeros(4)))])
    before = path.read_bytes()
    Weights([path]).get("a").fill_(7)
    assert path.read_bytes() == before


def test_one_part_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 256)
    alive: list[int] = []
    now = [0]

    class Part:
        def __init__(self) -> None:
            now[0] += 1
            self.value = torch.ones(100)

        def __del__(self) -> None:
            now[0] -= 1

    def parts() -> Iterator[Tensor]:
        for _ in range(10):
            part = Part()
            alive.append(now[0])
            yield part.value
            del part

    file = Sink()
    weights.write(file, [("a", [10, 100], torch.float32, parts)])
    assert max(alive) == 1 and file.largest <= 256
    assert reference_load(file.getvalue())["a"].shape == (10, 100)


def test_takes_views_of_any_strides() -> None:
    base = values([4, 6], torch.float32)
    file = io.BytesIO()
    views = {
        "t": base.t(),
        "step": base[::2, 1::3],
        "expand": base[:1].expand(3, 6),
        "grad": base.clone().requires_grad_(),
    }
    weights.write(file, [(n, list(v.shape), v.dtype, whole(v)) for n, v in views.items()])
    found = reference_load(file.getvalue())
    assert all(bits(found[n]) == bits(v.detach()) for n, v in views.items())


def test_conjugate_views_are_written_with_their_values() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    file = io.BytesIO()
    weights.write(file, [("c", [2], torch.complex64, whole(value.conj()))])
    assert torch.equal(reference_load(file.getvalue())["c"], value.conj().resolve_conj())


def test_complex128_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    value = values([3, 2], torch.complex128)
    with path.open("wb") as file:
        weights.write(
            file,
            [
                ("c", [3, 2], torch.complex128, members(value)),
                ("f", [2], torch.float64, whole(torch.ones(2, dtype=torch.float64))),
            ],
        )
    found = Weights([path])
    assert found.info("c") == ("complex128", [3, 2]) and found.info("f") == ("float64", [2])
    assert bits(found.get("c")) == bits(value) and bits(found.slice("c", 1)) == bits(value[1])
    Weights([path]).check(
        [
            Weight("c", "stacked", "complex128", [2], "buffer"),
            Weight("f", "shared", "float64", [2], "buffer"),
        ],
        3,
    )


@pytest.mark.parametrize("note", ["3", "{", '["x"]', '["a"]', "[3]", '["a", "a"]'])
def test_refuses_false_notes_on_complex_weights(tmp_path: Path, note: str) -> None:
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        weights.write(file, [("a", [3], torch.float64, whole(torch.zeros(3).double()))], {"complex128": note})
    with pytest.raises(ArtifactError, match="metadata complex128"):
        Weights([path])


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (lambda: [("a", [2], torch.complex32, whole(torch.zeros(2)))], "complex32, which has no form"),
        (lambda: [("a", [2], torch.float32, whole(torch.zeros(2)))] * 2, "the name occurs twice"),
        (lambda: [("__metadata__", [2], torch.float32, whole(torch.zeros(2)))], "reserved by the format"),
        (
            lambda: [("a", [2], torch.float32, whole(torch.zeros(2).double()))],
            "a part is float64, the weight float32",
        ),
        (lambda: [("a", [2], torch.float32, whole(torch.zeros(3)))], "more than the 8 bytes"),
        (
            lambda: [("a", [2, 2], torch.float32, members(torch.zeros(1, 2)))],
            "the parts have 8 bytes, its shape has 16",
        ),
    ],
)
def test_invalid_weights_are_not_written(
    entries: Callable[[], list[tuple[str, list[int], torch.dtype, weights.Source]]], words: str
) -> None:
    with pytest.raises(ArtifactError, match=words):
        weights.write(io.BytesIO(), entries())


def test_invalid_files_are_refused(tmp_path: Path) -> None:
    whole_file = io.BytesIO()
    weights.write(whole_file, [("a", [400], torch.float32, whole(torch.zeros(400)))])
    for name, data in {
        "empty": b"",
        "text": b"hello, world",
        "cut": whole_file.getvalue()[:-1],
        "long": whole_file.getvalue() + b"x",
        "huge": b"\xff" * 64,
    }.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ArtifactError, match=f"{name}: not a whole safetensors file"):
            Weights([path])
    with pytest.raises(ArtifactError, match="not a whole safetensors file"):
        Weights([tmp_path / "missing"])


def test_refuses_a_name_in_two_files(tmp_path: Path) -> None:
    for name in ("1", "2"):
        with (tmp_path / name).open("wb") as file:
            weights.write(file, [("a", [1], torch.float32, whole(torch.zeros(1)))])
    with pytest.raises(ArtifactError, match="'a' is in another file already"):
        Weights([tmp_path / "1", tmp_path / "2"])
    with pytest.raises(ArtifactError, match="'b' is in none"):
        Weights([tmp_path / "1"]).get("b")


def test_compares_files_and_table(tmp_path: Path) -> None:
    path = tmp_path / "w"
    shapes: dict[str, list[int]] = {"s": [2, 3], "c": [4], "r@0": [1], "r@1": [2], "over": [1]}
    with path.open("wb") as file:
        weights.write(file, [(n, s, torch.float32, whole(torch.zeros(s))) for n, s in shapes.items()])
    table = [
        Weight("s", "stacked", "float32", [3], "parameter"),
        Weight("c", "shared", "float16", [4], "parameter"),
        Weight("r", "ragged", "float32", [[1], [3]], "parameter"),
        Weight("gone", "shared", "int64", [], "buffer"),
    ]
    with pytest.raises(ArtifactError) as caught:
        Weights([path]).check(table, 2)
    assert str(caught.value).splitlines()[1:] == [
        "  c: float32[4] in the files, float16[4] in the manifest",
        "  gone: nothing in the files, int64[] in the manifest",
        "  over: float32[1] in the files, nothing in the manifest",
        "  r@1: float32[2] in the files, float32[3] in the manifest",
    ]
    good = [
        table[0],
        Weight("c", "shared", "float32", [4], "parameter"),
        Weight("r", "ragged", "float32", [[1], [2]], "parameter"),
    ]
    Weights([path]).check([*good, Weight("over", "shared", "float32", [1], "parameter")], 2)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_mapping_a_large_file_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    part = torch.zeros(2**22)
    with path.open("wb") as file:
        weights.write(file, [("a", [32, 2**22], torch.float32, lambda: iter([part] * 32))])

    def anonymous() -> int:
        return next(
            int(line.split()[1]) * 1024
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("RssAnon")
        )

    before = anonymous()
    found = Weights([path])
    assert float(found.get("a").sum()) == 0.0
    assert anonymous() - before < 0.05 * path.stat().st_size
