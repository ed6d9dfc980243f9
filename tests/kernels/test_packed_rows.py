"""Tests packed linear layers at numbers of rows that they were not packed for."""

from __future__ import annotations

import time

import pytest
import torch

from widepack.kernels import packed

LINEAR, PACK = torch.ops.widepack.linear.default, torch.ops.widepack.pack_linear.default


@pytest.mark.parametrize("counts", [range(1, 64), (4, 8, 16, 32, 48, 64)], ids=["every", "some"])
@pytest.mark.parametrize("packed_for", [1, 40, 300])
def test_answers_do_not_depend_on_the_rows(
    monkeypatch: pytest.MonkeyPatch, counts: range | tuple[int, ...], packed_for: int
) -> None:
    monkeypatch.setattr(packed, "_row_counts", lambda: counts)
    torch.manual_seed(0)
    w, b = torch.randn(3, 20, 12), torch.randn(3, 20)
    weight = PACK(w, packed_for)
    for rows in (1, 2, 5, 33, 63, 64, 65, 127, 130, 300):
        x = torch.randn(3, rows, 12)
        y = LINEAR(x, weight, b)
        torch.testing.assert_close(y, torch.baddbmm(b[:, None], x, w.transpose(1, 2)))
        assert y.transpose(0, 1).is_contiguous()


def test_blocks_are_of_fast_numbers_of_rows() -> None:
    for rows in range(1, 500):
        size = packed._block_rows(rows)  # noqa: SLF001  # no call shows it
        assert size in packed._row_counts()  # noqa: SLF001
        blocks = -(-rows // size)
        assert blocks == -(-rows // packed._row_counts()[-1]) or size * (blocks - 1) < rows  # noqa: SLF001


@pytest.mark.extended(keep=1)
def test_no_number_of_rows_takes_many_times_as_long() -> None:
    """oneDNN has no fast kernel for many rows over weights that are packed for few."""
    w = torch.randn(2, 512, 512)
    weight, seconds = PACK(w, 4), {}
    for rows in (1, 4, 40, 63, 64, 72, 128, 256):
        x = torch.randn(2, rows, 512)
        LINEAR(x, weight, None)
        found = []
        for _ in range(3):
            begin = time.thread_time()
            LINEAR(x, weight, None)
            found.append(time.thread_time() - begin)
        seconds[rows] = min(found)
    assert seconds[64] < 5 * seconds[63] and seconds[256] < 25 * seconds[40], seconds
