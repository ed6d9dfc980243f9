"""Defines the numbers of a row beside times: memory, start-up, the roofline. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory of a contestant in its own process, after its first answer, without the memory of the
    imports.

    private_bytes: memory that no other process can share (RssAnon; on a GPU torch's allocations).
    mapped_bytes: pages of files, the artifact's weights among them, which processes share.
    """

    private_bytes: int
    mapped_bytes: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Start:
    """Time from the start of a process to its first answer.

    median_ms: without `import torch`. torch_ms: of `import torch`. runs: the number of processes.
    """

    median_ms: float
    torch_ms: float
    runs: int

    def to_json(self) -> dict[str, float | int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The limits of this machine with the run's threads.

    stream: bytes read for each second, from memory as large as the program's data. gemm: FLOP for each
    second.
    """

    stream: float
    gemm: float

    def to_json(self) -> dict[str, float]:
        return {"stream_bytes_per_s": self.stream, "gemm_flop_per_s": self.gemm}


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one call of a wide program.

    flop: multiplications and additions of its products, convolutions, attentions and recurrent layers.
    least_bytes: weights, inputs and outputs, once each. moved_bytes: the reads and writes of each kernel.
    kernels: nodes that are no views.
    """

    flop: int
    least_bytes: int
    moved_bytes: int
    kernels: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Roof:
    """A program's work against the limits of the machine.

    share: the least time over the measured one; 1 where it cannot be faster.
    """

    work: Work
    ceilings: Ceilings
    median_ms: float

    @property
    def stream_ms(self) -> float:
        """Returns the time to read and write the least bytes: the streaming floor."""
        return self.work.least_bytes / self.ceilings.stream * 1e3

    @property
    def gemm_ms(self) -> float:
        """Returns the time of its FLOP at the rate of a large product."""
        return self.work.flop / self.ceilings.gemm * 1e3

    @property
    def floor_ms(self) -> float:
        return max(self.stream_ms, self.gemm_ms)

    @property
    def share(self) -> float:
        return self.floor_ms / self.median_ms

    def to_json(self) -> dict[str, Any]:
        return {
            **self.work.to_json(),
            **self.ceilings.to_json(),
            "stream_ms": self.stream_ms,
            "gemm_ms": self.gemm_ms,
            "floor_ms": self.floor_ms,
            "share": self.share,
        }
