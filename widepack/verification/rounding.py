"""Measures the rounding error that is right for answers whose own error does not tell it.

**Answers whose sum is zero but for rounding** (`scale_by_terms`). The mean of a BatchNorm's answers is its
shift. So a second BatchNorm behind a linear layer has a batch mean of exactly 0, and what a member
writes into `running_mean` is rounding: its size says nothing of the error that is right. The numbers that
were added do. A sum of numbers of this size has an error of this size times eps.

The program runs node by node in float64, and each value gets a bound of its terms:

| value | its terms |
|---|---|
| a weight, an input, the result of an op that is not below | its absolute value |
| a sum, mean or pool; a product; a view; an activation of at most its argument | the same op on the terms |
| a sum or difference of values | the sum of both terms |
| the answers of a norm of a batch, a group or a row | (the terms + their mean) x weight / deviation + shift |
| `running_mean` of a norm | (1 - momentum) x that of before + momentum x the mean of the input's terms |
| `running_var` | the same with the mean of the squares |

**Members in float64** (`add_rounding`), whose own answers are the reference. No dtype is finer, so the error
is measured in two ways, with the member's own program:

| way | what it finds |
|---|---|
| in float32, scaled by the ratio of the two eps | errors in proportion to the eps |
| in float64, with each weight and input moved by one ulp | errors that are not |

A root of a sum whose terms cancel has an error like the root of the eps: the distance of a point from itself
is 1e-8 or 0, and which of them is rounding. So the scaled error of float32 is thousands of times too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Node, Program, refs, substitute

from ..ir import ops
from ..ir.cast import raise_value, raised, single_program, single_value
from ..ir.encoding import decode
from ..ir.fake_values import CPU
from ..ir.tensor_type import dtype_in, tensor_type
from ..kernels.exact_norms import as_torch_computes
from ..runtime.graph_module import evaluate_node, graph_module
from ..spec.dtypes import dtype_of
from .subject import AnsweredCalls, Subject
from .tolerance import FLOAT64_EPS, ROUNDING, RootMeanSquare, floating


def coarsest(program: Program) -> list[float]:
    """Returns for each output the largest eps of the floating dtypes that it is computed through.

    A cast back to float32 does not restore what was rounded. Integers and masks count 0: a decision is no
    rounding. Float64 may decide otherwise there, and then float64 is no reference.
    """
    found: dict[str, float] = {s.name: _eps(s.type) for s in (*program.weights, *program.inputs)}
    for node in program.nodes:
        decided = (dtype_in(node.out) or node.out).startswith(("int", "uint", "bool"))
        read = [found[r] for r in refs((node.args, node.kwargs))]
        found[node.name] = 0.0 if decided else max([_eps(node.out), *read])
    return [max((found[r] for r in refs(o.value)), default=0.0) for o in program.outputs]


def _eps(type_: str) -> float:
    """Returns the eps of a type text; 0 if it is not floating, or is of several values, each of which is a
    node.
    """
    tensor = tensor_type(type_)
    return torch.finfo(dtype_of(tensor.dtype)).eps if tensor is not None and tensor.is_rounded else 0.0


Rule = Callable[..., Any]

_LIMITS = torch.tensor(
    [torch.finfo(d).max for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)],
    dtype=torch.float64,
)
"""Numbers that stand for "none", for example after `nan_to_num`: they are no terms."""

_NAMES = """
_to_copy abs adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d addmm alias amax avg_pool1d
avg_pool2d avg_pool3d baddbmm bmm cat clone contiguous conv1d conv2d conv3d convolution cumsum
detach dot expand flatten leaky_relu linalg_vector_norm linear matmul max_pool1d max_pool2d
max_pool3d mean mm mul mv narrow neg permute pow relu repeat reshape select slice square squeeze
stack sum t to transpose unflatten unsqueeze view view_as
"""
_SAME = frozenset(_NAMES.split())
"""Ops that give at most their result of the terms, where the terms are those of each argument."""

_ARGUMENT = frozenset({"elu", "gelu", "silu", "sin", "tanh"})
"""Functions of one number whose result is at most as large as the argument."""


def term_sizes(program: Program, weights: Sequence[Any], inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns for each output the sizes of its terms, in float64; None for an output of whole numbers.

    Args:
        program: The program of a member.
        weights: The weights, in the order of the program.
        inputs: The inputs, in the order of the program.
    """
    exact = raised(program)
    slots = (*exact.weights, *exact.inputs)
    values = {s.name: raise_value(v) for s, v in zip(slots, (*weights, *inputs))}
    sizes = {name: _absolute(v) for name, v in values.items()}
    with torch.inference_mode():
        for node in exact.nodes:
            values[node.name] = evaluate_node(node, values, exact.members, CPU)
            args = decode(substitute(node.args, values.__getitem__), CPU)
            terms = decode(substitute((node.args, node.kwargs), sizes.__getitem__), CPU)
            sizes[node.name] = _of_node(node, values[node.name], args, *terms)
    found = [decode(substitute(o.value, sizes.__getitem__), CPU) for o in exact.outputs]
    return [s if isinstance(s, Tensor) and s.is_floating_point() else None for s in found]


