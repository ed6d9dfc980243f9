"""Tests code that torch.export accepts only with widepack's patches, in both input patterns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import small_builds
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.patterns.case import Case, N, case, linear, net, of, param
from networks.patterns.check import build_case, check_case, member
from networks.patterns.shapes import ROWS
from widepack.capture.explain import source_of
from widepack.errors import CaptureError
from widepack.ir.torch_internals import quick_registrations, replaced


def whole(*shape: int, most: int = 9, dtype: torch.dtype = torch.int64) -> Any:
    """Returns a factory of a buffer with integers from 0."""
    return lambda: torch.randint(0, most, shape, dtype=dtype)


def bits(self: Any, x: Tensor) -> Any:
    """Unpacks four-bit weights, two in a byte, and uses every operator on bits, also in place."""
    q = (self.packed[..., None] >> torch.tensor([0, 4], dtype=torch.uint8)) & 15
    up = (self.packed.int()[..., None] << torch.tensor([0, 4])) ^ self.n[:, None]
    a, b = self.n.clone(), self.n.clone()
    a <<= self.n % 3
    a >>= self.n % 2
    a &= self.n + 7
    b |= self.n
    b ^= self.n * 3
    b <<= 2
    b &= 31
    return self.fc(x) + q.flatten() - 8.0, up | self.n[:, None], a, b


def named_freely(self: Any, x: Tensor, **more: Tensor) -> Tensor:
    y: Tensor = self.fc(x) + more["shift"]
    return y.masked_fill(more["mask"], 0.0) if "mask" in more else y


def number(most: int) -> Any:
    """Returns a factory of a buffer without dims."""
    return lambda: torch.randint(0, most, ())


def of_a_domain(self: Any, x: Tensor) -> Any:
    """Reads an embedding, a row, a column and a cell at indices in the members' buffers, and writes one."""
    y = (
        self.fc(x)
        + self.table.weight[self.domain]
        + self.emb[-1 - self.domain]
        + self.emb[:, self.domain][:5]
    )
    z = y.clone()
    z[:, self.domain] = self.emb[self.domain, ..., self.small]
    z[0, self.small] = 7.0
    return y, z, self.cube[self.domain, :, self.domain - 2]


