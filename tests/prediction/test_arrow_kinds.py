"""Tests columns of every kind that Arrow and Parquet files have, and that the advice of a refusal helps."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loaded import saved
from torch import Tensor, nn

import widepack
from prediction.members import exact
from prediction.test_refusals import refused
from widepack import InputError, UsageError
from widepack.inference.model import WideModel

ROWS = [[float(3 * r + k) / 4 for k in range(6)] for r in range(5)]


def written(pa: Any, array: Any, ending: str = "arrow") -> str:
    """Writes a column x of lists, in several batches, with another column of texts."""
    table = pa.table({"x": array, "id": [f"r{k}" for k in range(len(array))]})
    if ending == "parquet":
        pa.parquet.write_table(table, "in.parquet", row_group_size=2)
        return "in.parquet"
    with pa.ipc.new_file("in.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=2)
    return "in.arrow"


def check(net: WideModel, source: str, x: Tensor) -> None:
    assert widepack.predict(net, source, "out.npy", force=True).rows == len(x)
    found = torch.from_numpy(np.load("out.npy")).movedim(1, 0).double()
    torch.testing.assert_close(found, exact(net, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
@pytest.mark.parametrize(
    "type_",
    ["list_(f)", "large_list(f)", "list_(f, 6)", "list_(d)", "list_(i)", "list_(dictionary(i, f))",
     "list_view(f)", "large_list_view(f)", "list_(decimal128(9, 4))", "fixed_shape_tensor(f, [6])"],
)  # fmt: skip  # types in two lines
def test_lists(type_: str, ending: str, folder: Path, net: WideModel, pa: Any) -> None:
    names = {n: getattr(pa, n) for n in dir(pa)}
    made = eval(type_, {**names, "f": pa.float32(), "d": pa.float64(), "i": pa.int32()})
    rows: list[Any] = ROWS
    if "decimal" in type_:
        rows = [[Decimal(str(v)) for v in row] for row in ROWS]
    elif type_ == "list_(i)":
        rows = [[int(4 * v) for v in row] for row in ROWS]
    if "dictionary" in type_:
        flat = pa.array([v for row in rows for v in row], pa.float32()).dictionary_encode()
        array = pa.ListArray.from_arrays(pa.array(range(0, 31, 6), pa.int32()), flat)
    elif "tensor" in type_:
        array = pa.ExtensionArray.from_storage(made, pa.array(rows, pa.list_(pa.float32(), 6)))
    else:
        array = pa.array(rows, made)
    if "view" in type_ and ending == "parquet":
        pytest.skip("Parquet files have no list views")
    check(net, written(pa, array, ending), torch.tensor(rows if type_ == "list_(i)" else ROWS).float())


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_numbers(ending: str, folder: Path, net: WideModel, pa: Any) -> None:
    """Columns of single numbers, each of another type."""
    x = torch.arange(30.0).view(5, 6)
    columns = {
        "f0": pa.array(x[:, 0].tolist(), pa.float64()).dictionary_encode(),
        "f1": pa.array([Decimal(f"{v:.3f}") for v in x[:, 1].tolist()], pa.decimal128(12, 3)),
        "f2": pa.chunked_array([pa.array([int(v)], pa.uint8()) for v in x[:, 2].tolist()]),
        "f3": pa.array([Decimal(f"{v:.1f}") for v in x[:, 3].tolist()], pa.decimal256(50, 1)),
        "f4": pa.array(x[:, 4].half().numpy(), pa.float16()),
        "f5": pa.array(x[:, 5].long().tolist(), pa.int64()),
    }
    if ending == "arrow":
        columns["f5"] = pa.compute.run_end_encode(columns["f5"])
    table = pa.table(columns)
    if ending == "parquet":
        pa.parquet.write_table(table, "in.parquet", row_group_size=3)
    else:
        with pa.ipc.new_file("in.arrow", table.schema) as file:
            file.write_table(table, max_chunksize=3)
    check(net, f"in.{ending}", x)


def test_decimals_are_rounded_once(folder: Path, net: WideModel, pa: Any) -> None:
    """The nearest float64 of a decimal, as Python has it."""
    texts = ["0.1", "123456789012345678901234567.891", "-0.000000000000000000000000000123", "99999999.99"]
    for text in texts:
        array = pa.array([[Decimal(text)] * 6], pa.list_(pa.decimal256(70, 35)))
        check(net, written(pa, array), torch.full((1, 6), float(text), dtype=torch.float64).float())


class Grid(nn.Module):
    """x [B, 2, 3] -> [B, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x[:, 0] - 2 * x[:, 1])
        return y


