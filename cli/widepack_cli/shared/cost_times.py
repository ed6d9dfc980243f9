"""Computes the least time of costs on a device: for each kernel the larger of computing and moving bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from widepack.system.devices import Device
from widepack_artifacts.costs import CostRow, Costs
from widepack_artifacts.formulas import Number

_MOVED = ("weights_read", "acts_read", "acts_written")


@dataclass(frozen=True, slots=True)
class LeastTime:
    """The least seconds of some rows: of those that computing bounds, and of those that bytes bound."""

    compute: float
    moving: float

    @property
    def seconds(self) -> float:
        return self.compute + self.moving

    @property
    def bound(self) -> str:
        """What takes most of the time: `compute` or `bytes`."""
        return "compute" if self.compute > self.moving else "bytes"


class Roofline:
    """The times of rows on a device. values: of the names in formulas."""

    def __init__(self, costs: Costs, device: Device, values: Mapping[str, Number]) -> None:
        self.device = device
        self._costs, self._values = costs, values

    def point(self, row: CostRow) -> tuple[float, float]:
        """Returns the FLOP and the moved bytes of a row."""
        return self._amount(row, "flops"), sum(self._amount(row, m) for m in _MOVED)

    def time(self, rows: Iterable[CostRow]) -> LeastTime:
        """Returns the least time of rows."""
        found = {"compute": 0.0, "bytes": 0.0}
        for row in rows:
            seconds, bound = self.device.seconds(*self.point(row), self._costs.dtype)
            found[bound] += seconds
        return LeastTime(found["compute"], found["bytes"])

    def _amount(self, row: CostRow, measure: str) -> float:
        pair = row.costs.get(measure)
        return 0.0 if pair is None else float(self._costs.evaluate(pair, self._values))