def scale_by_terms(answered: AnsweredCalls, coarse: Sequence[float]) -> None:
    """Gives outputs whose answers cancel the size of their terms as the scale.

    An answer cancels if its float64 value is rounding of float64, or if the members' own errors are large for
    its size, and rounding for the size of its terms.

    Args:
        answered: The members' answers, with their own errors.
        coarse: For each output the coarsest eps that it is computed through.
    """
    subject, stats = answered.subject, answered.stats
    in_doubt = [k for k, s in enumerate(stats) if s.count and (s.eps == FLOAT64_EPS or s.unsteady(coarse[k]))]
    if not in_doubt:
        return
    sums = {k: RootMeanSquare() for k in in_doubt}
    for call in answered.calls:
        for i in range(len(subject.members)) if call.after is None else ():
            try:
                found = term_sizes(subject.program(i), subject.arguments(i), call.inputs[i])
            except (RuntimeError, TypeError, ValueError, IndexError):  # an op that takes no absolute numbers
                return
            for k in in_doubt:
                terms = found[k]
                if terms is not None:
                    sums[k].add(terms[torch.isfinite(terms) & ~torch.isin(terms, _LIMITS)])
    for k in in_doubt:
        terms_rms = sums[k].value
        rounding = ROUNDING * max(stats[k].eps, coarse[k]) * terms_rms
        double = stats[k].eps == FLOAT64_EPS
        if (stats[k].scale if double else stats[k].own_rms) <= rounding:
            stats[k].terms = terms_rms


def _absolute(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_absolute(v) for v in value)
    return value.abs() if isinstance(value, Tensor) and value.dtype != torch.bool else value