@pytest.fixture(scope="session")
def grid(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    return saved(Grid, tmp_path_factory.mktemp("grid"), "x=float32[B,2,3]", members=2)


def test_tensors_keep_their_shape(folder: Path, grid: WideModel, pa: Any) -> None:
    x = torch.randn(5, 2, 3)
    for permutation, stored in ((None, x), ([1, 0], x.transpose(1, 2)), ([0, 1], x)):
        type_ = pa.fixed_shape_tensor(pa.float32(), list(stored.shape[1:]), permutation=permutation)
        flat = pa.array(stored.flatten(1).tolist(), pa.list_(pa.float32(), 6))
        source = written(pa, pa.ExtensionArray.from_storage(type_, flat))
        widepack.predict(grid, source, "out.npy", force=True)
        found = torch.from_numpy(np.load("out.npy"))
        torch.testing.assert_close(found.movedim(1, 0), grid(x))
    type_ = pa.fixed_shape_tensor(pa.float32(), [3, 2])
    source = written(pa, pa.ExtensionArray.from_storage(type_, flat))
    Path("out.npy").unlink()
    refused(UsageError, r"column x is extension.*shape=\[3,2\].*float32\[B,2,3\]", grid, source, "o.npy",
            inputs={"x": "x"})  # fmt: skip  # a call in two lines


def one(pa: Any, value: Any, type_: Any) -> str:
    pa.parquet.write_table(pa.table({"x": pa.array([[0] * 6, [value] * 6], pa.list_(type_))}), "in.parquet")
    return "in.parquet"


@pytest.mark.parametrize("value", [2**24 + 1, -(2**53) - 1, 2**63 - 1])
def test_integers_are_rounded_as_float64(value: int, folder: Path, net: WideModel, pa: Any) -> None:
    """What the message advises helps."""
    words = "store the column as float64 to have it rounded"
    refused(InputError, f"row 1 .*{value}: .*{words}", net, one(pa, value, pa.int64()), "o.npy")
    assert widepack.predict(net, one(pa, float(value), pa.float64()), "o.npy").rows == 2


@pytest.mark.parametrize("value", [1e39, -1e39, 3.5e38, 1e300])
def test_a_float_that_is_too_large_names_the_range(
    value: float, folder: Path, net: WideModel, pa: Any
) -> None:
    source = one(pa, value, pa.float64())
    text = refused(InputError, r"above the largest number of float32, 3.4e\+38; change", net, source,
                   "o.npy")  # fmt: skip  # a call in two lines
    assert "float64" not in text
    assert widepack.predict(net, one(pa, 3.4e38, pa.float64()), "o.npy").rows == 2


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return x.float()[:, None] * self.by + h.float()[:, None]


@pytest.fixture(scope="session")
def counts(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    """Returns members of an int32 and a float16."""
    inputs = "x=int32[B]:-5..2000000000", "h=float16[B]"
    return saved(Counts, tmp_path_factory.mktemp("counts"), *inputs, members=2)


def test_advice_for_other_dtypes(folder: Path, counts: WideModel, pa: Any) -> None:
    def source(x: Any, h: Any) -> str:
        pa.parquet.write_table(pa.table({"x": x, "h": h}), "in.parquet")
        return "in.parquet"

    for value in (2**31, -(2**31) - 1):
        found = refused(InputError, f"row 0 .*{value}: it is outside the range of int32; change the value",
                        counts, source([value], [1.0]), "o.npy")  # fmt: skip  # a call in two lines
        assert "float64" not in found
    big = pa.array([2**64 - 1], pa.uint64())
    found = refused(InputError, f"{2**64 - 1}: it is outside the range of int32; change the value",
                    counts, source(big, [1.0]), "o.npy")  # fmt: skip  # a call in two lines
    assert "float64" not in found
    found = refused(InputError, "70000: it is above the largest number of float16", counts,
                    source([1], [70000]), "o.npy")  # fmt: skip  # a call in two lines
    assert "float64" not in found
    refused(InputError, "2049: .*store the column as float64", counts, source([1], [2049]), "o.npy")
    assert widepack.predict(counts, source([1], [2049.0]), "o.npy").rows == 1
