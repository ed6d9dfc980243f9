"""Encodes what the factors lack of a member's weight, and restores the weight bit for bit.

The factors give a weight in a fixed order of float64 operations, one product and one sum of all elements for
each direction, so that every machine gets the same bits. The correction has, for each element, by how many
ulps the member's number is above that: a difference of bit patterns, ordered so that neighbouring numbers
differ by one.

    header   magic, version, bytes of an element, number of elements, lengths of the streams, SHA-256 of the
             weight's bytes; little-endian
    signs    -1, 0 or 1 for each element, five in a byte: the sum of (sign[j] + 1) * 3 ** (4 - j)
    sizes    one byte for each sign that is not 0: its ulps less 1, or 255 if they are in the next stream
    large    the other differences as int64

Each stream is compressed with zlib, and absent if it is empty. The reader knows each stream's size before it
decompresses it.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .errors import ArtifactError

MAGIC = b"wpcr"
VERSION = 1
_HEADER = struct.Struct("<4sBBQQQQ32s")
_INTEGERS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
_IN_A_BYTE = 5
_PLACES = (81, 27, 9, 3, 1)
_LARGE = 255
_BLOCK = 1 << 18  # elements that are computed at once, so that they stay in the processor's cache
_AGAIN = "the artifact is damaged, or its factors are of another build; build or copy it again"


class Factors(Protocol):
    """The factors of one weight of N members.

    base: of the weight's shape. left: [N, O, r]. right: [N, r, I]. ranks: of each member; the columns of its
    left factor after them are not read. scale: [N, O, 1] or [N, 1, I], which multiplies the sum; None if
    nothing does.
    """

    @property
    def base(self) -> Tensor: ...
    @property
    def left(self) -> Tensor: ...
    @property
    def right(self) -> Tensor: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def scale(self) -> Tensor | None: ...


@dataclass(frozen=True)
class StackedFactors:
    """The factors of some members, as the files of an artifact have them. The fields: see `Factors`."""

    base: Tensor
    left: Tensor
    right: Tensor
    ranks: Sequence[int]
    scale: Tensor | None = None


def rounded(factors: Factors, i: int) -> Tensor:
    """Returns the weight that the factors give for member i, on the CPU, before any correction.

    Args:
        factors: Of the weight.
        i: The member.

    Returns: `(base + left[i] @ right[i]) * scale[i]`, rounded to the dtype of the base.

    Raises:
        IndexError: There is no member i.
    """
    if not 0 <= i < len(factors.ranks):
        raise IndexError(f"there is no member {i}; the factors are of {len(factors.ranks)} members")
    rank = factors.ranks[i]
    if not rank and factors.scale is None:
        return factors.base.detach().cpu().clone()
    base = factors.base.detach().cpu().flatten(1)
    left = factors.left[i, :, :rank].detach().cpu().double()
    right = factors.right[i, :rank].detach().cpu().double()
    scale = None if factors.scale is None else factors.scale[i].detach().cpu().double()
    result = torch.empty_like(base)
    step = max(1, _BLOCK // max(1, base.shape[1]))
    for start in range(0, base.shape[0], step):
        rows = slice(start, start + step)
        total = _sum(base[rows], left[rows], right)
        if scale is not None:
            total.mul_(scale[rows] if scale.shape[0] == base.shape[0] else scale)
        result[rows] = total.to(base.dtype)
    return result.reshape(factors.base.shape)


def _sum(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Returns `base + left @ right` in float64, in the order that the format defines."""
    if not left.shape[1]:
        return base.to(torch.float64, copy=True)
    total = left[:, :1] * right[:1]
    term = torch.empty_like(total)
    for k in range(1, left.shape[1]):
        # Two operations: one that multiplies and adds rounds once or twice, as the machine has it.
        torch.mul(left[:, k : k + 1], right[k : k + 1], out=term)
        total.add_(term)
    return total.add_(base)


def encode_correction(weight: Tensor, factors: Factors, i: int) -> bytes:
    """Returns the correction with which `whole` gives a member's weight bit for bit.

    Args:
        weight: Of the member, as its checkpoint has it.
        factors: Of the weight.
        i: The member.

    Returns: the correction. It is small if the factors are those of this weight.

    Raises:
        IndexError: There is no member i.
        ValueError: The weight has another shape or dtype than the factors.
    """
    guess = rounded(factors, i)
    if weight.shape != guess.shape or weight.dtype != guess.dtype:
        raise ValueError(
            f"the weight is {weight.dtype} {list(weight.shape)}, and its factors are of"
            f" {guess.dtype} {list(guess.shape)}"
        )
    exact = weight.detach().cpu().contiguous()
    steps = _ordered(exact).sub_(_ordered(guess))
    if exact.dtype != torch.float64:  # a difference of int64 wraps as it must
        bits = 8 * exact.element_size()
        steps = ((steps + (1 << (bits - 1))) & ((1 << bits) - 1)) - (1 << (bits - 1))
    signs = steps.sign()
    other = steps[signs != 0]
    small = (other.abs() <= _LARGE) & (other != torch.iinfo(torch.int64).min)
    sizes = torch.where(small, other.abs() - 1, _LARGE).to(torch.uint8)
    streams = [_packed(_five(signs)), _packed(_bytes(sizes)), _packed(_bytes(other[sizes == _LARGE]))]
    header = _HEADER.pack(
        MAGIC, VERSION, exact.element_size(), exact.numel(), *map(len, streams), _digest(exact)
    )
    return b"".join([header, *streams])


