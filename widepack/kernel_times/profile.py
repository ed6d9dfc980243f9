"""Holds the measured kernel times of a machine: a profile, which is stored as JSON."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from widepack_artifacts.errors import ArtifactError

from .curves import Curve, ProductTimes
from .kernel_work import ELEMENTWISE, KernelWork

LEAST_S = 1e-9
"""The least time of a product beside its start. A clock cannot resolve less."""
LARGE, LARGE_WIDTH = "large", 700 * 700
"""What precedes the kind of a product with a large matrix, and from how many numbers on."""
FORMAT = "widepack kernel times 2"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What kernels take on a machine, in seconds.

    machine: the processor's name and its instructions, as `system.machine.name_of` returns them. torch,
    threads, dtype, date: of the measurement. starts: the start of a product, by kind. products: what it takes
    beside that. others: the time of other kernels, start included, by kind, over their elements. cold: of a
    byte that comes from memory more than of one in a cache, over the bytes that a call reads. reading: of a
    byte of weights from memory more than from a cache, over the rows of a product, by kind. fresh: of a byte
    of a result in memory that a call has not just used, over the bytes of the result. view_s: of a view.
    modules: of the call of a module, without its ops, over the bytes that a call goes through. call_s: of the
    call of a wide program, without its ops; 0 unless it was measured.
    """

    machine: str
    torch: str
    threads: int
    dtype: str
    date: str
    starts: Mapping[str, float]
    products: Mapping[str, ProductTimes]
    others: Mapping[str, Curve]
    cold: Curve
    reading: Mapping[str, Curve]
    fresh: Curve
    view_s: float
    modules: Curve
    call_s: float = 0.0

    def kernel(self, work: KernelWork, streamed: float) -> float:
        """Returns the seconds of a kernel.

        streamed: the bytes of weights that a whole call reads. If they do not fit a cache, they come from
        memory at every call.
        """
        made = work.made_bytes * self.fresh.at(work.made_bytes) if work.made_bytes else 0.0
        if work.count:
            kind = _similar(work.kind, self.products)
            one = max(self.products[kind].at(work.rows, work.width), LEAST_S)
            return self.starts[kind] + work.count * one + self.moving(work, streamed) + made
        kind = work.kind if work.kind in self.others else ELEMENTWISE
        return self.others[kind].at(work.elements, grows=True) + made

    def moving(self, work: KernelWork, streamed: float) -> float:
        """Returns the seconds that weights take more than weights that are in a cache already.

        streamed: as `kernel` takes it. The times of a large product contain that already.
        """
        if not work.weight_bytes:
            return 0.0
        reads = self.cold.at(streamed) + (work.passes - 1) * self.cold.at(work.weight_bytes)
        kind = f"{LARGE} {work.kind}" if work.width >= LARGE_WIDTH else work.kind
        byte_s = self.reading[_similar(kind, self.reading)].at(work.rows)
        return work.weight_bytes * reads / self.cold.values[-1] * byte_s

    def start(self, work: KernelWork) -> float:
        """Returns the seconds in which a kernel starts."""
        if work.count:
            return self.starts[_similar(work.kind, self.products)]
        return self.others[work.kind if work.kind in self.others else ELEMENTWISE].values[0]

    def to_json(self) -> dict[str, Any]:
        """Returns the profile as JSON values."""
        return {
            "format": FORMAT,
            "machine": self.machine,
            "torch": self.torch,
            "threads": self.threads,
            "dtype": self.dtype,
            "date": self.date,
            "starts": {k: float(f"{s:.3g}") for k, s in self.starts.items()},
            "products": {k: p.to_json() for k, p in self.products.items()},
            "others": {k: c.to_json() for k, c in self.others.items()},
            "cold": self.cold.to_json(),
            "reading": {k: c.to_json() for k, c in self.reading.items()},
            "fresh": self.fresh.to_json(),
            "view_s": self.view_s,
            "modules": self.modules.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Reads a profile. Raises: ArtifactError if the data is not one."""
        try:
            if data["format"] != FORMAT:
                raise ArtifactError(f"kernel times: the format is {data['format']!r}; this reads {FORMAT!r}")
            found = cls(
                machine=str(data["machine"]),
                torch=str(data["torch"]),
                threads=int(data["threads"]),
                dtype=str(data["dtype"]),
                date=str(data["date"]),
                starts={str(k): float(s) for k, s in data["starts"].items()},
                products={str(k): ProductTimes.from_json(p) for k, p in data["products"].items()},
                others={str(k): Curve.from_json(c) for k, c in data["others"].items()},
                cold=Curve.from_json(data["cold"]),
                reading={str(k): Curve.from_json(c) for k, c in data["reading"].items()},
                fresh=Curve.from_json(data["fresh"]),
                view_s=float(data["view_s"]),
                modules=Curve.from_json(data["modules"]),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            raise ArtifactError(f"kernel times: {e!r}; the data is not a profile") from e
        known = found.reading.keys() & found.products.keys()
        whole = found.starts.keys() == found.products.keys() and ELEMENTWISE in found.others
        if not whole or "product" not in known:
            raise ArtifactError("kernel times: products and elementwise kernels are missing")
        return found


def _similar(kind: str, measured: Container[str]) -> str:
    """Returns the most similar kind of product that was measured."""
    words = kind.split(" ")
    names = [" ".join(words[i:]) for i in range(len(words))]
    names[1:1] = [" ".join(w for w in words if w not in ("1x1", LARGE))]
    return next((n for n in names if n in measured), "product")
