"""Lists what devices can do at most: FLOP and bytes for each second, of data sheets.

The numbers of data sheets are dense ones, without structured sparsity. float32 is that of the FP32 units,
which torch uses for products of matrices unless TF32 is switched on; half precision and TF32 are those of the
tensor cores. They are upper bounds: no program reaches them. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_NVIDIA = "https://www.nvidia.com"
_PDF = f"{_NVIDIA}/content/dam/en-zz/Solutions/Data-Center"
_A100 = f"{_PDF}/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_V100 = (
    "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
)


LAUNCH_S = 5e-6
"""Seconds in which the host starts one kernel through torch: 4 to 6 us, https://susun-blog.com/blog/
pegainfer-3-cuda-graph (RTX 5070 Ti). widepack has not measured it on a GPU."""


@dataclass(frozen=True, slots=True)
class Device:
    """The limits of a device.

    name: for people. flops: FLOP for each second, by dtype. bandwidth: bytes for each second. source: the
    data sheet, or `measured`. tf32: FLOP for each second of float32 products in TF32; 0 if the device has no
    TF32. multiprocessors: how many thread blocks run at once at least; 0 if unknown.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    source: str
    tf32: float = 0.0
    multiprocessors: int = 0

    def seconds(self, flops: float, moved_bytes: float, dtype: str) -> tuple[float, str]:
        """Returns the least time of one kernel, and what bounds it: `compute` or `bytes`.

        Args:
            flops: The FLOP of the kernel.
            moved_bytes: The bytes that it reads and writes.
            dtype: The dtype of the FLOP.

        Raises:
            KeyError: The device has no rate for the dtype.
        """
        computing, moving = flops / self.flops[dtype], moved_bytes / self.bandwidth
        return (computing, "compute") if computing > moving else (moving, "bytes")


def _half(single: float, half: float, *dtypes: str) -> dict[str, float]:
    return {"float32": single * 1e12, **dict.fromkeys(dtypes or ("float16", "bfloat16"), half * 1e12)}


DEVICES: Mapping[str, Device] = {
    "h200": Device(
        "NVIDIA H200 SXM, 141 GB",
        _half(67, 989.4),
        4.8e12,
        f"{_NVIDIA}/en-us/data-center/h200/",
        494.7e12,
        132,
    ),
    "h100": Device(
        "NVIDIA H100 SXM, 80 GB",
        _half(67, 989.4),
        3.35e12,
        f"{_NVIDIA}/en-us/data-center/h100/",
        494.7e12,
        132,
    ),
    "a100": Device("NVIDIA A100 SXM, 80 GB", _half(19.5, 312), 2.039e12, _A100, 156e12, 108),
    "a100-40gb": Device("NVIDIA A100 SXM, 40 GB", _half(19.5, 312), 1.555e12, _A100, 156e12, 108),
    "l4": Device("NVIDIA L4, 24 GB", _half(30.3, 121), 3.0e11, f"{_NVIDIA}/en-us/data-center/l4/", 60e12, 58),
    "v100": Device("NVIDIA V100 SXM2", _half(15.7, 125, "float16"), 9.0e11, _V100, 0.0, 80),
}
"""Devices by the names that `widepack analyze --device` takes."""
