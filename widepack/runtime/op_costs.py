"""Estimates what one op takes from the sizes of its arguments and results: time, and memory beside its
result.

The estimate is an upper bound, coarse and the same on every machine. `walk.py` adds it up and refuses a
program that takes more than the artifact's files justify. Work is counted in nanoseconds of one core of a
server. The class of each op is in `ir/op_records.py`:

1. of a class with a FLOP formula (`flop_formulas.py`), the time is that of the FLOP in the dtype;
2. of a class of `_RULES`, the rule says it;
3. of any other class, each number that is read or written has a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..ir import ops
from ..ir.limits import OBJECT, integers, recurrent_steps, size, tensors
from ..ir.op_records import record
from ..ir.torch_internals import memory_id
from ..kernels.experts import PADDING
from .flop_formulas import FORMULAS


class Cost(NamedTuple):
    """The cost of one op. work: nanoseconds of one core. room: bytes that it takes beside its result."""

    work: float
    room: float = 0.0


Given = Mapping[str, Any]
"""The arguments of an op, by name."""

CALL = 5_000.0
"""Nanoseconds that an op takes beside its numbers, for each tensor that it returns."""
NUMBER_OP = 1_000.0
"""Nanoseconds that one of Python's operators takes."""
STEP = 30_000.0
"""Nanoseconds that a step of a recurrent layer takes beside its numbers."""
MEMBER = 5_000.0
"""Nanoseconds that the call of one member's kernel takes beside its numbers."""
_WEIGHTS = {"linear": 1.0, "sort": 40.0, "slow": 20.0, "fourier": 20.0, "slowest": 500.0, "series": 5_000.0}
"""Nanoseconds for each number that is read or written."""
_MATRIX = {
    "float32": 0.04,
    "float64": 0.08,
    "bfloat16": 0.3,
    "float16": 1.0,
    "complex64": 0.16,
    "complex128": 0.32,
}
_OTHER_MATRIX = 2.0


