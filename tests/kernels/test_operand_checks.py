"""Ops whose kernels trust their operands refuse operands that lead outside of them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built, saved
from paths import ROOT
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

import widepack
from widepack.ir import ops
from widepack.kernels import int8
from widepack.kernels.checks import CHECKS, OF_VALUES, OperandError
from widepack.kernels.library import FUNCTIONS
from widepack_artifacts.opset import OPS

NEVER_RAN = {
    f"aten.{name}"
    for name in (
        "_scaled_dot_product_efficient_attention.default",
        "_scaled_dot_product_flash_attention.default",
        "_thnn_fused_gru_cell.default",
        "_thnn_fused_lstm_cell.default",
        "addmm.dtype",
        "bmm.dtype",
        "conv_depthwise3d.default",
        "mm.dtype",
        "native_norm.default",
    )
}
"""Ops without a kernel for dense tensors on a CPU."""
FUZZER = ROOT / "scripts" / "stress" / "fence" / "fuzz_operands.py"


def run(op: str, *args: Any, **kwargs: Any) -> Any:
    with torch.inference_mode():
        return ops.function(op)(*args, **kwargs)


def ids(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def lstm(**changes: Any) -> tuple[Any, ...]:
    """Operands of `aten.lstm.input`: two steps, three inputs, four units, a batch of two."""
    given: dict[str, Any] = {
        "x": torch.zeros(2, 2, 3),
        "hx": [torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)],
        "params": [torch.zeros(16, 3), torch.zeros(16, 4), torch.zeros(16), torch.zeros(16)],
        "layers": 1,
    } | changes
    return given["x"], given["hx"], given["params"], True, given["layers"], 0.0, False, False, False


PACKED = torch.zeros(3, 4, 24), torch.zeros(3, 6, 24), False, [5, 2, 4]
IMAGE = torch.zeros(1, 2, 4, 4)
LU = torch.eye(3)

BAD: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "windows outside of an image": (
        "aten.fractional_max_pool2d.default",
        (IMAGE, [2, 2], [2, 2], torch.full((1, 2, 2), 3e8)),
        {},
        "random_samples contains a number that is not from 0 to 1",
    ),
    "windows at NaN": (
        "aten.fractional_max_pool3d.default",
        (torch.zeros(1, 2, 4, 4, 4), [2] * 3, [2] * 3, torch.full((1, 2, 3), float("nan"))),
        {},
        "random_samples contains a number that is not from 0 to 1",
    ),
    "segments past the end": (
        "aten.segment_reduce.default",
        (torch.zeros(4), "sum"),
        {"offsets": ids(0, 4000)},
        "offsets contains 4000; 0 to 4 are possible",
    ),
    "segments of other lengths": (
        "aten.segment_reduce.default",
        (torch.zeros(4), "sum"),
        {"lengths": ids(2, 9), "unsafe": True},
        "lengths contains 9",
    ),
    "segments that step back": (
        "aten.segment_reduce.default",
        (torch.zeros(4), "sum"),
        {"offsets": ids(0, 3, 1, 4)},
        "offsets decreases",
    ),
    "bags past the end": (
        "aten._embedding_bag_forward_only.default",
        (torch.zeros(5, 2), ids(0, 1), ids(0, 70)),
        {},
        "offsets contains 70",
    ),
    "bags of ids that do not exist": (
        "aten.embedding_bag.default",
        (torch.zeros(5, 2), ids(0, 5), ids(0, 1)),
        {},
        "indices contains 5; 0 to 4 are possible",
    ),
    "no bag": ("aten.embedding_bag.default", (torch.zeros(5, 2), ids(0), ids()), {}, "offsets is empty"),
    "a mode of interpolation that does not exist": (
        "aten.grid_sampler_3d.default",
        (torch.zeros(1, 1, 2, 2, 2), torch.zeros(1, 2, 2, 2, 3), 2, 0, True),
        {},
        "interpolation_mode is 2; 0 to 1 are possible",
    ),
    "a mode of padding that does not exist": (
        "aten.grid_sampler.default",
        (torch.zeros(1, 1, 2, 2), torch.zeros(1, 2, 2, 2), 0, 7, True),
        {},
        "padding_mode is 7; 0 to 2 are possible",
    ),
    "repeats whose sum wraps around": (
        "aten.repeat_interleave.Tensor",
        (ids(*[2**62] * 4, 3),),
        {},
        f"repeats contains {2**62}",
    ),
    "repeats that are a negated view": (
        "aten.repeat_interleave.Tensor",
        (ops.function("aten._neg_view.default")(ids(-1, -2)),),
        {},
        "repeats is a negated view",
    ),
    "repeats that add up to too many": (
        "aten.repeat_interleave.self_Tensor",
        (torch.zeros(3), ids(*[2**39] * 3)),
        {"dim": 0},
        "repeats add up to",
    ),
    "a packed weight in the place of a dense tensor": (
        "aten.copy.default",
        (torch.zeros(4, 3), torch.zeros(4, 3).to_mkldnn()),
        {},
        "src is not a dense tensor",
    ),
    "targets that are no class": (
        "aten.ctc_loss.IntList",
        (torch.zeros(4, 1, 3), ids(1, 10**8).view(1, 2), [4], [2]),
        {},
        "targets contains 100000000",
    ),
    "more targets than there are": (
        "aten.ctc_loss.IntList",
        (torch.zeros(4, 1, 3), ids(1, 2).view(1, 2), [4], [3]),
        {},
        "target_lengths contains 3",
    ),
    "states of another batch": (
        "aten.lstm.input",
        lstm(hx=[torch.zeros(1, 1, 4)] * 2),
        {},
        r"hx\[0\] is \[1, 1, 4\]; \[1, 2, 4\] is needed",
    ),
    "weights of other sizes": (
        "aten.lstm.input",
        lstm(params=[torch.zeros(16, 3), torch.zeros(8, 4), torch.zeros(16), torch.zeros(16)]),
        {},
        r"params\[1\] is \[8, 4\]",
    ),
    "fewer weights than layers": (
        "aten.lstm.input",
        lstm(layers=2, hx=[torch.zeros(2, 2, 4)] * 2),
        {},
        "the layers need 8 weights",
    ),
    "batch sizes that grow": (
        "aten.lstm.data",
        (torch.zeros(5, 3), ids(2, 1, 2), *lstm()[1:-1]),
        {},
        "batch_sizes increases",
    ),
    "batch sizes for more rows": (
        "aten.lstm.data",
        (torch.zeros(3, 3), ids(2, 2), *lstm()[1:-1]),
        {},
        "batch_sizes is for 4 rows",
    ),
    "a norm of another size": (
        "aten._weight_norm_interface.default",
        (torch.ones(4, 3), torch.ones(2, 1)),
        {},
        "g has 2 numbers",
    ),
    "statistics of other channels": (
        "aten._native_batch_norm_legit_no_training.default",
        (IMAGE, None, None, torch.zeros(1), torch.ones(1), 0.1, 1e-5),
        {},
        "running_mean is for 1 channels; 2 are needed",
    ),
    "groups that are not the input's": (
        "aten.native_group_norm.default",
        (IMAGE, None, None, 1, 2, 999, 1, 1e-5),
        {},
        "not the sizes of input",
    ),
    "values of another length": (
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        (torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 2, 8)),
        {},
        r"value is \[1, 1, 2, 8\]",
    ),
    "longer values": (
        "aten.scaled_dot_product_attention.default",
        (torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 4, 8)),
        {},
        "they differ in length",
    ),
    "pivots that are no row": (
        "aten.lu_unpack.default",
        (LU, ids(0, 1, 2, dtype=torch.int32)),
        {},
        "LU_pivots contains 0; 1 to 3 are possible",
    ),
    "pivots of another size": (
        "aten.linalg_lu_solve.default",
        (LU, ids(1, dtype=torch.int32), LU),
        {},
        r"pivots is \[1\]; \[3\] is needed",
    ),
    "half of a pair": (
        "aten.linalg_ldl_solve.default",
        (LU, ids(1, 2, -3, dtype=torch.int32), LU),
        {},
        "without a second one",
    ),
    "a scale below 0": ("aten.upsample_nearest2d.default", (IMAGE, [8, 8], -2.0, 2.0), {}, "a scale is -2.0"),
    "a scale that does not fit": (
        "aten._upsample_bilinear2d_aa.default",
        (IMAGE, [8, 8], False, 0.5, 2.0),
        {},
        "does not make 8 of 4",
    ),
    "a dim before the first": ("aten._fft_c2c.default", (LU + 0j, [-2], 0, True), {}, "transforms the dims"),
    "half of the numbers": ("aten._fft_c2r.default", (LU + 0j, [1], 0, 40), {}, "last_dim_size is 40"),
    "points in three dims": ("aten._pdist_forward.default", (IMAGE,), {}, "4 dims; 2 are needed"),
    "a stride of 0": (
        "widepack.pack_convolution.default",
        (torch.zeros(2, 2, 3, 3), [0, 1], [0, 0], [1, 1], 1, [1, 2, 4, 4]),
        {},
        "stride contains 0",
    ),
    "rows beyond all": (
        "widepack.pack_linear.default",
        (torch.zeros(3, 6, 4), 2**31 - 1),
        {},
        "rows is 2147483647",
    ),
    "an LSTM of other sizes": (
        "widepack.packed_lstm.default",
        (
            torch.zeros(3, 5, 2, 4),
            torch.zeros(3, 2, 6),
            torch.zeros(3, 1, 6),
            [torch.zeros(24, 4)] * 3 + [torch.zeros(24, 6)] * 3,
            None,
            None,
            False,
        ),
        {},
        r"c is \[3, 1, 6\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_operands_that_lead_outside_are_refused(name: str) -> None:
    op, args, kwargs, message = BAD[name]
    with pytest.raises(OperandError, match=message):
        run(op, *args, **kwargs)


def test_a_weight_that_was_packed_for_another_op_is_refused() -> None:
    packed = run("widepack.pack_lstm.default", *PACKED)
    if not packed[0].is_mkldnn:
        pytest.skip("torch has no oneDNN here")
    x, h = torch.zeros(3, 5, 2, 4), torch.zeros(3, 2, 6)
    y, _ = run("widepack.packed_lstm.default", x, h, h, packed, None, None, False)
    assert y.shape == (3, 5, 2, 6)
    with pytest.raises(OperandError, match=r"was packed for \('lstm', False\); \('lstm', True\) is needed"):
        run("widepack.packed_lstm.default", x, h, h, packed, None, None, True)
    linear = run("widepack.pack_linear.default", torch.zeros(3, 6, 4), 5)
    with pytest.raises(OperandError, match="packed for"):
        run("widepack.convolution.default", IMAGE, linear, None, [1, 1], [0, 0], [1, 1], 1)


def test_a_packed_convolution_that_passed_is_checked_again_for_other_operands() -> None:
    packed = ops.function("widepack.pack_convolution.default")(
        torch.zeros(8, 3, 3, 3), [1, 1], [0, 0], [1, 1], 1, [1, 3, 8, 8]
    )
    convolution = ops.function("widepack.convolution.default")

    def run(x: torch.Tensor, bias: torch.Tensor | None, stride: int = 1) -> Any:
        return convolution(x, packed, bias, [stride] * 2, [0, 0], [1, 1], 1)

    image, bias = torch.zeros(1, 3, 8, 8), torch.zeros(8)
    for _ in range(2):
        assert run(image, bias).shape == (1, 8, 6, 6)
    calls: list[Callable[[], Any]] = [
        lambda: run(torch.zeros(1, 2, 8, 8), bias),
        lambda: run(torch.zeros(1, 3, 2, 2), bias),
        lambda: run(image.double(), bias),
        lambda: run(image.to_sparse(), bias),
        lambda: run(image, torch.zeros(4)),
        lambda: run(image, bias.double()),
        lambda: run(image, bias, stride=2),
    ]
    for refused in calls:
        with pytest.raises(OperandError):
            refused()
    assert run(torch.zeros(2, 3, 9, 9), None).shape == (2, 8, 7, 7)


LEAST = {dtype: torch.iinfo(dtype).min for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)}


@pytest.mark.parametrize("dtype", LEAST)
def test_the_least_integer_divided_by_minus_one_does_not_end_the_process(dtype: torch.dtype) -> None:
    x = torch.tensor([LEAST[dtype], LEAST[dtype], -7, 7], dtype=dtype)
    y = torch.tensor([-1, 2, -1, -2], dtype=dtype)
    found = run("aten.div.Tensor_mode", x, y, rounding_mode="trunc")
    assert found.dtype == dtype and found.tolist() == [LEAST[dtype], LEAST[dtype] // 2, 7, -3]
    assert run("aten.div.Tensor_mode", x[0], y[0], rounding_mode="trunc").item() == LEAST[dtype]
    found = run("aten.div.Scalar_mode", x, -1, rounding_mode="trunc")
    assert found.dtype == dtype and found.tolist() == [LEAST[dtype], LEAST[dtype], 7, -7]


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
def test_the_replaced_division_is_that_of_torch(mode: str | None) -> None:
    values = [ids(7, -7, 0), ids(3, -2, 5, dtype=torch.int8), ids(2), torch.tensor(-1)]
    values += [torch.tensor([2.5, -0.5, float("nan")]), torch.tensor(2.5, dtype=torch.float64)]
    values += [torch.tensor([3], dtype=torch.uint8)]
    for x in values:
        for y in [v for v in values if not (v == 0).any()]:
            found = run("aten.div.Tensor_mode", x, y, rounding_mode=mode)
            torch.testing.assert_close(
                found, torch.div(x, y, rounding_mode=mode), equal_nan=True, rtol=0, atol=0
            )
        for number in (2, -1, -3, 0.5, -1.0, True):
            found = run("aten.div.Scalar_mode", x, number, rounding_mode=mode)
            wanted = torch.div(x, number, rounding_mode=mode)
            torch.testing.assert_close(found, wanted, equal_nan=True, rtol=0, atol=0)


def test_a_norm_of_weights_that_are_views_stays_inside() -> None:
    v, g = torch.tensor([[3.0]]).expand(64, 4), torch.tensor([[2.0]]).expand(64, 1)
    w, norms = run("aten._weight_norm_interface.default", v, g)
    torch.testing.assert_close(w, torch.ones(64, 4))
    torch.testing.assert_close(norms, torch.full((64, 1), 6.0))


def test_every_check_is_of_an_op_of_the_list() -> None:
    assert CHECKS.keys() <= OPS and CHECKS.keys() >= OF_VALUES
    own = {op for op in OPS if op.startswith("widepack.")}
    assert own | int8.OPS == FUNCTIONS.keys()
    assert not own & int8.OPS  # no file may contain these


def test_every_op_of_the_list_ran_behind_the_fence() -> None:
    """A new op enters the list with a run of the fuzzer: scripts/stress/fence/fuzz_operands.py -o FILE."""
    document = json.loads((ROOT / "bench" / "results" / "fence.json").read_text(encoding="utf-8"))
    reads_tensors = {op for op in OPS if op not in ops.PYTHON and op != "loop"}
    missing = {op for op in reads_tensors - document["outcomes"].keys() if not op.startswith("aten.sym_")}
    assert not missing and not document["ended"] and document["cases"] >= 100_000
    never = {op for op, found in document["outcomes"].items() if not any(k.endswith(" ran") for k in found)}
    assert never == NEVER_RAN


def fuzz(*words: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("cc") is None:
        pytest.skip("the fence needs a C compiler")
    return subprocess.run(
        [sys.executable, str(FUZZER), *words], capture_output=True, text=True, timeout=1800, check=False
    )


@pytest.mark.extended
def test_a_kernel_that_reads_too_far_ends_at_the_fence() -> None:
    """The fuzzer finds what it is there to find: with the check of an op removed, the process ends."""
    found = fuzz("--ops", "aten._embedding_bag_forward_only.default", "--cases", "60", "--unchecked")
    assert found.returncode == 1 and "aten._embedding_bag_forward_only.default SIGSEGV" in found.stdout, (
        found.stderr
    )


@pytest.mark.extended
def test_a_result_that_no_kernel_wrote_is_found() -> None:
    """Without its check, the op returns new memory for a mode that does not exist."""
    found = fuzz("--ops", "aten.grid_sampler_3d.default", "--cases", "60", "--seed", "3", "--unchecked")
    assert found.returncode == 1 and "aten.grid_sampler_3d.default unwritten" in found.stdout, found.stderr


@pytest.mark.extended
def test_checked_ops_stay_inside_of_their_operands() -> None:
    found = fuzz("--ops", ",".join([*CHECKS, *FUNCTIONS]), "--cases", "12", "--seed", "11")
    assert found.returncode == 0, found.stdout


@pytest.mark.extended
def test_lapack_stays_inside_of_its_memory_for_all_values() -> None:
    """A matrix with NaN leads LAPACK's `gehrd` outside: torch checks it in `linalg_eig` alone."""
    unguarded = fuzz("--ops", "aten.linalg_eigvals.default", "--cases", "150", "--seed", "5", "--unchecked")
    assert unguarded.returncode == 0, unguarded.stdout  # the replacement runs in code without checks, too
    names = ("linalg", "cholesky", "inverse", "lu_unpack", "logdet", "nuclear", "frobenius")
    matrices = sorted(op for op in OPS if any(name in op for name in names))
    found = fuzz("--ops", ",".join(matrices), "--cases", "60", "--seed", "6")
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
def test_all_ops_stay_inside_of_their_operands() -> None:
    found = fuzz("--cases", "60", "--seed", "12")
    assert found.returncode == 0, found.stdout