def covariances(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    rows = torch.cov(torch.cat([y, y.flip(0) * 2]))
    columns = y.mT.cov(correction=0)
    weighted = torch.cov(self.w, fweights=self.often, aweights=self.weigh)
    alone = self.w[0].cov(aweights=self.weigh)
    return (
        rows,
        columns,
        weighted,
        alone,
        torch.corrcoef(self.w),
        self.w[1].corrcoef(),
        torch.cov(self.w, fweights=self.often),
    )


def slopes(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    return (
        torch.gradient(y, dim=0),
        torch.gradient(y, spacing=(0.5, 2.0)),
        torch.gradient(y, dim=-1, edge_order=2),
    )


def products(self: Any, x: Tensor) -> Any:
    a, b = self.a, self.b
    return (
        torch.linalg.multi_dot([x, a, b, a]),
        torch.chain_matmul(x, a, b),  # type: ignore[no-untyped-call]
        torch.linalg.multi_dot([x[0], a, b, a.mT, x.mT]),
        torch.linalg.multi_dot([x, a, b[:, 0]]),
    )


def solved(self: Any, x: Tensor) -> Any:
    a = self.a.tril() + 4 * torch.eye(6)
    y, same = torch.triangular_solve(x.mT, a, upper=False)
    z, _ = torch.triangular_solve(x.mT, a.mT, upper=True, transpose=True)
    return y, same, z, torch.linalg.tensorinv((self.a + 8 * torch.eye(6)).reshape(6, 2, 3), ind=1)


def triangles(self: Any, x: Tensor) -> Any:
    """Reads triangles of `[B, B]` and of `[B, 6]`."""
    n, y = x.shape[0], self.fc(x)
    square = y @ y.mT
    answers = []
    for k in (-1, 0, 1):
        i, j = torch.triu_indices(n, n, k)
        answers.append(square[i, j] * (i - 2 * j))
        i, j = torch.tril_indices(n, n, k, dtype=torch.int32)
        answers.append(square[i, j] * (i - 2 * j))
    upper, lower = torch.triu_indices(n, 6, -2), torch.tril_indices(row=6, col=n, offset=2)
    return *answers, y[upper[0], upper[1]], y[lower[1], lower[0]], torch.triu_indices(3, 3, 1)


def numbers_of_sizes(self: Any, x: Tensor) -> Any:
    n = x.shape[0]
    y = self.fc(x) / math.sqrt(n)
    return y[: math.ceil(n / 3)], y[: math.floor((n + 3) / 2)], y / math.sqrt(2.0)


ONCE: dict[str, set[str]] = {}
CASES: dict[str, Case] = {
    "bits": case(net(bits, fc=linear(6, 6), packed=whole(3, most=200, dtype=torch.uint8), n=whole(3)), ROWS),
    "places_that_are_numbers": case(
        net(
            of_a_domain,
            fc=linear(6, 5),
            table=of(nn.Embedding, 5, 5),
            emb=param(5, 5),
            cube=param(5, 3, 5),
            domain=number(5),
            small=lambda: torch.zeros((), dtype=torch.int16),
        ),
        ROWS,
    ),
    "covariances": case(
        net(
            covariances,
            fc=linear(6, 5),
            w=param(4, 8),
            often=lambda: torch.randint(1, 5, (8,)),
            weigh=lambda: torch.rand(8) + 0.1,
        ),
        ROWS,
    ),
    "slopes": case(net(slopes, fc=linear(6, 5)), ROWS, B=(5, 2, 3)),
    "products": case(net(products, a=param(6, 6), b=param(6, 6)), ROWS),
    "solved": case(net(solved, a=param(6, 6)), ROWS),
    "triangles": case(net(triangles, fc=linear(6, 6)), ROWS, B=(5, 2, 9)),
    "numbers_of_sizes": case(net(numbers_of_sizes, fc=linear(6, 5)), ROWS),
    "inputs_of_any_name": case(
        net(named_freely, fc=linear(6, 5)), ROWS, "shift=float32[B,5]", "mask=bool[B,5]"
    ),
    "one_input_of_any_name": case(net(named_freely, fc=linear(6, 5)), ROWS, "shift=float32[B,1]"),
    "a_loss_without_a_derivative": case(
        net(
            lambda self, x: F.soft_margin_loss(self.a(x), self.b(x).sign(), reduction="none"),
            a=linear(6, 5),
            b=linear(6, 5),
        ),
        ROWS,
    ),
    "a_norm_by_parameters": case(
        net(
            lambda self, x: self.fc(F.batch_norm(x, self.mean, self.var.abs() + 1)),
            mean=param(6),
            var=param(6),
            fc=linear(6, 5),
        ),
        ROWS,
    ),
}


@pytest.mark.extended(keep=1)
@pytest.mark.filterwarnings(
    "ignore:torch.triangular_solve is deprecated",
    "ignore:torch.chain_matmul is deprecated",
    "ignore:cov\\(\\)",
)
@pytest.mark.parametrize("name", CASES)
def test_answers_are_right_for_all_members(name: str, tmp_path: Path) -> None:
    check_case(CASES[name], tmp_path, ONCE.get(name, set()))


@dataclass
class Scores:
    """A plain dataclass, which torch.export does not know."""

    mean: Tensor
    scale: Tensor | None = None
    name: str = "scores"


@dataclass
class Pair:
    first: Scores
    rest: Any


def in_dataclasses(self: Any, x: Tensor) -> Any:
    mean = self.fc(x)
    return {"pair": Pair(Scores(mean), (Scores(mean * 2, mean.exp()), [x + 1]))}


def test_plain_dataclasses_are_returned_as_outputs(tmp_path: Path) -> None:
    one = case(net(in_dataclasses, fc=linear(6, 5)), ROWS)
    ens, x = build_case(one, tmp_path)[0], torch.randn(3, 6)
    for answer in (ens(x), ens.each(x.expand(N, 3, 6))):
        pair = answer["pair"]
        assert (pair.kind, list(pair), pair.first.kind, pair.first.name) == (
            "Pair",
            ["first", "rest"],
            "Scores",
            "scores",
        )
        assert isinstance(pair.rest, tuple)
        with torch.no_grad():
            alone = [member(one, i)(x)["pair"] for i in range(N)]
        parts: list[Callable[[Any], Tensor]] = [
            lambda p: p.first.mean,
            lambda p: p.rest[0].mean,
            lambda p: p.rest[0].scale,
            lambda p: p.rest[1][0],
        ]
        for part in parts:
            torch.testing.assert_close(
                part(pair).clone(), torch.stack([part(a) for a in alone]), rtol=1e-5, atol=1e-5
            )
        assert pair.first.scale is None


class Grows(nn.Module):
    """A module with a state, which returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.register_buffer("total", torch.zeros(5))

    def forward(self, x: Tensor) -> Scores:
        y = self.fc(x)
        self.total: Tensor = self.total + y.sum(0)
        return Scores(y, self.total * 2)


@pytest.mark.extended
def test_a_dataclass_beside_a_state(tmp_path: Path) -> None:
    ens, x = small_builds.loaded(Grows, tmp_path, ROWS, state=["total"]), torch.randn(3, 6)
    state = ens.state()
    _, state = ens(x, state=state)
    answer, state = ens(x, state=state)
    alone = small_builds.member(Grows, 1)
    with torch.no_grad():
        alone(x)
        torch.testing.assert_close(answer.scale[1], alone(x).scale, rtol=1e-5, atol=1e-5)
    assert answer.kind == "Scores"


def refused(make: Callable[[], Any], folder: Path, *inputs: str, **how: Any) -> str:
    """Returns the message of a build that is refused."""
    with pytest.raises(CaptureError) as caught:
        build_case(replace(case(make, *inputs), **how), folder)
    assert not (folder / "e.wide").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_dataclass_among_the_inputs_is_refused(tmp_path: Path) -> None:
    make = net(lambda self, x: self.fc(x.mean), fc=linear(6, 5))
    message = refused(make, tmp_path, ROWS, sample=lambda sizes, seed: {"x": Scores(torch.randn(4, 6))})
    assert "input x is a Scores" in message
    assert "or let forward take its fields as separate inputs, or as a dict" in message


def test_a_dtype_that_the_member_refuses_is_reported_with_its_error(tmp_path: Path) -> None:
    """torch.export accepts a linear layer over integers, because it compares only shapes."""
    message = refused(net(lambda self, x: self.fc(x), fc=linear(6, 5)), tmp_path, "x=int64[B,6]")
    assert "fails on the example (B = 4), also without widepack at test_patches.py:" in message
    assert "mat1 and mat2 must have the same dtype, but got Long and Float" in message


def returning(code: str, folder: Path) -> Any:
    """Returns a `forward` with this code in line 6 of a file of its own, which messages name."""
    path = folder / "net.py"
    path.write_text(
        "import math\nimport torch\n\ndef forward(self, x):\n    y, n = self.fc(x), x.shape[0]\n"
        f"    return {code}\n"
    )
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), path, "exec"), space)
    return space["forward"]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "code",
    ["int(x[0, 0].item())", "round(x[0, 0].item())", "math.floor(x.sum().item())", "int(n * x[0, 0].item())"],
)
def test_a_number_of_a_tensor_is_no_size(code: str, tmp_path: Path) -> None:
    message = refused(net(returning(f"y * {code}", tmp_path), fc=linear(6, 5)), tmp_path, ROWS)
    assert "reads the value of a tensor as a Python number at net.py:6 in forward" in message
    assert "size" not in message


NUMBERS = [
    ("y[: int(n / 2) + 1]", "write n // 2 for int(n / 2)"),
    ("y[: round(n / 2)]", "(n + 1) // 2 for round(n / 2)"),
    (
        "y[: round(n / 2)] * 1",
        "computes with a size, or with a number that it reads from a tensor, by round()",
    ),
    ("y / math.log(n)", "write x.new_full((), n).log() for math.log(n)"),
    ("y * torch.linspace(0, 1, n, dtype=torch.float16)[:, None]", "write torch.linspace(a, b, n).to(dtype)"),
]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(("code", "words"), NUMBERS)
def test_numbers_of_sizes_that_cannot_be_followed_name_line_and_solution(
    code: str, words: str, tmp_path: Path
) -> None:
    message = refused(net(returning(code, tmp_path), fc=linear(6, 5)), tmp_path, ROWS)
    assert f"net.py:6 in forward: return {code}" in message
    assert words in message


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("forward", "inputs", "words"),
    [
        (lambda self, x, y: self.fc(x) + self.fc(y), [ROWS, "y=float32[C,6]"], "write y=float32[B,6]"),
        (
            lambda self, x, y: self.fc(x).unflatten(0, (-1, 2)).sum(1) + self.fc(y),
            ["x=float32[2*B,6]", "y=float32[C,6]"],
            "write y=float32[B,6]",
        ),
        (
            lambda self, x, y: self.fc(x) @ self.fc(y).mT,
            ["x=float32[B,T,6]", "y=float32[C,S,6]"],
            "write y=float32[B,S,6]",
        ),
    ],
)
def test_dims_that_have_to_be_equal_are_offered_one_letter(
    forward: Any, inputs: list[str], words: str, tmp_path: Path
) -> None:
    message = refused(net(forward, fc=linear(6, 5)), tmp_path, *inputs)
    assert "takes B and C where they are equal only at test_patches.py:" in message
    assert words in message
    build_case(case(net(forward, fc=linear(6, 5)), inputs[0], words.removeprefix("write ")), tmp_path)


def test_a_node_that_torch_inserted_has_the_line_of_a_neighbour() -> None:
    graph = torch.fx.Graph()
    with_line, other = graph.placeholder("own"), graph.placeholder("other")
    with_line.meta["stack_trace"] = '  File "net.py", line 3, in forward\n    n = x.shape[0]'
    made_by_torch = graph.call_function(round, (other, with_line))
    before = graph.call_function(round, (other,))
    for node, folder in ((made_by_torch, Path(torch.__file__).parent), (before, "torch")):
        node.meta["stack_trace"] = f'  File "{folder}/fx/passes/runtime_assert.py", line 24, in insert'
    assert source_of(made_by_torch, code=True) == "net.py:3 in forward: n = x.shape[0]"
    assert source_of(before) == ""
    reader = graph.call_function(torch.neg, (before,))
    reader.meta["stack_trace"] = '  File "net.py", line 4, in forward\n    y = y[:round(n / 2)]'
    assert source_of(before) == "net.py:4 in forward"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_ops_are_registered_as_torch_does_it() -> None:
    """During an export, torch registers kernels of hundreds of ops by quick functions."""

    def registered() -> dict[str, tuple[Any, ...]]:
        return {
            f"{op}": tuple(sorted(map(str, getattr(op, "py_kernels", {}))))
            for name in ("linear", "matmul", "silu", "layer_norm", "embedding_bag", "relu")
            for op in [getattr(torch.ops.aten, name).default]
        }

    before, base = registered(), torch._ops.OperatorBase.py_impl
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.SiLU())
    exported = torch.export.export(net, (torch.randn(2, 4),))
    alone = str(exported.run_decompositions({}).graph)
    with replaced(quick_registrations()):
        assert torch._ops.OperatorBase.py_impl is not base
        quick = str(exported.run_decompositions({}).graph)
        op = torch.ops.aten.linear.default
        with pytest.raises(AssertionError, match="register a mode for the DispatchKey.Python key"):
            op.py_impl(torch._C.DispatchKey.Python)(lambda *_: None)
    assert quick == alone and registered() == before and torch._ops.OperatorBase.py_impl is base