def whole(factors: Factors, i: int, correction: bytes) -> Tensor:
    """Returns a member's weight, bit for bit as its checkpoint has it.

    Args:
        factors: Of the weight.
        i: The member.
        correction: Of the member, from `encode_correction`. It may be of an untrusted file.

    Returns: the weight, on the CPU.

    Raises:
        IndexError: There is no member i.
        ArtifactError: The correction is damaged, of an unknown version, or of another weight.
    """
    what = f"the correction of member {i}"
    if len(correction) < _HEADER.size:
        raise ArtifactError(f"{what}: {len(correction)} bytes; its header has {_HEADER.size}; {_AGAIN}")
    magic, version, size, count, *lengths, digest = _HEADER.unpack_from(correction)
    if magic != MAGIC or version != VERSION:
        raise ArtifactError(
            f"{what}: it begins with {correction[:5].hex(' ')}, and version {VERSION} with"
            f" {(MAGIC + bytes([VERSION])).hex(' ')}; it is of a newer widepack, or damaged"
        )
    base = factors.base
    if (size, count) != (base.element_size(), base.numel()):
        raise ArtifactError(
            f"{what}: of {count} elements of {size} bytes; the weight has {base.numel()} of"
            f" {base.element_size()}; {_AGAIN}"
        )
    if sum(lengths) != len(correction) - _HEADER.size:
        raise ArtifactError(
            f"{what}: streams of {sum(lengths)} bytes, and {len(correction) - _HEADER.size} follow the"
            f" header; {_AGAIN}"
        )
    first, second = _HEADER.size + lengths[0], _HEADER.size + lengths[0] + lengths[1]
    signs = _signs(_unpacked(correction[_HEADER.size : first], -(-count // _IN_A_BYTE), what), count, what)
    places = signs != 0
    sizes = _from_bytes(_unpacked(correction[first:second], int(places.sum()), what), torch.uint8)
    escaped = sizes == _LARGE
    large = _from_bytes(_unpacked(correction[second:], 8 * int(escaped.sum()), what), torch.int64)
    other = (sizes.long() + 1) * signs[places]
    other[escaped] = large
    steps = signs.long()
    steps[places] = other
    guess = rounded(factors, i)
    bits = _ordered(guess).flatten().add_(steps).to(_INTEGERS[guess.dtype])
    result = _order(bits).view(guess.dtype).reshape(guess.shape)
    if _digest(result) != digest:
        raise ArtifactError(f"{what}: it gives a weight of another SHA-256 than it records; {_AGAIN}")
    return result


def _order(bits: Tensor) -> Tensor:
    """Returns bit patterns as integers in the order of their numbers, -0 below 0; and the reverse."""
    top = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (top.bits - 1)) & top.max)


def _ordered(values: Tensor) -> Tensor:
    return _order(values.contiguous().view(_INTEGERS[values.dtype])).long()


def _digest(values: Tensor) -> bytes:
    return hashlib.sha256(_bytes(values)).digest()


def _bytes(values: Tensor) -> bytearray:
    """Returns the bytes of a tensor. NumPy is not needed."""
    found = bytearray(values.numel() * values.element_size())
    if found:
        torch.frombuffer(found, dtype=values.dtype).copy_(values.flatten())
    return found


def _from_bytes(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _five(signs: Tensor) -> bytearray:
    digits = torch.ones(-(-signs.numel() // _IN_A_BYTE) * _IN_A_BYTE, dtype=torch.uint8)
    digits[: signs.numel()] = signs.flatten() + 1
    rows = digits.view(-1, _IN_A_BYTE) * torch.tensor(_PLACES, dtype=torch.uint8)
    return _bytes(rows.sum(1).to(torch.uint8))


def _signs(data: bytes, count: int, what: str) -> Tensor:
    """Returns the signs of all elements, as int8."""
    packed = _from_bytes(data, torch.uint8)
    if data and int(packed.max()) >= 3**_IN_A_BYTE:
        raise ArtifactError(f"{what}: a byte of the signs is over {3**_IN_A_BYTE - 1}; {_AGAIN}")
    digits = [(packed // place) % 3 for place in _PLACES]
    return torch.stack(digits, 1).flatten()[:count].to(torch.int8) - 1


def _packed(data: bytearray) -> bytes:
    """Returns the data compressed, as it is smaller: with or without a search for repetitions."""
    if not data:
        return b""
    plain = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    return min(zlib.compress(data, 6), plain.compress(data) + plain.flush(), key=len)


def _unpacked(data: bytes, size: int, what: str) -> bytes:
    """Returns `size` bytes. No more are decompressed, whatever the data is."""
    if not size and not data:
        return b""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, size) if size else b""
        rest = stream.decompress(stream.unconsumed_tail if size else data, 1)
    except zlib.error as error:
        raise ArtifactError(f"{what}: a stream is not of zlib ({error}); {_AGAIN}") from None
    if len(found) != size or rest or not stream.eof or stream.unused_data:
        raise ArtifactError(f"{what}: a stream of other than {size} bytes; {_AGAIN}")
    return found
