"""Tests corrections: every member's weight bit for bit, and damaged or hostile data."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fleet.drawn_fleets import drawn_fleet
from widepack.errors import ArtifactError
from widepack.fleet.factors import Factors, Residual
from widepack.fleet.unmerge import unmerge
from widepack_artifacts.correction import MAGIC, VERSION, encode_correction, rounded, whole

HEADER = struct.Struct("<4sBBQQQQ32s")
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def factors_of(
    dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (96, 128)
) -> tuple[Factors, list[Tensor]]:
    base, members = drawn_fleet(shape, (4, 0, 8), dtype, 0.05)
    found = unmerge(members, base)
    assert isinstance(found, Factors)
    return found, members


def equal_bits(a: Tensor, b: Tensor) -> bool:
    integers = BITS.get(a.dtype, torch.int16)
    return a.dtype == b.dtype and torch.equal(a.view(integers), b.view(integers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(96, 128), (32, 16, 3, 3)])
def test_weights_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    factors, members = factors_of(dtype, shape)
    for i, member in enumerate(members):
        correction = encode_correction(member, factors, i)
        assert equal_bits(whole(factors, i, correction), member)
        assert 8 * len(correction) <= 2 * member.numel() + 8 * 128
    assert equal_bits(rounded(factors, 1), factors.base)


def test_padding_of_other_ranks_does_not_matter() -> None:
    factors, members = factors_of()
    correction = encode_correction(members[0], factors, 0)
    wider = Factors(
        factors.base,
        torch.cat([factors.left, torch.zeros(3, 96, 4)], 2),
        torch.cat([factors.right, torch.zeros(3, 4, 128)], 1),
        factors.ranks,
        factors.residual,
        factors.source,
    )
    assert equal_bits(whole(wider, 0, correction), members[0])


def without_factors(base: Tensor) -> Factors:
    rows, columns = base.shape
    empty = torch.zeros(1, rows, 0), torch.zeros(1, 0, columns)
    return Factors(base, *empty, [0], Residual(0.0, 0.0), "given")


@given(
    a=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=13),
    b=st.integers(0, 2**64 - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
def test_any_bits_of_any_base(a: list[int], b: int, dtype: torch.dtype) -> None:
    """Any bit pattern comes back: signs of zero, NaN with any payload, the far ends of a dtype."""
    integers = BITS.get(dtype, torch.int16)
    bits = torch.iinfo(integers).bits

    def numbers(values: list[int]) -> Tensor:
        signed = [(v % 2**bits + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for v in values]
        return torch.tensor(signed, dtype=integers).view(dtype).reshape(1, -1)

    weight, base = numbers(a), numbers([b] * len(a))
    factors = without_factors(base)
    assert equal_bits(whole(factors, 0, encode_correction(weight, factors, 0)), weight)


def test_values_that_are_easily_confused() -> None:
    base = torch.tensor([[0.0, -0.0, 0.0, 1.0, float("inf"), float("nan")]])
    weight = torch.tensor([[-0.0, 0.0, 1e-45, -1.0, float("-inf"), 0.0]])
    factors = without_factors(base)
    assert equal_bits(whole(factors, 0, encode_correction(weight, factors, 0)), weight)


def test_wrong_arguments() -> None:
    factors, members = factors_of()
    with pytest.raises(IndexError, match="there is no member 3; the factors are of 3 members"):
        encode_correction(members[0], factors, 3)
    with pytest.raises(IndexError, match="there is no member -1"):
        whole(factors, -1, encode_correction(members[0], factors, 0))
    with pytest.raises(ValueError, match=r"the weight is torch.float32 \[96\]"):
        encode_correction(torch.zeros(96), factors, 0)


def test_the_correction_of_another_member_is_refused() -> None:
    factors, members = factors_of()
    with pytest.raises(ArtifactError, match="the correction of member 2: it gives a weight of another SHA"):
        whole(factors, 2, encode_correction(members[0], factors, 0))


def changed(data: bytes, **fields: object) -> bytes:
    names = ("magic", "version", "size", "count", "signs", "sizes", "large", "digest")
    values = dict(zip(names, HEADER.unpack_from(data))) | fields
    return HEADER.pack(*(values[name] for name in names)) + data[HEADER.size :]


def test_damaged_headers() -> None:
    factors, members = factors_of()
    good = encode_correction(members[0], factors, 0)
    cases = {
        "its header has": good[:40],
        "it is of a newer widepack": changed(good, version=VERSION + 1),
        "it begins with 41 42": changed(good, magic=b"ABCD"),
        "of 7 elements of 4 bytes; the weight has 12288": changed(good, count=7),
        "elements of 2 bytes": changed(good, size=2),
        "streams of": changed(good, signs=2**63),
        "and 0 follow": good[: HEADER.size],
        "another SHA-256": changed(good, digest=bytes(32)),
    }
    for message, data in cases.items():
        with pytest.raises(ArtifactError, match=message):
            whole(factors, 0, data)


def test_cut_and_changed_bytes_are_refused_or_harmless() -> None:
    factors, members = factors_of()
    good = encode_correction(members[0], factors, 0)
    for at in range(0, len(good), max(1, len(good) // 60)):
        with pytest.raises(ArtifactError):
            whole(factors, 0, good[:at])
        bad = bytearray(good)
        bad[at] ^= 0x11
        with pytest.raises(ArtifactError):
            whole(factors, 0, bytes(bad))
    with pytest.raises(ArtifactError):
        whole(factors, 0, good + b"\0")


def test_a_bomb_takes_no_memory() -> None:
    """A stream of 200 MB of zeros in 200 kB is refused after the few bytes that the weight needs."""
    factors, _ = factors_of()
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(200)) + packer.flush()
    data = HEADER.pack(MAGIC, VERSION, 4, 96 * 128, len(bomb), 0, 0, bytes(32)) + bomb
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match="a stream of other than 2458 bytes"):
            whole(factors, 0, data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_signs_out_of_range_are_refused() -> None:
    factors, _ = factors_of()
    stream = zlib.compress(b"\xf3" * 2458)
    data = HEADER.pack(MAGIC, VERSION, 4, 96 * 128, len(stream), 0, 0, bytes(32)) + stream
    with pytest.raises(ArtifactError, match="a byte of the signs is over 242"):
        whole(factors, 0, data)
