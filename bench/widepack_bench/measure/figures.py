"""What a row holds beside times: throughput, memory, start-up, the roofline. Plain numbers; no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Memory:
    """Peak memory of a contestant in a process of its own, once it has given its first answer, beyond what the imports take.

    private_bytes: that no other process can share (RssAnon; on a GPU what torch has allocated there). mapped_bytes: pages of files, the artifact's
    weights among them, which processes share.
    """

    private_bytes: int
    mapped_bytes: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Start:
    """From the start of a process to its first answer. median_ms: `import torch` aside; torch_ms: that; runs: how many processes."""

    median_ms: float
    torch_ms: float
    runs: int

    def to_json(self) -> dict[str, float | int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this machine does at best, with the run's threads. stream: bytes a second read from memory as large as the program's data; gemm: FLOP a second."""

    stream: float
    gemm: float

    def to_json(self) -> dict[str, float]:
        return {"stream_bytes_per_s": self.stream, "gemm_flop_per_s": self.gemm}


@dataclass(frozen=True, slots=True)
class Work:
    """What one call of a wide program has to do.

    flop: multiplications and additions of its products, convolutions, attentions and recurrent layers. least_bytes: weights, inputs and outputs, once each.
    moved_bytes: what its kernels read and write, each by itself. kernels: how many nodes are no views.
    """

    flop: int
    least_bytes: int
    moved_bytes: int
    kernels: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Roof:
    """A program's work against the ceilings. share: the least time over the measured one, 1 where nothing is left to gain."""

    work: Work
    ceilings: Ceilings
    median_ms: float

    @property
    def stream_ms(self) -> float:
        """The time to read and write the least bytes: the streaming floor."""
        return self.work.least_bytes / self.ceilings.stream * 1e3

    @property
    def gemm_ms(self) -> float:
        """The time of its FLOP at the rate of a large product."""
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