def cost(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Cost:
    """The cost of an op for these arguments and this result. The tensors may be on the meta device."""
    if op in ops.PYTHON:
        return Cost(NUMBER_OP)
    name, known = op.rpartition(".")[0], record(op)
    given = ops.bind(op, tuple(args), dict(kwargs))
    calls = CALL * max(1, sum(1 for _ in tensors(result)))
    if known.cost in FORMULAS:
        work, room = _products(known.cost, name, given, result)
    elif known.cost in _RULES:
        work, room = _RULES[known.cost](given, result)
    elif ops.returns_view(op):
        return Cost(calls + _copied(given, result))
    else:
        little = known.reads != "all"
        numbers = count(result) + (0 if little else count(given))
        work = _WEIGHTS[known.cost] * numbers
        room = 0.0 if little else float(size(given))
        if known.cost == "fourier":
            room = 6.0 * size([given, result])
    return Cost(calls + work, room + _dense_copies(given))


def cost_by_values(op: str, result_bytes: float, given: Any) -> Cost:
    """The cost of an op whose result has at most this many bytes, where only values determine the size."""
    kind = record(op).cost
    each = _WEIGHTS["slowest" if kind == "multivariate gamma" else kind if kind in _WEIGHTS else "slow"]
    return Cost(CALL + max(_WEIGHTS["slow"], each) * (result_bytes + size(given)), 4.0 * size(given))


def rate(x: torch.Tensor) -> float:
    """Nanoseconds of a multiplication and an addition in a matrix product, in the dtype of a tensor."""
    return _MATRIX.get(str(x.dtype).removeprefix("torch."), _OTHER_MATRIX)


def count(value: Any) -> int:
    """The number of numbers in all tensors of arguments or results."""
    return sum(t.numel() for t in tensors(value))


def broadcast_count(given: Given) -> int:
    """The number of numbers of all tensors of a call after they broadcast to one shape."""
    shapes = [list(t.shape) for t in tensors(dict(given))]
    rank = max(map(len, shapes), default=0)
    padded = [[1] * (rank - len(s)) + s for s in shapes]
    return math.prod(max(row) for row in zip(*padded)) if padded else 0


def _copied(given: Given, result: Any) -> int:
    """The numbers of a result that are not in the memory of an argument: `reshape` copies what has gaps."""
    known = {memory_id(t) for t in tensors(given)}
    return sum(t.numel() for t in tensors(result) if memory_id(t) not in known)


def _dense_copies(given: Given) -> float:
    """The bytes of arguments with gaps or repeated numbers, of which a kernel makes dense copies first."""
    return float(sum(t.numel() * t.element_size() + OBJECT for t in tensors(given) if not t.is_contiguous()))


# ---------------------------------------------------------------- ops with a FLOP formula


def _products(kind: str, name: str, given: Given, result: Any) -> Cost:
    """The time of the FLOP, one pass over all numbers, and what the class takes beside that."""
    out = next(tensors(result))
    pairs = FORMULAS[kind](name, given, out) / 2
    more, room = _BESIDE[kind](name, given, out, pairs)
    passed = pairs * rate(next(tensors(given))) * _slowness(kind, given)
    return Cost(passed + count(given) + count(result) + more, float(room))


def _slowness(kind: str, given: Given) -> float:
    """How much slower the kernels of a class are than matrix products."""
    if kind == "bilinear":
        return 25.0
    if kind not in ("convolution", "member convolutions"):
        return float(PADDING) if "index" in given else 1.0  # rows of experts may be padded
    if given.get("groups", 1) == 1:
        return 4.0
    channels = int(given["weight"].shape[1 if kind == "convolution" else 2])
    return 4.0 + 50.0 / max(1, channels)  # few channels leave vectors empty


def _of_product(name: str, given: Given, out: torch.Tensor, pairs: float) -> Cost:
    """Operands that broadcast are copied first. `addbmm` runs one matrix after the other."""
    columns, rows = (int(out.shape[-1]), int(out.shape[-2])) if out.dim() > 1 else (1, 1)
    inner = pairs / max(1, out.numel())
    b = [t for key, t in given.items() if isinstance(t, torch.Tensor) and key != "bias"][-1]
    copies = out.numel() / max(1, columns) * inner
    if b.dim() > 2:
        copies += out.numel() / max(1, rows) * inner
    alone = 5_000.0 * int(b.shape[0]) if name == "aten.addbmm" else 0.0
    return Cost(alone, copies * b.element_size())


def _of_convolution(name: str, given: Given, out: torch.Tensor, pairs: float) -> Cost:
    """Kernels other than oneDNN's, which runs float32 alone, write out the columns of the input first, and
    loop over batch and groups.
    """
    x, weight = given.get("input", given.get("self", given.get("x"))), given["weight"]
    batch, plain = max(1, int(x.shape[0])), x.dtype == torch.float32
    at_once = not plain or "transpose" in name or given.get("transposed")  # the columns of the whole batch
    columns = pairs / max(1, int(weight.shape[0])) / (1 if at_once else batch)
    groups = given.get("groups", 1)
    read = 2 * x.numel() + 2 * weight.numel()  # in oneDNN's order, or dense
    return Cost(0.0 if plain else 10_000.0 * batch * groups, (columns + read) * x.element_size())


def _of_member_convolutions(name: str, given: Given, out: torch.Tensor, pairs: float) -> Cost:
    """The convolution of one member, N times, and a copy of each result."""
    x, weight = given["x"], given["weight"]
    members = max(1, int(weight.shape[0]))
    transposed = given.get("output_padding") is not None
    one = {
        "x": x[:1].flatten(0, 1),
        "weight": weight[0] if weight.shape[0] else weight,
        "transposed": transposed,
    }
    more, room = _of_convolution(name, {**one, "groups": given.get("groups", 1)}, out, pairs / members)
    return Cost(members * (more + MEMBER) + out.numel(), room + 2.0 * size([out]))


def _of_attention(name: str, given: Given, out: torch.Tensor, pairs: float) -> Cost:
    """A score for each query and key."""
    q, k, v = given["query"], given["key"], given["value"]
    scores = q.numel() // max(1, int(q.shape[-1])) * int(k.shape[-2])
    return Cost(5.0 * scores, 3.0 * scores * q.element_size() + size([q, k, v]))


def _of_grouped_linear(name: str, given: Given, out: torch.Tensor, pairs: float) -> Cost:
    """The ops of experts sort the numbers of the experts, and may pad the rows."""
    of_experts = "index" in given
    memory = size([given["x"], out]) * (2 + (PADDING if of_experts else 0)) + size(given["weight"])
    return Cost(0.0, memory + (64 * count(given["index"]) if of_experts else 0))


def _of_factored(name: str, given: Given, out: torch.Tensor, pairs: float) -> Cost:
    """The products with the first thin factor."""
    x, left = given.get("x"), given["left"]
    thin = 0 if x is None else int(left.shape[0]) * int(x.shape[1]) * int(left.shape[-1])
    return Cost(float(thin), 8 * (count(given) + 2 * out.numel() + thin))


def _of_layer_chain(name: str, given: Given, out: torch.Tensor, pairs: float) -> Cost:
    """The result of each layer, twice."""
    x, weights = given["x"], list(tensors(given["weights"]))
    made = sum(int(w.shape[0]) * int(w.shape[1]) * int(x.shape[1]) for w in weights)
    copied = int(weights[0].shape[0]) * int(x.shape[1]) * int(x.shape[2]) if weights else 0
    return Cost(20.0 * made + 10_000.0 * len(weights), (2 * made + copied) * x.element_size() + size(weights))


def _of_bilinear(name: str, given: Given, out: torch.Tensor, pairs: float) -> Cost:
    """A round for each output, or for each place of the longest dim."""
    parts = list(tensors(given))
    rounds = max((int(n) for t in parts for n in t.shape), default=1)
    if name == "aten.bilinear":
        rounds = int(parts[2].shape[0])
    return Cost(20_000.0 * min(rounds, 2**14), 8.0 * pairs)


def _of_recurrent_layer(name: str, given: Given, out: torch.Tensor, pairs: float) -> Cost:
    """The gates of each row, and each step."""
    x = given.get("input", given.get("data"))
    rows = math.prod(int(n) for n in x.shape[:-1])
    gates = rows * sum(int(w.shape[0]) for w in tensors(given["params"]) if w.dim() == 2)
    more = recurrent_steps(name, given) * STEP + gates + 4 * count(given)
    return Cost(more, 2.0 * gates * x.element_size())


def _of_recurrent_steps(name: str, given: Given, out: torch.Tensor, pairs: float) -> Cost:
    rows, members = int(given["x"].shape[1]) * int(given["x"].shape[2]), int(given["h"].shape[0])
    room = size(list(given.values())) + 2**24 + rows * members * 16
    return Cost(recurrent_steps(name, given) * STEP, room)


_BESIDE: dict[str, Callable[[str, Given, torch.Tensor, float], Cost]] = {
    "product": _of_product,
    "convolution": _of_convolution,
    "member convolutions": _of_member_convolutions,
    "attention": _of_attention,
    "grouped linear": _of_grouped_linear,
    "factored": _of_factored,
    "layer chain": _of_layer_chain,
    "bilinear": _of_bilinear,
    "recurrent": _of_recurrent_layer,
    "recurrent steps": _of_recurrent_steps,
}
"""What a class with a FLOP formula takes beside the FLOP, from the number of multiplications."""


# ---------------------------------------------------------------- ops without a FLOP formula


def _contraction(given: Given, result: Any) -> Cost:
    """The product of the label sizes if they are known, else a bound from the operands' sizes."""
    parts, out = list(tensors(given)), max(1, count(result))
    pairs = math.sqrt(float(out) * math.prod(max(1.0, float(t.numel())) for t in parts))
    if (labels := _label_sizes(given)) is not None:
        pairs = float(math.prod(labels.values()))
    room = 8.0 * (count(given) + (pairs if len(parts) > 2 else 0))
    return Cost(pairs * (rate(parts[0]) if parts else _OTHER_MATRIX) + count(given) + out, room)


def _label_sizes(given: Given) -> dict[str, int] | None:
    """The size of every label of an einsum; each dim under an ellipsis has its own label.

    None for an equation that cannot be read, and without one.
    """
    equation, parts = given.get("equation"), list(tensors(given.get("tensors")))
    if not isinstance(equation, str):
        return None
    sides = equation.replace(" ", "").partition("->")[0].split(",")
    if len(sides) != len(parts):
        return None
    sizes: dict[str, int] = {}
    for side, x in zip(sides, parts):
        before, dots, after = side.partition("...")
        free = x.dim() - len(before) - len(after)
        if free < 0 or (free and not dots):
            return None
        for label, n in zip([*before, *(f"{k}" for k in range(-free, 0)), *after], x.shape):
            sizes[label] = max(sizes.get(label, 1), int(n))
    return sizes


def _matrix_power(given: Given, result: Any) -> Cost:
    """Products of a matrix with itself: at most two for each bit of the power, or one for each bit of the
    largest exponent of the dtype, by which `linalg_matrix_exp` halves the matrix first.
    """
    x, rows = given["self"], int(given["self"].shape[-1])
    products = 2 * max([1, *(abs(n).bit_length() for n in integers(given.get("n")))])
    if "n" not in given:
        products = 20 + (1100 if x.dtype in (torch.float64, torch.complex128) else 150)
    matrices = x.numel() // max(1, rows * rows)
    each = x.numel() * rows * rate(x) + x.numel() + 20_000.0 + 500.0 * matrices
    return Cost(products * each + 0.5 * x.numel() * rows, 10.0 * size(x))  # and an inverse


def _linear_algebra(each: float, given: Given, result: Any) -> Cost:
    """Linear algebra that is cubic in the size of a matrix. each: nanoseconds of one of these operations."""
    work, numbers = 0.0, 0
    parts = list(tensors([dict(given), result]))
    batch = _batch(parts)
    for t in parts:
        if t.dim() < 2:
            numbers += t.numel()
            continue
        of_matrix, most = int(t.shape[-2]) * int(t.shape[-1]), max(int(n) for n in t.shape[-2:])
        work += batch * (of_matrix * max(1, most) * each + 5_000.0)  # operands that broadcast are copied
        numbers += max(t.numel(), batch * of_matrix, most)  # pivots of no matrix are written too
    return Cost(work + 20.0 * numbers, 6.0 * 8 * numbers)


def _batch(parts: Sequence[torch.Tensor]) -> int:
    """The number of matrices after the operands broadcast to each other; the most of an operand if they do
    not.
    """
    shapes = [tuple(int(n) for n in t.shape[:-2]) for t in parts if t.dim() >= 2]
    try:
        batch: tuple[int, ...] = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        return math.prod(batch)
    except RuntimeError:
        return max(map(math.prod, shapes))


def _pool(given: Given, result: Any) -> Cost:
    """Every number of the result reads one window."""
    x, kernel = given["self"], integers(given.get("kernel_size")) or [1]
    spatial = [int(n) for n in x.shape[-len(kernel) :]] if len(kernel) <= x.dim() else [1]
    if len(kernel) == 1:
        spatial = [max([int(n) for n in x.shape[2:]] or [1])] * max(1, x.dim() - 2)
        kernel = kernel * len(spatial)
    window = math.prod(max(1, min(k, n)) for k, n in zip(kernel, spatial))
    return Cost(next(tensors(result)).numel() * window + x.numel(), float(size(x)))


def _pair(given: Given, result: Any) -> Cost:
    """Operands that broadcast to each other, are compared number by number, and summed. `isin` sorts them."""
    numbers = count(given) * 64 if "assume_unique" in given or "elements" in given else broadcast_count(given)
    return Cost(20.0 * (numbers + count(given)), 3.0 * 8 * numbers)


def _distance(given: Given, result: Any) -> Cost:
    """Every row against every row."""
    x, out = next(tensors(given)), next(tensors(result))
    inner = int(x.shape[-1]) if x.dim() else 1
    return Cost(
        out.numel() * max(1, inner) * 20.0 + count(given), float(size(list(given.values())) * 3 + size(out))
    )


def _class_pairs(given: Given, result: Any) -> Cost:
    """Every class of a row against every other class."""
    x = given["self"]
    classes = int(x.shape[-1]) if x.dim() else 1
    return Cost(4.0 * x.numel() * classes + count(given), 4.0 * size(list(given.values())))


def _differences(given: Given, result: Any) -> Cost:
    """A pass for each order."""
    times = 1 + max([1, *integers(given.get("n"))])
    return Cost(times * (20_000.0 + 2.0 * count(given)), 3.0 * size(list(given.values())))


def _window(given: Given, result: Any) -> Cost:
    """Every window of a short-time Fourier transform is written out."""
    numbers = count(given) + count(result)
    return Cost(40.0 * numbers, 24.0 * numbers)


def _multivariate_gamma(given: Given, result: Any) -> Cost:
    """`p` gamma functions for each number."""
    numbers = count(given) * max([1, *integers(given.get("p"))])
    return Cost(100.0 * numbers, 8.0 * numbers)


def _cell(given: Given, result: Any) -> Cost:
    """One step of a recurrent layer: every row with every weight."""
    x = given["input"]
    rows = x.numel() // max(1, int(x.shape[-1])) if x.dim() else 1
    weights = [t for t in tensors([given.get("w_ih"), given.get("w_hh")]) if t.dim() == 2]
    gates = rows * sum(int(w.shape[0]) for w in weights)
    return Cost(rows * count(weights) * rate(x) + 20.0 * gates + count(given), gates * x.element_size() * 4.0)


def _bag(given: Given, result: Any) -> Cost:
    """Every index reads a row of a table, of which a kernel may make a copy."""
    weight, indices = given["weight"], given["indices"]
    read = indices.numel() * int(weight.shape[1])
    room = read * weight.element_size() if weight.dtype is not torch.float32 else 0
    work = 2.0 * read + 20.0 * indices.numel() + count([dict(given), result])
    return Cost(work, float(room + size(indices)))


def _ctc(given: Given, result: Any) -> Cost:
    """A cell for each step and each place of the target, blanks included."""
    x, longest = given["log_probs"], max(integers(given.get("target_lengths")), default=0)
    cells = x.numel() // max(1, int(x.shape[-1])) * (2 * max(0, longest) + 1)
    return Cost(20.0 * cells + count(given), 8.0 * cells)


_RULES: dict[str, Callable[[Given, Any], Cost]] = {
    "contraction": _contraction,
    "matrix power": _matrix_power,
    "cubic": partial(_linear_algebra, 0.5),
    "spectral": partial(_linear_algebra, 5.0),
    "pool": _pool,
    "pair": _pair,
    "distance": _distance,
    "class pairs": _class_pairs,
    "differences": _differences,
    "window": _window,
    "multivariate gamma": _multivariate_gamma,
    "cell": _cell,
    "bag": _bag,
    "ctc": _ctc,
}
CLASSES = frozenset({*FORMULAS, *_RULES, *_WEIGHTS})
"""All classes of costs."""
