"""Tests formulas of files: what they compute, what is refused, how they are added, and documents of costs."""

from __future__ import annotations

import itertools
import json
import random
import time
from fractions import Fraction
from typing import Any

import pytest

from widepack_artifacts.costs import CostRow, Costs, OutsideDomain, documents, read_documents
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.formulas import Formula, formula
from widepack_artifacts.polynomials import added


def costs(**changes: Any) -> Costs:
    row = CostRow("layers.0", "aten.addmm", "net.py:3", {"flops": ("0", "2*B*T"), "kernels": ("1", "0")})
    given = {
        "model": "Net",
        "torch": "2.13.0",
        "dtype": "float32",
        "element_bytes": 4,
        "members": "N",
        "dims": {"B": (1, None), "T": (2, 512)},
        "guards": (["eq", ["mod", "T", 2], 0],),
        "weights": ("0", "24*w_bytes"),
        "parameters": ("0", "24"),
        "modules": {"linear": "layers.0"},
        "classes": {"": "Net", "layers.0": "Linear"},
        "rows": (row,),
        "totals": {"flops": ("0", "2*B*T"), "kernels": ("1", "0")},
        "peak": "max(B*N*a_bytes, T**2)",
        "uncounted": {},
    }
    return Costs(**{**given, **changes})


def test_values() -> None:
    sizes: dict[str, int | Fraction] = {"B": 3, "T": 10, "w": Fraction(1, 2)}
    for text, value in (
        ("524288*B*T*(T + 25204)", 524288 * 3 * 10 * 25214),
        ("-B + 7 - T//3 - T % 4", -3 + 7 - 3 - 2),
        ("max(B, T, 4)*min(B, 2)", 20),
        ("((T + 1)//2)**2", 25),
        ("w*4", 2),
        ("w*3", Fraction(3, 2)),
        ("2**16", 65536),
    ):
        found = formula(text).at(sizes)
        assert found == value and (isinstance(found, int) or found.denominator > 1)
    assert Formula("B*max(T, 1)").names == {"B", "T"}


def test_a_value_that_cannot_be_computed_is_an_error() -> None:
    with pytest.raises(ArtifactError, match="B//T divides by zero at these sizes"):
        Formula("B//T").at({"B": 1, "T": 0})
    with pytest.raises(ArtifactError, match="needs a value of T"):
        Formula("B*T").at({"B": 1})


def test_long_sums_are_computed() -> None:
    assert Formula(" + ".join(["B"] * 900)).at({"B": 2}) == 1800


def test_sums_are_written_with_common_factors() -> None:
    assert added(["4*B*T", "4*B*T", "2*B*T**2"]) == "2*B*T*(T + 4)"
    assert added(["B*(T - 2)", "-B*T"]) == "-2*B"
    assert added(["B", "-B", "0"]) == "0"
    assert added(["3*(T//2)*B", "B*(T//2)"]) == "4*(T // 2)*B"
    assert added([]) == "0"


def test_sums_have_the_values_of_their_parts() -> None:
    draw = random.Random(1)
    parts = [
        "B",
        "T**2",
        "3*B*T",
        "(B + 1)*(T - 2)",
        "max(B, T)",
        "2*((T + 1)//2)*B",
        "B*(T - B*(T + 3))",
        "7",
    ]
    for _ in range(200):
        chosen = draw.choices(parts, k=draw.randint(1, 6))
        total = formula(added(chosen))
        for b, t in itertools.product((1, 2, 9), (1, 5, 16)):
            at = {"B": b, "T": t}
            assert total.at(at) == sum(formula(p).at(at) for p in chosen), (chosen, total.text)


def test_documents_are_read_as_they_were_written() -> None:
    written = json.loads(json.dumps(documents({"forward": costs()})))
    found = read_documents(written)["forward"]
    assert found.to_json() == costs().to_json() and found.at(found.values({"B": 3, "T": 4}))["flops"] == 24


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak": "B*C"}, "reads 'C', which is no dim"),
        ({"peak": "B.real"}, "is not a formula"),
        ({"totals": {"speed": ("1", "1")}}, "'speed' is unknown"),
        ({"weights": ("1",)}, "expected .shared, member."),
        ({"guards": (["eq", "Q", 1],)}, "the dim 'Q' is not one of B, T"),
        ({"dims": {"B": (3, 1), "T": (1, None)}}, "the range from 3 to 1 is empty"),
        ({"model": "a\u0000b"}, "control characters"),
    ],
)
def test_damaged_documents_are_refused(change: dict[str, Any], message: str) -> None:
    data = json.loads(json.dumps(documents({"forward": costs(**change)})))
    with pytest.raises(ArtifactError, match=message):
        read_documents(data)


def test_other_formats_are_refused() -> None:
    with pytest.raises(ArtifactError, match="format 'widepack.costs/3'"):
        read_documents({"format": "widepack.costs/3", "entries": {}})


@pytest.mark.parametrize(
    ("sizes", "members", "message"),
    [
        ({"B": 1}, 1, "no size for T; this model's dims are B >= 1, 2 <= T <= 512"),
        ({"B": 1, "T": 2, "H": 3}, 1, "unknown: H"),
        ({"B": 0, "T": 2}, 1, "B=0 is outside B >= 1"),
        ({"B": 1, "T": 514}, 1, "T=514 is outside 2 <= T <= 512"),
        ({"B": 1, "T": 7}, 1, "the model needs T % 2 == 0, which is false at T=7"),
        ({"B": 1, "T": 8}, 0, "N=0: a model has at least one member"),
    ],
)
def test_sizes_outside_the_domain_are_refused(sizes: dict[str, int], members: int, message: str) -> None:
    with pytest.raises(OutsideDomain, match=message.replace("%", "%")) as caught:
        costs().values(sizes, members=members)
    assert caught.value.exit_code == 2


def test_ten_thousand_points_take_less_than_a_second() -> None:
    flops = "524288*B*T*(T + 25204)"
    peak = "max(2*T*(2048*B*N*a_bytes + B*T + 8*B + 4), 4096*B*N*T*a_bytes + 24*B*T + 8*B + 24*T + 1)"
    model = costs(totals={"flops": ("B", flops)}, peak=peak)
    begin = time.process_time()
    for b, t in itertools.product(range(1, 101), range(2, 202, 2)):
        model.at(model.values({"B": b, "T": t}, members=3))
    assert time.process_time() - begin < 1.0