def test_a_call_with_an_index_out_of_range_names_input_value_and_bounds(tmp_path: Any) -> None:
    class Bags(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = torch.nn.EmbeddingBag(10, 4)

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            y: Tensor = self.bag(ids, offsets)
            return y

    ens = saved(Bags, tmp_path, "ids=int64[12]:0..9", "offsets=int64[3]:0..0", members=2)
    good = torch.arange(12) % 10, ids(0, 4, 7)
    assert ens(*good).shape == (2, 3, 4)
    with pytest.raises(widepack.InputError, match="input ids contains 77, .* looks up one of 10 rows"):
        ens(torch.full((12,), 77), good[1])
    with pytest.raises(widepack.InputError, match="offsets contains 40; 0 to 12 are possible"):
        ens(good[0], ids(0, 4, 40))


class BagsByEnds(torch.nn.Module):
    """Reads bags whose last offset is the number of indices. torch's kernel ends the process at no bag."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = torch.nn.EmbeddingBag(20, 4, mode="max", include_last_offset=True)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        result: Tensor = self.bags(ids, offsets)
        return result


def test_a_build_tries_members_at_no_operands_outside_of_which_kernels_read(tmp_path: Path) -> None:
    sample = ids(1, 2, 3, 4, 5, 6, 7, 8, 9), ids(0, 3, 3, 9)
    dynamic = {"ids": {0: "K"}, "offsets": {0: "M"}}
    members = [BagsByEnds() for _ in range(2)]
    path = built(tmp_path, BagsByEnds, members, sample=sample, dynamic=dynamic)
    torch.testing.assert_close(
        widepack.load(path)(*sample), torch.stack([m(*sample) for m in members]).detach()
    )


class RefusesModes(torch.nn.Module):
    """Has an op that does not accept a dispatch mode, as some ops of users do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor and _get_current_dispatch_mode() is not None:
            raise NotImplementedError("no rule for this mode")
        y: Tensor = self.layer(x)
        return y


def test_a_member_without_such_kernels_runs_without_a_mode(tmp_path: Path) -> None:
    members = [RefusesModes() for _ in range(2)]
    path, x = built(tmp_path, RefusesModes, members, "x=float32[B,4]"), torch.rand(5, 4)
    torch.testing.assert_close(widepack.load(path)(x), torch.stack([m(x) for m in members]).detach())