def _of_node(
    node: Node, value: Any, args: Sequence[Any], sizes: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Returns the sizes of the terms of a node's value. args: its arguments; sizes: those of their terms."""
    family, _, name = node.op.partition(".")
    base = name.partition(".")[0]
    if family == "operator":
        return sizes[0][args[1]] if base == "getitem" else value
    if not _has_floats(value) or node.op == "aten.view.dtype":
        return _absolute(value)
    if base in _SAME:
        return _absolute(ops.function(node.op)(*sizes, **kwargs))
    if base in _ARGUMENT:
        return sizes[0]
    rule = _RULES.get(base)
    return _absolute(value) if rule is None else rule(value, args, sizes, **kwargs)


def _has_floats(value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)


def _sum(value: Any, args: Sequence[Any], sizes: Sequence[Any], alpha: float = 1) -> Any:
    return _number(sizes[0]) + abs(alpha) * _number(sizes[1])


def _quotient(value: Any, args: Sequence[Any], sizes: Sequence[Any], **kwargs: Any) -> Any:
    return _absolute(value) if kwargs else _number(sizes[0]) / _number(args[1])


def _between(value: Any, args: Sequence[Any], sizes: Sequence[Any]) -> Any:
    weight = args[2]
    return sizes[0] * _number(1 - weight) + sizes[1] * _number(weight)


def _copied(value: Any, args: Sequence[Any], sizes: Sequence[Any], non_blocking: bool = False) -> Any:
    return sizes[1].expand(value.shape)


def _batch_norm(value: Any, args: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """The values of a batch norm over its batch: the answers, the batch's mean and reciprocal deviation."""
    x, weight, bias = sizes[:3]
    shape = (1, -1, *(1 for _ in range(x.dim() - 2)))
    deviations = value[2].reshape(shape)
    answers = (x + _channel_means(x).reshape(shape)) * deviations
    answers = answers if weight is None else answers * weight.reshape(shape)
    answers = answers if bias is None else answers + bias.reshape(shape)
    return answers, _channel_means(x), value[2]


def _batch_norm_with_statistics(value: Any, args: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """The same with the new running statistics."""
    x, momentum = sizes[0], args[6]
    count = x.numel() // x.shape[1]
    squares = _channel_means(x.square()) * count / max(count - 1, 1)
    new = [
        sizes[k] * (1 - momentum) + momentum * terms for k, terms in ((3, _channel_means(x)), (4, squares))
    ]
    return (*_batch_norm(value, args, sizes), *new)


def _instance_norm(value: Any, args: Sequence[Any], sizes: Sequence[Any]) -> Any:
    """The answers of an instance norm. The op writes new running statistics into its arguments 3 and 4."""
    if args[5]:  # the statistics are those of the image
        value = _group_norm(value, (args[0], args[0].shape[1]), (sizes[0], 0, *sizes[1:3], args[7]))
    x, mean, variance, uses_input, momentum = (*sizes[:1], *sizes[3:5], *args[5:7])
    if mean is not None and uses_input:
        count = math.prod(x.shape[2:])
        squares = _channel_means(x.square()) * count / max(count - 1, 1)
        for kept, new in ((mean, _channel_means(x)), (variance, squares)):
            kept.mul_(1 - momentum).add_(new, alpha=momentum)
    return _absolute(value)


def _group_norm(value: Any, args: Sequence[Any], sizes: Sequence[Any]) -> Any:
    x, weight, bias, eps = sizes[0], *sizes[2:5]
    each = (-1, *(1 for _ in x.shape[2:]))  # a number a channel
    weight, bias = (None if t is None else t.reshape(each) for t in (weight, bias))
    return _norm(args[0], x, (x.shape[0], args[1], -1), weight, bias, eps)


def _layer_norm(value: Any, args: Sequence[Any], sizes: Sequence[Any]) -> Any:
    return _norm(args[0], sizes[0], (-1, math.prod(args[1])), *sizes[2:5])


def _norm(
    x: Tensor, terms: Tensor, rows: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """The answers of a norm of rows. rows: the shape in which each row is the last axis."""
    deviations = (x.reshape(rows).var(-1, correction=0, keepdim=True) + eps).sqrt()
    of_rows = terms.reshape(rows)
    answers = ((of_rows + of_rows.mean(-1, keepdim=True)) / deviations).reshape(x.shape)
    answers = answers if weight is None else answers * weight
    return answers if bias is None else answers + bias


def _channel_means(x: Tensor) -> Tensor:
    return x.mean([d for d in range(x.dim()) if d != 1])


def _number(value: Any) -> Any:
    return abs(value)


_RULES: dict[str, Rule] = {
    "add": _sum,
    "sub": _sum,
    "div": _quotient,
    "lerp": _between,
    "copy": _copied,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm_with_statistics,
}


_SINGLE_EPS = torch.finfo(torch.float32).eps
_FINER = FLOAT64_EPS / _SINGLE_EPS
_MOST_RMS = 1e-3  # of the scale: a larger error is no rounding

Run = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


def add_rounding(answered: AnsweredCalls, coarse: Sequence[float]) -> None:
    """Adds to the statistics of outputs that are computed in float64 throughout what rounding costs.

    A way adds nothing if the program fails, or if it decides otherwise at a threshold. Moved numbers add at
    most the error of float32; where all answers overflow in float32, at most its eps. An output of which they
    change more than 0.1% is in doubt (`ErrorStats.doubt`).

    coarse: for each output the coarsest eps that it is computed through.
    """
    outputs = [k for k, eps in enumerate(coarse) if eps == FLOAT64_EPS]
    if not outputs or not answered.calls:
        return
    single = _errors(_in_float32, answered, outputs)
    moved = _errors(moved_by_an_ulp, answered, outputs)
    for k in outputs:
        stats, rms, largest = answered.stats[k], single[k].value, single[k].largest
        most = _MOST_RMS * stats.scale
        if rms <= most:
            stats.raise_own(rms * _FINER, largest * _FINER)
        if not single[k].count:
            rms = largest = _SINGLE_EPS * stats.scale
        if moved[k].value <= most:
            stats.raise_own(min(moved[k].value, rms), min(moved[k].largest, largest))
        else:
            stats.say_doubt(moved[k].value)


def _errors(
    way: Callable[[Subject, int], Run], answered: AnsweredCalls, outputs: Sequence[int]
) -> dict[int, RootMeanSquare]:
    """Returns the errors of the outputs over all members and calls; none if a call fails."""
    errors = {k: RootMeanSquare() for k in outputs}
    for i in range(len(answered.subject.members)):
        run = way(answered.subject, i)
        for call, answer in zip(answered.calls, answered.found):
            if call.after is not None:
                continue
            try:
                with torch.inference_mode():
                    found = run(call.inputs[i])
            except (RuntimeError, IndexError, ValueError):
                return {k: RootMeanSquare() for k in outputs}
            for k, of_output in errors.items():
                own = answer.own[i][k]
                if floating(own) and found[k].shape == own.shape:
                    finite = torch.isfinite(own) & torch.isfinite(found[k])
                    of_output.add(found[k][finite].to(own.dtype) - own[finite])
    return errors


def _in_float32(subject: Subject, i: int) -> Run:
    weights = [single_value(w) for w in subject.arguments(i)]
    run = graph_module(single_program(subject.program(i)), CPU).forward
    return lambda inputs: list(run(*weights, *(single_value(x) for x in inputs)))


def moved_by_an_ulp(subject: Subject, i: int) -> Run:
    """Returns what runs member i with each weight and input in float32 or float64 moved by one ulp."""
    weights = [_moved(w, k) for k, w in enumerate(subject.arguments(i))]
    run = subject.run(i)

    def answer(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with as_torch_computes():
            return list(run(*weights, *(_moved(x, -1 - k) for k, x in enumerate(inputs))))

    return answer


def _moved(value: Any, seed: int) -> Any:
    """Returns numbers whose last bits differ, at random by one up or down. Zeros and coarser dtypes stay."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.complex64, torch.complex128):
        return torch.view_as_complex(_moved(torch.view_as_real(value.resolve_conj()), seed))
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.float64):
        return value
    g = torch.Generator().manual_seed(seed % 2**32)
    up = torch.randint(2, value.shape, generator=g, dtype=torch.bool)
    towards = torch.where(up, math.inf, -math.inf).to(value.dtype)
    stays = (value == 0) | ~torch.isfinite(value)
    moved = torch.nextafter(value, towards)
    return torch.where(stays | ~torch.isfinite(moved), value, moved)
