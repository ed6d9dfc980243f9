"""Tests the op `member_convs` and the strategy `streams`: answers, operands, and the order of the streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import small
import torch
from small import all_kinds, node, program
from torch import Tensor

from widepack.ir import ops
from widepack.kernels import member_convs
from widepack.kernels.checks.require import OperandError
from widepack.planning.heuristics import plans
from widepack.planning.request import StrategyRequest
from widepack_artifacts.program import Program, Ref

OP = torch.ops.widepack.member_convs
CONVOLUTIONS: dict[int, Any] = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
TRANSPOSED: dict[int, Any] = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}
OPTIONS = [(1, 0, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1), (1, 0, 1, 1, 0), (3, 1, 1, 2, 2), (1, 2, 2, 1, 1)]
"""Stride, padding, dilation and groups; output padding of those that are transposed."""
N = 3
DEVICE = torch.device("cuda:1")


def drawn(*sizes: int, seed: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("of_all", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spatial", CONVOLUTIONS)
def test_answers_are_those_of_each_member_in_float64(
    spatial: int, options: tuple[int, ...], biased: bool, of_all: bool
) -> None:
    stride, padding, dilation, _, *more = ([n] * spatial for n in options)
    groups, transposed = options[3], len(options) == 5
    x = drawn(1 if of_all else N, 2, 4, *(9, 8, 7)[:spatial], seed=1)
    channels = (4, 6 // groups) if transposed else (6, 4 // groups)
    weight = drawn(N, *channels, *(3, 2, 2)[:spatial], seed=2)
    bias = drawn(N, 6, seed=3) if biased else None
    y = OP(x, weight, bias, stride, padding, dilation, groups, *more)
    meta = [None if v is None else v.to("meta") for v in (x, weight, bias)]
    shape = OP(*meta, stride, padding, dilation, groups, *more)
    assert y.shape == shape.shape and y.stride() == shape.stride()
    for i in range(N):
        given = (x[0 if of_all else i], weight[i], None if bias is None else bias[i])
        double: list[Any] = [None if v is None else v.double() for v in given]
        if transposed:
            exact = TRANSPOSED[spatial](*double, stride, padding, more[0], groups, dilation)
        else:
            exact = CONVOLUTIONS[spatial](*double, stride, padding, dilation, groups)
        depth = weight[0].numel() // weight.shape[1 if not transposed else 2]
        error = float((y[i].double() - exact).abs().max())
        assert error <= 4 * torch.finfo(y.dtype).eps * depth**0.5 * float(exact.abs().max())


IMAGE, FILTERS = (3, 2, 4, 5, 5), (3, 6, 4, 3, 3)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "options", "message"),
    [
        ((2, 2, 4, 5, 5), FILTERS, None, (1, 0, 1, 1), "x is for 2 members; 3 are needed"),
        ((3, 2, 5, 5, 5), FILTERS, None, (1, 0, 1, 1), "x is"),
        ((3, 2, 4, 5), FILTERS, None, (1, 0, 1, 1), "x has 4 dims; 5 are needed"),
        (IMAGE, (6, 4, 3), None, (1, 0, 1, 1), "weight has 3 dims"),
        (IMAGE, FILTERS, (3, 5), (1, 0, 1, 1), "bias is"),
        (IMAGE, (3, 5, 2, 3, 3), None, (1, 0, 1, 2), "5 channels do not form 2 groups"),
        (IMAGE, FILTERS, None, (0, 0, 1, 1), "stride contains 0"),
        (IMAGE, (3, 6, 4, 7, 3), None, (1, 0, 1, 1), "does not fit"),
        ((0, 2, 4, 5, 5), (0, 6, 4, 3, 3), None, (1, 0, 1, 1), "0 members"),
        (
            IMAGE,
            (3, 4, 6, 3, 3),
            None,
            (1, 0, 1, 1, 1),
            "output_padding 1 must be below stride 1 or dilation 1",
        ),
        (IMAGE, (3, 4, 6, 3, 3), (3, 4), (1, 0, 1, 1, 0), "bias is"),
        (IMAGE, (3, 5, 6, 3, 3), None, (1, 0, 1, 1, 0), "x is"),
        (IMAGE, (3, 4, 6, 3, 3), None, (1, 4, 1, 1, 0), "has no result"),
        (IMAGE, (3, 4, 6, 3, 3), None, (1, 0, 1, 3, 0), "4 channels do not form 3 groups"),
    ],
)
def test_wrong_operands_are_refused(x: Any, weight: Any, bias: Any, options: Any, message: str) -> None:
    stride, padding, dilation, groups, *more = options
    given = [None if s is None else torch.zeros(s) for s in (x, weight, bias)]
    numbers = [stride] * 2, [padding] * 2, [dilation] * 2, groups, *([n] * 2 for n in more)
    with pytest.raises(OperandError, match=message):
        ops.function(member_convs.OP)(*given, *numbers)


@dataclass
class StandInStream:
    """A stand-in for a CUDA stream, which writes what happens on it into a common log."""

    name: str
    log: list[tuple[str, str, str]]
    device: str = str(DEVICE)
    cuda_stream: int = 0

    def wait_stream(self, other: StandInStream) -> None:
        self.log.append((self.name, "waits for", other.name))


@dataclass
class Cuda:
    """A stand-in for `torch.cuda`: streams that are made, and the current one."""

    log: list[tuple[str, str, str]] = field(default_factory=list)
    made: int = 0
    current: Any = None
    capturing: bool = True

    def is_current_stream_capturing(self) -> bool:
        assert self.current.device == str(DEVICE), "the question is about the members' device"
        return self.capturing

    def Stream(self, device: str, priority: int) -> StandInStream:  # torch's name
        self.made += 1
        return StandInStream(f"side {self.made - 1}", self.log, device, self.made)

    def current_stream(self, device: torch.device) -> StandInStream:
        assert device == DEVICE, "the stream is that of the members' device"
        return self.current  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def stream(self, stream: StandInStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    found = Cuda()
    found.current = StandInStream("main", found.log)
    for name in ("Stream", "current_stream", "stream", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(member_convs, "SIDE", member_convs.SideStreams())
    return found


@pytest.mark.parametrize("members", [1, 3, member_convs.STREAMS, 2 * member_convs.STREAMS + 3])
def test_streams_fork_before_the_first_member_and_join_after_the_last(cuda: Cuda, members: int) -> None:
    member_convs.run_members(
        lambda i: cuda.log.append((cuda.current.name, "runs", f"member {i}")), members, DEVICE
    )
    side = [f"side {k}" for k in range(min(members, member_convs.STREAMS))]
    runs = [(side[i % len(side)], "runs", f"member {i}") for i in range(members)]
    assert cuda.log == [
        *((name, "waits for", "main") for name in side),
        *runs,
        *(("main", "waits for", name) for name in side),
    ]
    assert cuda.current.name == "main" and cuda.made == len(side)
    member_convs.run_members(lambda i: None, members, DEVICE)
    assert cuda.made == len(side), "the streams of a stream are made once"


def test_a_call_outside_of_a_capture_runs_on_the_current_stream(cuda: Cuda) -> None:
    cuda.capturing = False
    member_convs.run_members(lambda i: cuda.log.append((cuda.current.name, "runs", f"{i}")), 3, DEVICE)
    assert cuda.log == [("main", "runs", str(i)) for i in range(3)] and not cuda.made


def test_another_current_stream_has_side_streams_of_its_own(cuda: Cuda) -> None:
    """A stream that is being captured must not share side streams with other work."""
    member_convs.run_members(lambda i: None, 2, DEVICE)
    with cuda.stream(StandInStream("captured", cuda.log, cuda_stream=99)):
        member_convs.run_members(lambda i: None, 2, DEVICE)
    assert cuda.made == 4
    waited = {(a, b) for a, _, b in cuda.log}
    assert waited == {
        pair
        for main, some in (("main", ("side 0", "side 1")), ("captured", ("side 2", "side 3")))
        for name in some
        for pair in ((main, name), (name, main))
    }


def test_a_failing_member_raises_its_error_after_the_join(cuda: Cuda) -> None:
    def fail(i: int) -> None:
        if i == 1:
            raise ValueError(f"member {i}")

    with pytest.raises(ValueError, match="member 1"):
        member_convs.run_members(fail, 2, DEVICE)
    assert cuda.current.name == "main"
    assert cuda.log[-2:] == [("main", "waits for", "side 0"), ("main", "waits for", "side 1")]


def chain() -> Program:
    """Returns two convolutions with a relu between them, the second one with `same` padding and groups, and a
    transposed one.
    """
    weights = {"w": "float32[6,4,3,3]", "b": "float32[6]", "v": "float32[4,3,3,3]", "u": "float32[4,3,2,2]"}
    first, second, third = "float32[B,6,4,4]", "float32[B,4,4,4]", "float32[B,6,9,9]"
    return program(weights, {"x": "float32[B,4,6,6]"}, [
        node("one", "conv2d", Ref("x"), Ref("w"), Ref("b"), out=first),
        node("r", "relu", Ref("one"), out=first),
        node("two", "conv2d.padding", Ref("r"), Ref("v"), None, [1, 1], "same", [1, 1], 2, out=second),
        node("t", "conv_transpose2d.input", Ref("two"), Ref("u"), None, [2, 2], [0, 0], [1, 1], 2, out=third),
    ], ["t"])  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_requested_program_of_streams_gives_each_members_answer(device: str) -> None:
    """The program for a GPU runs on the CPU too, where the op is a loop; so does its ATen form."""
    net = chain()
    slots = all_kinds(net, x="stacked", w="stacked", b="stacked", v="stacked", u="stacked")
    request = StrategyRequest.parse(["wide", "streams"])
    (plan,) = plans(net, slots, N, {"B": 4}, "B", device, "each", request)
    lowered = small.lowered(net, slots, plan, N)
    assert lowered.used == {"one": "streams", "r": "pointwise", "two": "streams", "t": "streams"}
    assert member_convs.OP in {n.op for n in lowered.program.nodes}
    small.check_forms(net, lowered.program, slots, N)
