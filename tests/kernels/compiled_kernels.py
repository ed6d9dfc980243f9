"""Tests that the Triton kernels compile for GPUs, on a machine without one, and fit in their registers.

`test_triton_kernels.py` runs this file in a process of its own: pytest tests/kernels/compiled_kernels.py
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from widepack.kernels.mlp_chain import ACTIVATIONS
from widepack.kernels.triton_kernels import chain, launches, steps
from widepack.kernels.triton_kernels.predictions import GATES, ROWS

MOST_STACK = 128
"""The bytes of a thread that may lie in memory in place of registers."""
MOST_SHARED = 99 << 10
"""The shared memory of a block on the smallest of the GPUs: compute capability 8.6."""
TYPES = {"tf32x3": "*fp32", "tf32": "*fp32", "ieee": "*bf16"}


def compiled(kernel: Any, types: dict[Any, Any], constants: dict[Any, Any], width: int, gpu: int) -> Any:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    paths = [
        ((i, *more), type_)
        for i, types_ in enumerate(signature.values())
        for more, type_ in (
            [((k,), t) for k, t in enumerate(types_)] if isinstance(types_, tuple) else [((), types_)]
        )
    ]
    aligned = {path: [["tt.divisibility", 16]] for path, type_ in paths if type_.startswith("*")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", gpu, 32), options=launches.options(width))


def fits(kernel: Any, path: Path, precision: str, even: bool) -> None:
    """Checks the resources of a compiled kernel, that it multiplies on tensor cores, and how it reads.

    even: whether its widths are multiples of 64. Then most reads are of 16 bytes.
    """
    code = kernel.asm["ptx"]
    assert ("cvt.rna.tf32" in code) >= (precision == "tf32x3"), "factors are not rounded to the nearest"
    assert "mma.sync" in code or "wgmma" in code
    assert not even or code.count("ld.global.v4") > code.count("ld.global.b")
    assert kernel.metadata.shared <= MOST_SHARED
    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    report = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    stack = [int(n) for n in re.findall(r"STACK:(\d+)", report)]
    assert stack and max(stack) <= MOST_STACK, report


CELLS = [
    ("rnn", "tf32x3", 128, 90),
    ("gru", "tf32x3", 128, 90),
    ("lstm", "tf32x3", 128, 90),
    ("lstm", "tf32x3", 128, 80),
    ("lstm", "tf32x3", 20, 90),
    pytest.param("gru", "tf32", 256, 90, marks=pytest.mark.slow),
    pytest.param("lstm", "tf32", 256, 80, marks=pytest.mark.slow),
    pytest.param("lstm", "ieee", 256, 90, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "precision", "width", "gpu"), CELLS)
def test_steps_compile(name: str, precision: str, width: int, gpu: int, tmp_path: Path) -> None:
    chunk = launches.chunk(width)
    constants = {
        "GATES": GATES[name],
        "H": width,
        "W": width * width * GATES[name],
        "C": chunk,
        "K": -(-width // chunk),
        "R": ROWS,
        "REVERSE": True,
        "RELU": False,
        "BIAS": name == "gru",
        "PRECISION": precision,
    }
    types = dict.fromkeys(("p", "w", "b", "h", "y"), TYPES[precision]) | {"c": "*fp32"}
    types |= dict.fromkeys(("h_stride", "first", "count", "total", "batch"), "i32")
    kernel = compiled(steps.steps_kernel, types, constants, width, gpu)
    fits(kernel, tmp_path / "kernel", precision, width % 64 == 0)


CHAINS = [
    ((64, 128, 64), "tf32x3", 90),
    ((5, 20, 1), "tf32x3", 80),
    pytest.param((700, 128, 128, 128, 10), "tf32x3", 80, marks=pytest.mark.slow),
    pytest.param((700, 128, 128, 128, 10), "tf32x3", 90, marks=pytest.mark.slow),
    pytest.param((64, 256, 256, 256), "tf32", 90, marks=pytest.mark.slow),
    pytest.param((64, 256, 256, 256), "ieee", 80, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("widths", "precision", "gpu"), CHAINS)
def test_chains_compile(widths: tuple[int, ...], precision: str, gpu: int, tmp_path: Path) -> None:
    layers, pointer = len(widths) - 1, TYPES[precision]
    biases = [None if k == 1 else pointer for k in range(layers)]
    types = {
        "x": pointer,
        "y": pointer,
        "weights": (pointer,) * layers,
        "biases": tuple(b or "constexpr" for b in biases),
        "row_count": "i32",
    }
    activations = tuple(ACTIVATIONS.index(name) for name in ("gelu", "tanh", "silu", "relu"))
    constants: dict[Any, Any] = {
        "SHARED": False,
        "WIDTHS": widths,
        "ACTIVATIONS": activations[:layers],
        "LAYERS": layers,
        "C": launches.chunk(max(widths[1:])),
        "R": ROWS,
        "PRECISION": precision,
        (chain.chain_kernel.arg_names.index("biases"), 1): None,
    }
    even = all(width % 64 == 0 for width in widths)
    fits(
        compiled(chain.chain_kernel, types, constants, max(widths[1:]), gpu),
        tmp_path / "kernel",
        precision,
        even,
    )
