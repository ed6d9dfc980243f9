"""Tests that numbers in JSON have as few digits as read back the same."""

from __future__ import annotations

import math

import numpy as np
import orjson
import pytest
import torch
from asgi import InProcess
from infer import infer, json_request

from widepack_serve.protocol.shortest import shortest

EDGES = [
    0.0,
    -0.0,
    0.1,
    -0.3,
    1e-14,
    9.99e-15,
    999999.94,
    1e6,
    16777216.0,
    1e-45,
    1.1754942e-38,
    3.4028235e38,
]


def drawn(kind: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    if kind == "bits":  # every size, also the numbers below the normal ones
        bits = torch.randint(-(2**31), 2**31, (20_000,), generator=g).to(torch.int32)
        found = bits.view(torch.float32)
        return found[found.isfinite()]
    if kind == "decimals":
        return torch.randint(-9999, 9999, (20_000,), generator=g) / 1000
    if kind == "softmax":
        return (30 * torch.randn(5_000, generator=g)).softmax(0)
    powers = [2.0**k for k in range(-149, 128)] + [10.0**k for k in range(-44, 39)]
    return torch.tensor([*EDGES, *powers, *(-p for p in powers)], dtype=torch.float32)


def digits(text: str) -> int:
    """Returns how many digits a number has, without zeros at its ends."""
    return len(text.lower().partition("e")[0].replace(".", "").lstrip("-").strip("0"))


@pytest.mark.parametrize("kind", ["bits", "decimals", "softmax", "edges"])
@pytest.mark.parametrize("few", [False, True])
def test_numbers_read_back_the_same_and_no_shorter_ones_do(kind: str, few: bool) -> None:
    value = drawn(kind)
    parts = [value[k : k + 20] for k in range(0, min(len(value), 2000), 20)] if few else [value]
    texts = [t for part in parts for t in orjson.dumps(shortest(part)).decode()[1:-1].split(",")]
    value = torch.cat(parts)
    back = torch.tensor([float(t) for t in texts], dtype=torch.float32)
    assert torch.equal(back.view(torch.int32), value.view(torch.int32))
    for text, number in zip(texts, value.tolist()):
        mantissa = math.frexp(number)[0]
        # Half of the numbers near a power of two are nearer to its neighbour: another number may be shorter.
        most = digits(str(np.float32(number))) + (abs(mantissa) == 0.5)
        assert digits(text) <= most, (text, number)


def test_other_dtypes_stay_as_they_are() -> None:
    for dtype in (torch.float64, torch.int64, torch.bool):
        value = torch.tensor([0.1, 1.0, 0.0]).to(dtype)
        assert shortest(value) == value.tolist()


def test_answers_have_few_digits(server: InProcess) -> None:
    """A small answer, and a large one, which is written on a thread."""
    for rows in (2, 3000):
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(1))
        text = server.maybe(json_request("plain", {"x": x}))
        assert text is not None
        (row,) = orjson.loads(text.body)["outputs"]
        exact = infer(server, "plain", {"x": x})["output"]
        found = torch.tensor(row["data"], dtype=torch.float32).reshape(row["shape"])
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)  # two batches may round differently
        assert max(digits(repr(v)) for v in row["data"]) <= 9
