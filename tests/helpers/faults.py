"""Faults that are injected into wide programs, and the comparison of a build that has to refuse them.

A fault changes one node of a wide program, or one weight before its first use. The member program stays as it
is. A fault counts if, for inputs of the declared kind, or these with an offset of 3 or 10 times their spread,
an output of a member is off by more than `COUNTS` times the member's own rms error.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from fault_networks import NETWORKS
from torch import Tensor

import widepack
import widepack.fused.module
from widepack.errors import VerificationError
from widepack.fused.check import LiveWeights
from widepack.fused.member_runs import LiveMemberRuns
from widepack.ir.tensor_type import tensor_type
from widepack.runtime.executable import Executable
from widepack.system.progress import Stages
from widepack.verification.answers import run_program
from widepack.verification.calls import calls
from widepack.verification.reference import ReferenceAnswers
from widepack.verification.subject import AnsweredCalls, CallCase, MemberAnswers, VerifiedCall
from widepack_artifacts.program import Node, Program, Ref, Tag, substitute

COUNTS = 8.0
OFFSETS = (0.0, 3.0, 10.0)
MEMBERS = 3
CPU = torch.device("cpu")
Fault = Callable[[Program, random.Random], "Program | None"]


# ---------------------------------------------------------------- changes of programs


def _after(program: Program, name: str, made: Sequence[Node]) -> Program:
    """Returns the program with nodes that follow a value; all later readers of it read the last of them."""
    nodes: list[Node] = []
    at = next((k for k, n in enumerate(program.nodes) if n.name == name), -1)
    for k, node in enumerate((None, *program.nodes), -1):
        if node is not None:
            nodes.append(_reading(node, name, made[-1].name) if k > at else node)
        if k == at:
            nodes += made
    outputs = tuple(
        replace(o, value=substitute(o.value, lambda n: Ref(made[-1].name if n == name else n)))
        for o in program.outputs
    )
    return replace(program, nodes=tuple(nodes), outputs=outputs)


def _reading(node: Node, name: str, other: str) -> Node:
    def ref(n: str) -> Ref:
        return Ref(other if n == name else n)

    return replace(node, args=substitute(node.args, ref), kwargs=substitute(node.kwargs, ref))


def _replaced(program: Program, node: Node, *made: Node) -> Program:
    """Returns the program with other nodes in the place of one; the last of them has its name."""
    nodes = [m for n in program.nodes for m in (made if n is node else (n,))]
    return replace(program, nodes=tuple(nodes))


def _chosen(program: Program, draw: random.Random, accepts: Callable[[Node], bool]) -> Node | None:
    found = [n for n in program.nodes if n.body is None and accepts(n)]
    return draw.choice(found) if found else None


def _floats(out: str) -> list[Any] | None:
    """Returns the sizes of a floating value; None for others."""
    found = tensor_type(out)
    return list(found.sizes) if found is not None and found.dtype == "float32" else None


def _activation(program: Program, draw: random.Random, rank: int = 1) -> Node | None:
    return _chosen(program, draw, lambda n: len(_floats(n.out) or ()) >= rank)


def _op(node: Node) -> str:
    return node.op.split(".")[1]


def _weight(program: Program, draw: random.Random, accepts: Callable[[Any], bool] = lambda s: True) -> Any:
    found = [
        s for s in program.weights if s.kind == "stacked" and s.type.startswith("float32") and accepts(s)
    ]
    return draw.choice(found) if found else None


def _node(name: str, op: str, *args: Any, **kwargs: Any) -> Node:
    return Node(name, f"aten.{op}", args, kwargs)


def _weight_becomes(op: str, *args: Any) -> Fault:
    def fault(program: Program, draw: random.Random) -> Program | None:
        slot = _weight(program, draw)
        return slot and _after(program, slot.name, [_node("fault", op, Ref(slot.name), *args)])

    return fault


def _member_0(program: Program, draw: random.Random) -> Program | None:
    slot = _weight(program, draw)
    if slot is None:
        return None
    first = _node("fault_0", "slice.Tensor", Ref(slot.name), 0, 0, 1)
    return _after(program, slot.name, [first, _node("fault", "cat.default", [Ref("fault_0")] * MEMBERS)])


def _transposed(program: Program, draw: random.Random) -> Program | None:
    def square(slot: Any) -> bool:
        sizes = _floats(slot.type) or [0]
        return len(sizes) >= 2 and sizes[-1] == sizes[-2] and sizes[-1] != 1

    slot = _weight(program, draw, square)
    return slot and _after(program, slot.name, [_node("fault", "transpose.int", Ref(slot.name), -1, -2)])


def _stale(program: Program, draw: random.Random) -> Program | None:
    """A value from before the training: the weight that an initialisation gives."""
    slot = _weight(program, draw, lambda s: len(_floats(s.type) or ()) == 1)
    op = draw.choice(["ones_like.default", "zeros_like.default"])
    return slot and _after(program, slot.name, [_node("fault", op, Ref(slot.name))])


def _half(program: Program, draw: random.Random) -> Program | None:
    node = _activation(program, draw)
    if node is None:
        return None
    dtype = draw.choice(["float16", "bfloat16"])
    low = _node("fault_0", "_to_copy.default", Ref(node.name), dtype=Tag("dtype", dtype))
    return _after(
        program,
        node.name,
        [low, _node("fault", "_to_copy.default", Ref("fault_0"), dtype=Tag("dtype", "float32"))],
    )


def _scaled(program: Program, draw: random.Random) -> Program | None:
    node = _activation(program, draw)
    factor = draw.choice([1 + 1e-5, 1 + 1e-4, 1 + 1e-3, 0.5, -1.0, 2.0])
    if node is None:
        return None
    return _after(program, node.name, [_node("fault", "mul.Scalar", Ref(node.name), factor)])


def _shifted(program: Program, draw: random.Random) -> Program | None:
    """A slice that begins one place too late."""
    node = _chosen(
        program, draw, lambda n: _op(n) in ("slice", "narrow", "select") and isinstance(n.args[2], int)
    )
    if node is not None and draw.random() < 0.7:
        args = list(node.args)
        args[2] += -1 if args[2] > 0 else 1
        if _op(node) == "slice" and len(args) > 3 and isinstance(args[3], int) and 0 < args[3] < 2**31:
            args[3] += args[2] - node.args[2]
        return _replaced(program, node, replace(node, args=tuple(args)))
    node = _activation(program, draw, 2)
    if node is None:
        return None
    return _after(program, node.name, [_node("fault", "roll.default", Ref(node.name), [1], [-1])])


def _other_order(program: Program, draw: random.Random) -> Program | None:
    """Memory that is read in another order: the last two dims."""
    node = _chosen(
        program,
        draw,
        lambda n: len(s := _floats(n.out) or []) >= 2 and all(isinstance(d, int) and d > 1 for d in s[-2:]),
    )
    if node is None:
        return None
    sizes = (_floats(node.out) or [])[-2:]
    return _after(
        program,
        node.name,
        [
            _node("fault_0", "transpose.int", Ref(node.name), -1, -2),
            _node("fault_1", "flatten.using_ints", Ref("fault_0"), -2, -1),
            _node("fault", "unflatten.int", Ref("fault_1"), -1, sizes),
        ],
    )


_OVER_DIMS = frozenset(
    ["softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "roll", "flip", "cat", "mean", "sum"]
)


def _is_dims(value: Any) -> bool:
    numbers = value if isinstance(value, list) and value else [value]
    return all(type(v) is int for v in numbers)


def _other_dim(program: Program, draw: random.Random) -> Program | None:
    node = _chosen(
        program,
        draw,
        lambda n: _op(n) in _OVER_DIMS and any(map(_is_dims, n.args[1:3])),
    )
    if node is None:
        return None
    args = list(node.args)
    places = [k for k, a in enumerate(args[:3]) if k and _is_dims(a)]
    k = draw.choice(places)

    def moved(dim: int) -> int:
        return dim - 1 if dim < 0 else max(1, dim - 1)

    args[k] = moved(args[k]) if isinstance(args[k], int) else [moved(d) for d in args[k]]
    return _replaced(program, node, replace(node, args=tuple(args)))


_EPS = {
    "layer_norm": 4,
    "group_norm": 4,
    "rms_norm": 3,
    "instance_norm": 7,
    "_native_batch_norm_legit_no_training": 6,
}


def _eps(change: Callable[[float], float]) -> Fault:
    def fault(program: Program, draw: random.Random) -> Program | None:
        def has(node: Node) -> bool:
            place = _EPS.get(_op(node), 99)
            return (len(node.args) > place and isinstance(node.args[place], float)) or (
                _op(node) == "add" and isinstance(node.args[1], float) and node.args[1] < 0.01
            )

        node = _chosen(program, draw, has)
        if node is None:
            return None
        args = list(node.args)
        place = _EPS.get(_op(node), 1)
        args[place] = change(args[place])
        return _replaced(program, node, replace(node, args=tuple(args)))

    return fault


_BIAS = {
    "linear": 2,
    "conv1d": 2,
    "conv2d": 2,
    "conv3d": 2,
    "convolution": 2,
    "layer_norm": 3,
    "group_norm": 3,
}


def _no_bias(program: Program, draw: random.Random) -> Program | None:
    def has(node: Node) -> bool:
        place = _BIAS.get(_op(node), 99)
        given = len(node.args) > place and isinstance(node.args[place], Ref)
        return given or _op(node) in ("baddbmm", "addmm", "addcmul")

    node = _chosen(program, draw, has)
    if node is None:
        return None
    args = list(node.args)
    if _op(node) == "addcmul":
        return _replaced(program, node, replace(node, op="aten.mul.Tensor", args=tuple(args[1:3]), kwargs={}))
    if _op(node) in _BIAS:
        args[_BIAS[_op(node)]] = None
        return _replaced(program, node, replace(node, args=tuple(args)))
    return _replaced(program, node, replace(node, kwargs={**node.kwargs, "beta": 0}))


def _no_mask(program: Program, draw: random.Random) -> Program | None:
    def has(node: Node) -> bool:
        masked = _op(node) == "scaled_dot_product_attention" and len(node.args) > 3
        return masked or _op(node) in ("masked_fill", "where", "relu", "tril", "triu")

    node = _chosen(program, draw, has)
    if node is None:
        return None
    if _op(node) == "scaled_dot_product_attention":
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "is_causal")}
        return _replaced(program, node, replace(node, args=node.args[:3], kwargs=kwargs))
    kept = node.args[1] if _op(node) == "where" else node.args[0]
    return _replaced(program, node, replace(node, op="aten.alias.default", args=(kept,), kwargs={}))


def _one_pass(program: Program, draw: random.Random) -> Program | None:
    """`mean(x^2) - mean(x)^2` as the variance."""
    node = _chosen(program, draw, lambda n: _op(n) in ("layer_norm", "group_norm"))
    if node is None:
        return None
    x, made = node.args[0], []
    if _op(node) == "group_norm":
        made.append(_node("f_x", "unflatten.int", x, 1, [node.args[1], -1]))
        x, dims = Ref("f_x"), list(range(2, len(_floats(node.out) or ()) + 1))
        scale, shift, eps = node.args[2], node.args[3], node.args[4]
    else:
        dims = list(range(-len(node.args[1]), 0))
        scale, shift = (*node.args[2:4], None, None)[:2]
        eps = node.args[4] if len(node.args) > 4 else 1e-5
    made += [
        _node("f_mean", "mean.dim", x, dims, True),
        _node("f_square", "mul.Tensor", x, x),
        _node("f_squares", "mean.dim", Ref("f_square"), dims, True),
        _node("f_mean2", "mul.Tensor", Ref("f_mean"), Ref("f_mean")),
        _node("f_var", "sub.Tensor", Ref("f_squares"), Ref("f_mean2")),
        _node("f_least", "clamp.default", Ref("f_var"), 0.0),
        _node("f_eps", "add.Scalar", Ref("f_least"), eps),
        _node("f_rstd", "rsqrt.default", Ref("f_eps")),
        _node("f_c", "sub.Tensor", x, Ref("f_mean")),
        _node("f_y", "mul.Tensor", Ref("f_c"), Ref("f_rstd")),
    ]
    y = Ref("f_y")
    if _op(node) == "group_norm":
        made.append(_node("f_flat", "flatten.using_ints", y, 1, 2))
        y = Ref("f_flat")
    for name, op, p in (("f_scaled", "mul.Tensor", scale), ("f_shifted", "add.Tensor", shift)):
        if p is not None:
            if _op(node) == "group_norm":
                made.append(_node(f"{name}_p", "unflatten.int", p, 0, [-1, *(1 for _ in dims[:-1])]))
                p = Ref(f"{name}_p")
            made.append(_node(name, op, y, p))
            y = Ref(name)
    made.append(replace(node, op="aten.alias.default", args=(y,), kwargs={}))
    return _replaced(program, node, *made)


KINDS: dict[str, Fault] = {
    "wrong memory order": _other_order,
    "lost eps": _eps(lambda eps: 0.0),
    "wrong eps": _eps(lambda eps: 10 * eps),
    "swapped members": _weight_becomes("roll.default", [1], [0]),
    "member 0 for everybody": _member_0,
    "one-pass variance": _one_pass,
    "dropped bias": _no_bias,
    "16 bits inside": _half,
    "wrong dim": _other_dim,
    "off by one": _shifted,
    "wrong scale": _scaled,
    "missing mask": _no_mask,
    "transposed weight": _transposed,
    "stale buffer": _stale,
}


# ---------------------------------------------------------------- the comparison


class Prepared:
    """The wide program of a network's members, and the comparison that a build makes."""

    def __init__(self, network: str, seed: int) -> None:
        self.network = NETWORKS[network]
        models = [self.network.member(1000 * seed + i) for i in range(MEMBERS)]
        x = self.network.sample(seed)
        found: list[Any] = []
        module: Any = widepack.fused.module
        check = module.check
        module.check = lambda fused, entry, runner: found.append((fused, entry, runner))
        try:
            with torch.no_grad():
                widepack.fuse(models, x, strategy="wide")(x)
        finally:
            module.check = check
        self.fused, self.entry, runner = found[0]
        self.plan, self.program = runner.plan, runner.program
        self.subject = LiveMemberRuns(self.fused, self.entry, self.entry.programs[0], True).subject
        self.weights = {n: v.detach() for n, v in self.fused.tensors_of(self.entry).items()}
        made = calls(self.subject, ["shared"])
        self.answers = ReferenceAnswers(
            self.entry, self.subject, LiveWeights(self.weights), made, Stages(None)
        )
        self._offsets: list[tuple[VerifiedCall, MemberAnswers]] = []

    def refused(self, program: Program) -> str:
        """Returns why the comparison refuses a wide program; "" if it accepts it."""
        try:
            self.answers.check("shared", program, self.plan, None, "")
        except VerificationError as e:
            return str(e)
        return ""

    def off_by(self, program: Program) -> float:
        """Returns the largest error of an output, in the member's own rms errors; NaN if it does not run."""
        worst = 0.0
        for call, answer in self._with_offsets():
            try:
                values = Executable(program, self.weights, CPU).run(*call.stacked())
            except (RuntimeError, IndexError, ValueError, TypeError):
                return math.nan
            for i in range(MEMBERS):
                for k, (value, output) in enumerate(zip(values, self.program.outputs)):
                    wide = value if output.kind == "shared" else value[i]
                    own, exact = answer.own[i][k], answer.truth[i][k]
                    if wide.shape != own.shape or wide.dtype != own.dtype:
                        return math.nan  # the lowering refuses another shape at the node
                    mine = _rms(own.double() - exact)
                    error = _rms(wide.double() - exact)
                    worst = max(worst, error / mine if mine and error == error else math.inf if mine else 0.0)
        return worst

    def _with_offsets(self) -> Iterator[tuple[VerifiedCall, MemberAnswers]]:
        if not self._offsets:
            x = self.network.sample(77, 12)
            for offset in OFFSETS if x.is_floating_point() else (0.0,):
                inputs = [[x + offset * x.std() if offset else x]] * MEMBERS
                call = VerifiedCall(CallCase(name=f"offset {offset}"), "shared", inputs, False)
                answered = AnsweredCalls.of(self.subject, [call])
                for i in range(MEMBERS):
                    run_program(answered, i)
                self._offsets.append((call, answered.found[0]))
        yield from self._offsets


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@dataclass(frozen=True)
class Outcome:
    """What became of one fault. off: how far an output is off, in the member's own rms errors."""

    kind: str
    network: str
    seed: int
    off: float
    refused: str

    @property
    def counts(self) -> bool:
        return self.off > COUNTS


def injected(prepared: Prepared, network: str, kind: str, seed: int) -> Outcome | None:
    """Injects one fault; None if the program has no place for it, or does not run with it."""
    program = KINDS[kind](prepared.program, random.Random(seed))
    if program is None:
        return None
    off = prepared.off_by(program)
    if off != off:
        return None
    return Outcome(kind, network, seed, off, prepared.refused(program) if off > COUNTS else "")
