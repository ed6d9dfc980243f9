"""Tests which of widepack's own ops the backends' compilers get, and that torch.compile calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from loaded import saved
from small import all_kinds, node, program
from torch import Tensor, nn

from widepack.backends.flat import flatten
from widepack.kernels import member_convs, mlp_chain
from widepack.kernels.decompose import for_compiler
from widepack.planning.heuristics import plans
from widepack.planning.request import StrategyRequest
from widepack.runtime.executable import Executable
from widepack.runtime.graph_module import graph_module
from widepack_artifacts.program import Program, Ref
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights

N = 3
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def network() -> Program:
    """Returns two convolutions with pointwise ops and a norm between them."""
    weights = {"w": "float32[6,4,3,3]", "v": "float32[6,3,2,2]", "scale": "float32[6]", "bias": "float32[6]"}
    sizes, last = "float32[B,6,4,4]", "float32[B,6,8,8]"
    return program(weights, {"x": "float32[B,4,6,6]"}, [
        node("one", "conv2d", Ref("x"), Ref("w"), out=sizes),
        node("a", "gelu", Ref("one"), out=sizes),
        node("n", "group_norm", Ref("a"), 3, Ref("scale"), Ref("bias"), out=sizes),
        node("s", "add.Tensor", Ref("n"), Ref("a"), out=sizes),
        node("two", "conv_transpose2d.input", Ref("s"), Ref("v"), None, [2, 2], [0, 0], [0, 0], 2, out=last),
        node("y", "tanh", Ref("two"), out=last),
    ], ["y"])  # fmt: skip


def wide() -> tuple[Program, dict[str, Any]]:
    """Returns the wide program for a GPU with the members' own convolutions, and the kinds of its slots."""
    net = network()
    kinds = all_kinds(net, x="stacked", w="stacked", v="stacked", scale="stacked", bias="stacked")
    request = StrategyRequest.parse(["wide", "streams"])
    (plan,) = plans(net, kinds, N, {"B": 4}, "B", "cuda", "each", request)
    lowered = small.lowered(net, kinds, plan, N)
    assert [lowered.used[n] for n in ("one", "two")] == ["streams"] * 2
    return lowered.program, kinds


def own(ops: Program) -> list[str]:
    return [n.op for n in ops.nodes if n.op.startswith("widepack.")]


@pytest.mark.parametrize(
    ("backend", "device", "kept"),
    [("compile", CUDA, 2), ("compile", CPU, 0), ("aot", CUDA, 0), ("onnxruntime", CPU, 0)],
)
def test_a_compiler_gets_own_ops_only_on_a_gpu_with_torch_compile(
    backend: str, device: torch.device, kept: int
) -> None:
    found, kinds = wide()
    given = for_compiler(found, backend, device)
    assert own(given) == [member_convs.OP] * kept
    small.check(network(), given, kinds, N)


def answers(compiler: str, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles the program that a GPU gets, here for the CPU, and compares it with the uncompiled one."""
    found, kinds = wide()
    given = for_compiler(found, "compile", CUDA)
    net = network()
    drawn = zip(net.weights, small.values(net.weights, kinds, N))
    weights = {s.name: small.of_kind(values, kinds[s.name]) for s, values in drawn}
    run = Executable(given, weights, CPU)
    flat = flatten(run.main, run.given, "compile", "it")
    compiled = torch.compile(
        graph_module(flat.program, CPU, checks="sizes"), fullgraph=True, backend=compiler, dynamic=True
    )
    calls: list[int] = []
    single = member_convs.member_conv

    def counted(x: Tensor, *rest: Any) -> Tensor:
        calls.append(1)
        return single(x, *rest)

    for batch in sizes:
        x = torch.randn(N, batch, 4, 6, 6, generator=torch.Generator().manual_seed(batch))
        with torch.inference_mode():
            want = list(run.eager(x))
            compiled(*flat.weights, x)  # compiles
            with monkeypatch.context() as patched:
                patched.setattr(member_convs, "member_conv", counted)
                y = flat.outputs(compiled(*flat.weights, x))
        assert len(calls) == 2 * N, "each member ran its own two convolutions"
        calls.clear()
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.extended
def test_torch_compile_calls_the_own_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    answers("aot_eager", (2, 5), monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which Inductor imports
def test_inductor_calls_the_own_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    answers("inductor", (2, 5), monkeypatch)


class Recurrent(nn.Module):
    """A recurrent layer of two directions, and a head."""

    def __init__(self, layer: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.steps = layer(6, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.steps(x)[0].relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("divisor", "op"),
    [(2, "Scalar_mode"), (0.5, "Scalar_mode"), (Ref("size"), "Scalar_mode"), (Ref("x"), "Tensor_mode")],
)
def test_compilers_get_a_divisor_that_is_a_number_as_one(divisor: Any, op: str) -> None:
    nodes = [
        node("size", "sym_size.int", Ref("x"), 0),
        node("y", "div.Tensor_mode", Ref("x"), divisor, rounding_mode="floor"),
    ]
    given = program({}, {"x": "float32[B,4]"}, nodes, ["y"])
    assert for_compiler(given, "aot", CPU).nodes[-1].op == f"aten.div.{op}"


def small_layers() -> nn.Module:
    return nn.Sequential(
        *(part for _ in range(8) for part in (nn.Linear(16, 16), nn.ReLU())), nn.LayerNorm(16)
    )


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "spec", "op"),
    [
        (partial(Recurrent, nn.LSTM), "x=float32[B,5,6]", "widepack.lstm_steps.default"),
        (partial(Recurrent, nn.GRU), "x=float32[B,5,6]", "widepack.gru_steps.default"),
        (small_layers, "input=float32[B,16]", mlp_chain.OP),
    ],
    ids=["lstm", "gru", "chain"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_programs_for_a_gpu_compile_around_their_own_kernels(
    make: Callable[[], nn.Module], spec: str, op: str, tmp_path: Path
) -> None:
    saved(make, tmp_path, spec, members=N, targets=("cuda",))
    reader = Reader(tmp_path / "e.wide")
    stored, (_, _, sizes) = Weights(reader.weights_files()), spec.partition("[")
    rows = [r for r in reader.manifest.entries["forward"].wide if (r.device, r.pattern) == ("cuda", "shared")]
    program_of_gpu = reader.program(min(rows, key=lambda row: row.batch[0]).file)
    given = for_compiler(program_of_gpu, "compile", CUDA)
    assert op in own(given)
    assert op not in own(for_compiler(program_of_gpu, "aot", CUDA))
    run = Executable(given, {s.source: stored.get(s.source) for s in given.weights}, CPU)
    flat = flatten(run.main, run.given, "compile", "it")
    torch.compiler.reset()
    compiled = torch.compile(
        graph_module(flat.program, CPU, checks="sizes"), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for batch in (2, 3):
        x = torch.randn(batch, *(int(n) for n in sizes.rstrip("]").split(",")[1:]))
        with torch.inference_mode():
            found = flat.outputs(compiled(*flat.weights, x))
            torch.testing.assert_close(found, list(run.eager(x)), rtol=1e-5, atol=1e-5)
