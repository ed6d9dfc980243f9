"""Moves tensors between the processes of a group, and raises when a process has ended.

Tensors of every dtype move as bytes; only sums are added up by the group itself. Before a call moves
anything, the ranks agree on it: a small tensor of each rank says whether the rank accepts the call, and which
call it is. So a call that one rank refuses is refused by all, and all ranks are at the same call.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError, UsageError, WidepackError
from ..inference.reduced_answer import Reduction

ALIGNED = 16
"""Each tensor in a buffer of bytes begins at a multiple of this."""
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)
T = TypeVar("T")


class Ranks:
    """The processes that have the parts of a model.

    Args:
        group: The process group; None for all processes.
        timeout: The seconds after which a call that waits for another process raises.
        device: Where the tensors are that move.

    Attributes:
        rank: The number of this process in the group.
        size: The number of processes.
        lock: Is held during a call, since the calls of a group have one order.

    Raises:
        UsageError: torch.distributed is not initialized, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float, device: torch.device) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "torch.distributed is not initialized; call torch.distributed.init_process_group('gloo') "
                "first (on GPUs 'nccl'), in processes that torchrun starts"
            )
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise UsageError("this process is not in the group; load in the processes of the group only")
        if not (isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout > 0):
            raise UsageError(f"timeout={timeout!r} is not a number of seconds above 0")
        self.size, self._device = dist.get_world_size(group), device
        self._numbers = dist.get_process_group_ranks(group)
        self._timeout, self._calls, self._failed = timeout, 0, ""
        limit, backend = timedelta(seconds=timeout), dist.get_backend(group)
        self._group = self._moving(
            lambda: dist.new_group(self._numbers, limit, backend, use_local_synchronization=True)
        )
        self.lock = threading.RLock()

    def close(self) -> None:
        """Ends the group of the model."""
        if self._group is not None and not self._failed and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._failed = (
            self._failed or "this model was closed; widepack.distributed.load opens its artifact again"
        )

    def _moving(self, move: Callable[[], T]) -> T:
        """Runs a collective. Raises: WidepackError if a process has ended or does not answer."""
        if self._failed:
            raise WidepackError(self._failed)
        try:
            return move()
        except RuntimeError as e:
            self._failed = (
                f"rank {self.rank} lost the other processes: one has ended, or did not answer within "
                f"{self._timeout:g} s ({str(e).splitlines()[0][:200]}).\n"
                "This model cannot be called again: start the processes again and load it there"
            )
            raise WidepackError(self._failed) from e

    # ---------------------------------------------------------------- agreement

    def agreed(self, check: Callable[[], T], describe: Callable[[T], str]) -> T:
        """Returns what `check` returns, if it succeeds on every rank and is the same call there.

        describe: the call in words. Raises: what `check` raises; InputError if another rank refused the call,
        or made another one.
        """
        error: Exception | None = None
        try:
            found = check()
            text = describe(found)
        except Exception as e:  # noqa: BLE001  raised below, after the other ranks know of it
            error, text = e, ""
        self._calls += 1
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)
        mine = torch.tensor([self._calls, int(error is not None), digest], device=self._device)
        table = [torch.empty_like(mine) for _ in range(self.size)]
        self._moving(lambda: dist.all_gather(table, mine, self._group))
        if error is not None:
            raise error
        rows = [row.tolist() for row in table]
        if refused := [r for r, row in enumerate(rows) if row[1]]:
            raise InputError(
                f"rank {refused[0]} refused call {self._calls}, so that no rank runs it; its error says why"
            )
        if other := [r for r, row in enumerate(rows) if row != rows[0]]:
            raise InputError(
                f"rank {other[0]} made another call than rank 0 (call {self._calls}); rank {self.rank} made: "
                f"{text[:200]}.\nAll ranks make the same calls in the same order, with the same options, and "
                "with inputs of the same shapes and dtypes"
            )
        return found

    # ---------------------------------------------------------------- tensors

    def from_first(self, value: Tensor) -> Tensor:
        """Returns the value of rank 0. value: on other ranks any of the same shape and dtype."""
        found = value.contiguous() if self.rank == 0 else _new(value)
        if found.numel():
            self._moving(lambda: dist.broadcast(_bytes(found), self._numbers[0], self._group))
        return found

    def parts_from_first(self, parts: Sequence[Tensor | None]) -> Tensor | None:
        """Returns this rank's part of what rank 0 has. parts: one for each rank, None for a rank without; on
        other ranks any of the same shapes and dtypes.
        """
        part, works = parts[self.rank], []
        if self.rank == 0:
            sent = [(r, p.contiguous()) for r, p in enumerate(parts) if r and p is not None and p.numel()]
            works = [dist.P2POp(dist.isend, _bytes(p), self._numbers[r], self._group) for r, p in sent]
        elif part is not None:
            part = _new(part)
            if part.numel():
                works = [dist.P2POp(dist.irecv, _bytes(part), self._numbers[0], self._group)]
        if works:
            self._moving(lambda: [work.wait() for work in dist.batch_isend_irecv(works)])
        return part

    def summed(self, value: Tensor) -> Tensor:
        """Returns the sum over ranks of tensors of one shape."""
        found = value.clone(memory_format=torch.contiguous_format)
        real = torch.view_as_real(found) if found.is_complex() else found
        self._moving(lambda: dist.all_reduce(real, dist.ReduceOp.SUM, self._group))
        return found

    def gathered(
        self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[Sequence[int]]] | None = None
    ) -> list[list[Tensor]]:
        """Returns the tensors of every rank, in one exchange for all of them.

        Args:
            tensors: Those of this rank.
            shapes: The shapes of every rank's tensors, of the same dtypes as here; None if they differ more.
        """
        if shapes is None:
            forms = self._forms(tensors)
        else:
            forms = [[(t.dtype, tuple(s)) for t, s in zip(tensors, rank)] for rank in shapes]
        lengths = [sum(_padded(_size(dtype, shape)) for dtype, shape in rank) for rank in forms]
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device=self._device)
        at = 0
        for t in tensors:
            data = _bytes(t.contiguous())
            mine[at : at + len(data)] = data
            at += _padded(len(data))
        return [_split(buffer, rank) for buffer, rank in zip(self._gather(mine), forms)]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Returns a tensor of each rank, all of one shape."""
        found = [torch.empty_like(mine) for _ in range(self.size)]
        if mine.numel():
            self._moving(lambda: dist.all_gather(found, mine, self._group))
        return found

    def _forms(self, tensors: Sequence[Tensor]) -> list[list[tuple[torch.dtype, tuple[int, ...]]]]:
        """Returns the dtypes and shapes of every rank's tensors."""
        numbers = [n for t in tensors for n in (DTYPES.index(t.dtype), t.dim(), *t.shape)]
        counts = self._gather(torch.tensor([len(numbers)], device=self._device))
        most = max(int(c) for c in counts)
        padded = torch.tensor(
            [*numbers, *[0] * (most - len(numbers))], dtype=torch.int64, device=self._device
        )
        found = []
        for count, row in zip(counts, self._gather(padded)):
            values, forms = row[: int(count)].tolist(), []
            while values:
                dtype, dims = values[:2]
                forms.append((DTYPES[dtype], tuple(values[2 : 2 + dims])))
                values = values[2 + dims :]
            found.append(forms)
        return found


def _new(value: Tensor) -> Tensor:
    """Returns a contiguous tensor of the same shape and dtype, to be filled."""
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _bytes(value: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as bytes."""
    return value.reshape(-1).view(torch.uint8)


def _size(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _padded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _split(buffer: Tensor, forms: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
    """Returns the tensors in a buffer of bytes."""
    found, at = [], 0
    for dtype, shape in forms:
        size = _size(dtype, shape)
        found.append(buffer[at : at + size].view(dtype).view(shape))
        at += _padded(size)
    return found


def described(value: Any) -> str:
    """Returns a call in words: shapes and dtypes instead of tensors."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(described, value))})"
    return str(value) if isinstance(value, Reduction) else repr(value)
