"""What one op takes, told from the sizes of its arguments and results before it runs: time, and memory beside the result's own.

An estimate from above, coarse and the same on every machine: `walk.py` adds it up, to refuse a program that asks for more than its artifact can justify. Work is counted
in nanoseconds of one core of a server; an op that is in no class below is linear in what it reads and makes. Where a result's size is told by values, not by sizes, the values are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..ir import ops

OBJECT = 1024
"""Bytes that a tensor takes beside its numbers."""
CALL = 5_000.0
"""Nanoseconds that an op takes beside its numbers."""
STEP = 30_000.0
"""Nanoseconds that a step of a recurrent layer takes beside its numbers."""
LARGEST = 2**31
"""Of whole numbers that are no values but sizes, counts and places."""
LISTED = 2**18
"""Tensors that one op may give."""


class Cost(NamedTuple):
    """work: nanoseconds. room: bytes beside the result's."""

    work: float
    room: float = 0.0


class Excess(Exception):
    """An op that asks for what no size justifies, in words."""


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten.{word}" for word in text.split())


# Families by the op's name without its overload.
_READS_LITTLE = _names(
    "embedding gather index_select index take take_along_dim select_copy slice_copy narrow_copy unbind_copy diagonal sym_size sym_numel sym_stride "
    "sym_storage_offset zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty"
)
_PRODUCTS = _names("mm bmm addmm addbmm baddbmm matmul linear mv addmv dot vdot addr ger outer linalg_vecdot")
_CONVOLUTIONS = _names(
    "conv1d conv2d conv3d convolution conv_depthwise3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d",
) | {"widepack.convolution"}
_RECURRENT = _names("lstm gru rnn_tanh rnn_relu")
_STEPS = frozenset({"widepack.rnn_steps", "widepack.gru_steps", "widepack.lstm_steps", "widepack.packed_lstm"})
_ATTENTION = _names(
    "scaled_dot_product_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"
)
_POOLS = _names(
    "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices"
)
_PAIRS = _names(
    "cosine_similarity pairwise_distance dist mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss cosine_embedding_loss margin_ranking_loss "
    "hinge_embedding_loss soft_margin_loss triplet_margin_loss binary_cross_entropy binary_cross_entropy_with_logits isin"
)
_DISTANCES = _names("cdist _cdist_forward _euclidean_dist pdist _pdist_forward cov corrcoef")
_CUBIC = _names(
    "_linalg_det _linalg_slogdet _linalg_solve_ex cholesky cholesky_inverse cholesky_solve inverse linalg_cholesky linalg_cholesky_ex linalg_det linalg_inv linalg_inv_ex "
    "linalg_householder_product linalg_ldl_factor linalg_ldl_solve linalg_lu linalg_lu_factor linalg_lu_solve linalg_matrix_exp linalg_matrix_power linalg_qr linalg_slogdet "
    "linalg_solve linalg_solve_ex linalg_solve_triangular logdet lu_unpack kron"
)
_SPECTRAL = _names(
    "_linalg_eigh _linalg_svd linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_lstsq linalg_matrix_norm linalg_matrix_rank linalg_norm linalg_pinv "
    "linalg_svd linalg_svdvals nuclear_norm"
)
_SORTS = _names(
    "sort argsort topk median nanmedian quantile nanquantile kthvalue mode unique_consecutive unique_dim unique_dim_consecutive _unique _unique2 searchsorted bucketize "
    "histogram histc bincount multinomial randperm isin cummax cummin logcumsumexp cumprod index_put scatter_reduce index_reduce segment_reduce nonzero argwhere "
    "grid_sampler grid_sampler_2d grid_sampler_3d"
)
_SLOW = _names(
    "lgamma digamma erfinv special_ndtri special_erfcx special_log_ndtr special_entr special_i1 special_i1e special_i0e i0 special_bessel_j0 special_bessel_j1 special_bessel_y0 "
    "special_bessel_y1 special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0 "
    "special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_airy_ai special_xlog1py kaiser_window "
    "upsample_bicubic2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa upsample_trilinear3d normal randn randn_like rand rand_like uniform bernoulli exponential log_normal cauchy "
    "geometric rrelu dropout alpha_dropout native_dropout pow float_power fmod remainder gcd lcm atan2 tan acosh asinh atanh complex polar angle stft istft"
)
_SLOWEST = _names("polygamma special_zeta igamma igammac mvlgamma _dirichlet_grad")
_MATRIX = {"float32": 0.04, "float64": 0.08, "bfloat16": 0.3, "float16": 1.0, "complex64": 0.16, "complex128": 0.32}
"""Nanoseconds of a multiplication and addition in a matrix product."""
_OTHER_MATRIX = 2.0
# Arguments whose numbers may be past `LARGEST`: ends of slices, which are cut to size, and bounds of drawn values.
_ANY = frozenset({"start", "end", "low", "high"})


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of an argument or a result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)


def size(value: Any) -> int:
    """Bytes of the tensors of a result, as if none shared its memory with another."""
    return sum(t.numel() * t.element_size() + OBJECT for t in tensors(value))


_REJECTING = _names("_standard_gamma _sample_dirichlet binomial poisson")
"""Ops that draw until a draw is taken, which for some arguments (NaN, an infinite rate) is never."""


def refuse_numbers(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse numbers that are past any size, and lists of results that are past any use, before anything is computed of them. Raises: Excess."""
    name = op.rpartition(".")[0]
    if op in ops.PYTHON:
        refuse_operands(op, args)
        return
    if name in _REJECTING:
        raise Excess("draws numbers until one is taken, which need not end")
    given = ops.bind(op, tuple(args), dict(kwargs))
    for argument in ops.enumerations(op):
        if isinstance(given.get(argument), (int, float, str)):
            raise Excess(f"has {given[argument]!r} as {argument}, which is no number")
    for argument, type_, _ in ops.arguments(op):
        if argument in given and "int" in type_.lower() and argument not in _ANY:
            _within(argument, given[argument])
    if name.startswith("aten._fft_"):  # torch's own entries check these; the ops behind them take them as they are
        _transformed(name, given)
    rule = _LISTS.get(name)
    if rule is not None and (count := rule(given)) > LISTED:
        raise Excess(f"gives {count:,} tensors; at most {LISTED:,} are taken")
    if name == "aten.mvlgamma":
        _within("p", given.get("p"), 2**12)
    if name in _RECURRENT or name in _STEPS:
        _within("steps", _steps(name, given), 2**24)


def _transformed(name: str, given: Mapping[str, Any]) -> None:
    """The dims of a Fourier transform are there, each once, and not empty, and its numbers of the kind that it takes. Raises: Excess."""
    x, dims = given.get("self"), _ints(given.get("dim"))
    rank = x.dim() if isinstance(x, torch.Tensor) else 0
    places = [d for d in dims if 0 <= d < rank]  # one that counts from the end is memory before the tensor to them
    if (
        not isinstance(x, torch.Tensor)
        or not dims
        or len(set(places)) != len(dims)
        or not all(x.shape[d] for d in places)
        or given.get("normalization") not in (0, 1, 2)
    ):
        raise Excess(f"transforms the dims {dims[:8]} of {rank}, or not as a transform does")


def _within(name: str, value: Any, most: int = LARGEST) -> None:
    if isinstance(value, (list, tuple)):
        for part in value:
            _within(name, part, most)
    elif isinstance(value, int) and abs(value) > most:
        raise Excess(f"has {value:,} as {name}; numbers up to {most:,} are taken there")


def refuse_operands(op: str, args: Sequence[Any]) -> None:
    """Python's own operators take numbers: of lists or texts they would make longer ones. Raises: Excess."""
    if op == "operator.getitem":
        return
    for value in args:
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            continue
        if not isinstance(value, (int, float)) or (isinstance(value, int) and abs(value) >= 2**63):
            raise Excess(f"reads {str(value)[:40]!r}, which is no number of 64 bits")
    if op == "operator.pow" and len(args) == 2 and isinstance(args[1], int) and abs(args[1]) > 64:
        raise Excess(f"has the exponent {args[1]:,}; up to 64 is taken")


def _dim_size(given: Mapping[str, Any], of: str = "self") -> int:
    x, dim = given.get(of), given.get("dim", 0)
    if not isinstance(x, torch.Tensor) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        return 0  # the op refuses it
    return int(x.shape[dim])


def _splits(given: Mapping[str, Any]) -> int:
    part = given.get("split_size")
    return -(-_dim_size(given) // max(1, part)) if isinstance(part, int) else 0


def _chunks(given: Mapping[str, Any]) -> int:
    count = given.get("chunks")
    return count if isinstance(count, int) else 0


_LISTS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "aten.unbind": _dim_size,
    "aten.unbind_copy": _dim_size,
    "aten.split": _splits,
    "aten.split_copy": _splits,
    "aten.unsafe_split": _splits,
    "aten.chunk": _chunks,
    "aten.unsafe_chunk": _chunks,
    "widepack.pack_convolutions": lambda given: _dim_size(given, "weight"),
    "widepack.pack_lstm": lambda given: 2 * _dim_size(given, "w_x"),
}


def _steps(name: str, given: Mapping[str, Any]) -> int:
    """Of a recurrent layer, its steps in all layers and directions, and of all members."""
    if name in _STEPS:
        x, h = given.get("x"), given.get("h")
        if not isinstance(x, torch.Tensor) or x.dim() != 4 or not isinstance(h, torch.Tensor) or not h.dim():
            return 0
        return int(x.shape[1]) * (int(h.shape[0]) if name == "widepack.packed_lstm" else 1)
    x = given.get("input", given.get("data"))
    if not isinstance(x, torch.Tensor) or not x.dim():
        return 0
    layers, both = given.get("num_layers", 1), given.get("bidirectional", False)
    steps = int(max(x.shape[:2])) if x.dim() > 1 else int(x.shape[0])
    return steps * max(1, layers if isinstance(layers, int) else 1) * (2 if both else 1)


# ---------------------------------------------------------------- after the result's sizes are known


def cost(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Cost:
    """What the op takes for these arguments and this result; tensors may be on the device meta."""
    if op in ops.PYTHON:
        return Cost(1_000.0)
    name = op.rpartition(".")[0]
    given = ops.bind(op, tuple(args), dict(kwargs))
    rule = _RULES.get(name)
    if rule is None and _views(op):
        return Cost(CALL)
    made = sum(t.numel() for t in tensors(result))
    if rule is None:
        read = 0 if name in _READS_LITTLE else sum(t.numel() for t in tensors([*args, *kwargs.values()]))
        weight = (
            500.0 if name in _SLOWEST else 40.0 if name in _SORTS else 20.0 if name in _SLOW or name.startswith("aten.fft") or "_fft" in name else 1.0
        )
        return Cost(CALL + weight * (read + made), size([*args, *kwargs.values()]) if weight > 1 else 0.0)
    work, room = rule(name, given, result)
    return Cost(CALL + work, room)


_PLAIN, _SMOOTH = 1.0, 5.0
_FUNCTIONS = _names(
    "sin cos tanh exp exp2 expm1 log log2 log10 log1p sigmoid silu gelu mish softplus erf erfc softmax _softmax log_softmax _log_softmax logsumexp elu selu celu "
    "sinh cosh asin acos atan atan2 logaddexp logaddexp2 log_sigmoid logit xlogy hypot norm linalg_vector_norm std var"
)


def _each(name: str) -> float:
    """Nanoseconds for each number that an op reads or makes."""
    if name in _SLOWEST:
        return 500.0
    if name in _SORTS or name.startswith("aten.fft") or "_fft" in name:
        return 50.0
    return 20.0 if name in _SLOW else _SMOOTH if name in _FUNCTIONS else _PLAIN


def _views(op: str) -> bool:
    resolved = ops.resolve(op)
    schema = getattr(resolved, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


Rule = Callable[[str, Mapping[str, Any], Any], tuple[float, float]]


def _first(value: Any) -> torch.Tensor | None:
    return next(tensors(value), None)


def _rate(x: torch.Tensor | None) -> float:
    return _OTHER_MATRIX if x is None else _MATRIX.get(str(x.dtype).removeprefix("torch."), _OTHER_MATRIX)


def _all(given: Mapping[str, Any]) -> int:
    return sum(t.numel() for t in tensors(dict(given)))


def _product(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    """Matrix products: result times inner size; operands that are broadcast are copied first."""
    out = _first(result)
    operands = [t for key, t in given.items() if isinstance(t, torch.Tensor) and not (name in _ADDS and key == "self") and key != "bias"]
    if out is None or not operands:
        return 0.0, 0.0
    a, b = operands[0], operands[-1]
    inner = int(a.shape[-1]) if a.dim() else 1
    if name == "aten.addbmm":  # summed over the batch
        inner *= int(a.shape[0])
    if name in ("aten.addr", "aten.ger", "aten.outer"):
        inner = 1
    columns, rows = (int(out.shape[-1]), int(out.shape[-2])) if out.dim() > 1 else (1, 1)
    copies = out.numel() // max(1, columns) * inner + (out.numel() // max(1, rows) * inner if b.dim() > 2 else 0)
    return out.numel() * max(1, inner) * _rate(a) + _all(given) + out.numel(), copies * a.element_size()


_ADDS = _names("addmm addbmm baddbmm addmv addr")


def _contraction(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    """Of two tensors over any dims: at most the root of the product of the three sizes; of more, by turns."""
    parts = list(tensors(dict(given)))
    out = max(1, sum(t.numel() for t in tensors(result)))
    if name == "aten.einsum" and (labels := _labels(given)) is not None:
        work = math.prod(labels.values())
        middle = work if len(parts) > 2 else 0
        return work * _rate(_first(parts)) + _all(given) + out, (middle + _all(given)) * 8.0
    whole = math.sqrt(float(out) * math.prod(max(1.0, float(t.numel())) for t in parts))
    return whole * _rate(_first(parts)) + _all(given) + out, 8.0 * (_all(given) + (whole if len(parts) > 2 else 0))


def _labels(given: Mapping[str, Any]) -> dict[str, int] | None:
    """The size of every label of an einsum; dims under an ellipsis have labels of their own. None: it cannot be read."""
    equation, parts = given.get("equation"), list(tensors(given.get("tensors")))
    if not isinstance(equation, str):
        return None
    sides = equation.replace(" ", "").partition("->")[0].split(",")
    if len(sides) != len(parts):
        return None
    found: dict[str, int] = {}
    for side, x in zip(sides, parts):
        before, dots, after = side.partition("...")
        free = x.dim() - len(before) - len(after)
        if free < 0 or (free and not dots):
            return None
        for label, n in zip([*before, *(f"{k}" for k in range(-free, 0)), *after], x.shape):
            found[label] = max(found.get(label, 1), int(n))
    return found


def _convolution(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    """Result times what one number of it reads; the columns that kernels without oneDNN write out beforehand."""
    out, x, weight = _first(result), given.get("input", given.get("self", given.get("x"))), given.get("weight")
    if out is None or not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor) or not weight.dim():
        return 0.0, 0.0
    turned = "transpose" in name or bool(given.get("transposed"))
    places = x if turned else out
    each = weight.numel() // max(1, int(weight.shape[0]))
    pairs = places.numel() * max(1, each)
    batch = max(1, int(x.shape[0]))
    columns = pairs // max(1, int(weight.shape[0])) if str(x.dtype) != "torch.float32" or turned else pairs // max(1, int(weight.shape[0]) * batch)
    groups = given.get("groups", 1)
    slow = 4.0 + (0.0 if groups == 1 else 50.0 / max(1, int(weight.shape[1]) if weight.dim() > 1 else 1))  # few channels leave vectors empty
    return pairs * slow * _rate(x) + x.numel() + out.numel(), float(columns * x.element_size() + 2 * x.numel() * x.element_size())


def _ints(value: Any) -> list[int]:
    return [v for v in value if isinstance(v, int)] if isinstance(value, (list, tuple)) else [value] if isinstance(value, int) else []


def _recurrent(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    x, out = given.get("input", given.get("data")), _first(result)
    weights = list(tensors(given.get("params"))) if "params" in given else []
    if not isinstance(x, torch.Tensor) or out is None:
        return 0.0, 0.0
    rows = max(1, math.prod(int(n) for n in x.shape[:-1]))
    numbers = sum(w.numel() for w in weights)
    wide = sum(int(w.shape[0]) for w in weights if w.dim() == 2)
    return rows * numbers * _rate(x) + _steps(name, given) * STEP + rows * wide, rows * wide * x.element_size() * 2.0


def _many_steps(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    """widepack's recurrent ops: every row of every member with its weights."""
    x, h = given.get("x"), given.get("h")
    if not isinstance(x, torch.Tensor) or not isinstance(h, torch.Tensor) or x.dim() != 4 or h.dim() != 3:
        return 0.0, 0.0
    weights = list(tensors([given.get(k) for k in ("w_x", "w_h", "w_p", "weights")]))
    rows = int(x.shape[1]) * int(x.shape[2])
    members = int(h.shape[0])
    return (
        rows * sum(w.numel() for w in weights) * _rate(x) + _steps(name, given) * STEP + _all(given),
        float(size(list(given.values()))) + 2**24 + rows * members * 16,
    )


def _grouped_linear(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    """widepack::linear and streamed_linear: result times inner size."""
    x, out = given.get("x"), _first(result)
    if not isinstance(x, torch.Tensor) or out is None or x.dim() != 3:
        return 0.0, 0.0
    return out.numel() * int(x.shape[-1]) * _rate(x) + _all(given) + out.numel(), float(size([x, out]) * 2 + size(given.get("weight")))


def _attention(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    q, k, v = (given.get(key) for key in ("query", "key", "value"))
    if not all(isinstance(t, torch.Tensor) and t.dim() >= 2 for t in (q, k, v)):
        return 0.0, 0.0
    scores = q.numel() // max(1, int(q.shape[-1])) * int(k.shape[-2])  # type: ignore[union-attr]
    work = scores * (int(q.shape[-1]) + int(v.shape[-1])) * _rate(q) + 5 * scores + _all(given)  # type: ignore[union-attr]
    return work, 3.0 * scores * q.element_size() + size([q, k, v])  # type: ignore[union-attr]


def _pool(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    x, out = given.get("self"), _first(result)
    if not isinstance(x, torch.Tensor) or out is None:
        return 0.0, 0.0
    kernel = _ints(given.get("kernel_size")) or [1]
    spatial = [int(n) for n in x.shape[-len(kernel) :]] if len(kernel) <= x.dim() else [1]
    if len(kernel) == 1:
        spatial = [max([int(n) for n in x.shape[2:]] or [1])] * max(1, x.dim() - 2)
        kernel = kernel * len(spatial)
    window = math.prod(max(1, min(k, n)) for k, n in zip(kernel, spatial))
    return out.numel() * window * 1.0 + x.numel(), float(size(x))


def _pair(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    """What is compared number by number after one is broadcast to the other, and summed up then."""
    shapes = [list(t.shape) for t in tensors(dict(given))]
    rank = max(map(len, shapes), default=0)
    padded = [[1] * (rank - len(s)) + s for s in shapes]
    numbers = math.prod(max(row) for row in zip(*padded)) if padded else 0
    if name == "aten.isin":
        numbers = _all(given) * 64
    return 20.0 * (numbers + _all(given)), 3.0 * 8 * numbers


def _distance(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    """Every row against every row."""
    x, out = _first(dict(given)), _first(result)
    if x is None or out is None:
        return 0.0, 0.0
    inner = int(x.shape[-1]) if x.dim() else 1
    return out.numel() * max(1, inner) * 20.0 + _all(given), float(size(list(given.values())) * 3 + size(out))


def _linear_algebra(each: float) -> Rule:
    def rule(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
        work, numbers = 0.0, 0
        for t in tensors([dict(given), result]):
            if t.dim() >= 2:
                most = max(int(t.shape[-1]), int(t.shape[-2]))
                work += t.numel() * max(1, most) * each + math.prod(int(n) for n in t.shape[:-2]) * 5_000.0
            numbers += t.numel()
        return work + 20.0 * numbers, 6.0 * 8 * numbers

    return rule


def _ctc(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    x = given.get("log_probs")
    if not isinstance(x, torch.Tensor) or not x.dim():
        return 0.0, 0.0
    longest = max(_ints(given.get("target_lengths")), default=0)
    cells = x.numel() // max(1, int(x.shape[-1])) * (2 * max(0, longest) + 1)
    return 20.0 * cells + _all(given), 8.0 * cells


def _bilinear(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    parts, out = list(tensors(dict(given))), _first(result)
    if out is None or len(parts) < 3:
        return 0.0, 0.0
    inner = int(parts[0].shape[-1]) * int(parts[1].shape[-1]) if parts[0].dim() and parts[1].dim() else 1
    if name == "aten._trilinear":
        inner = max(max((int(n) for n in t.shape), default=1) for t in parts) ** 2
    return out.numel() * max(1, inner) * 1.0 + _all(given), 8.0 * out.numel() * max(1, inner)


def _windows(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    """stft and istft: every window is written out."""
    numbers = _all(given) + sum(t.numel() for t in tensors(result))
    return 40.0 * numbers, 24.0 * numbers


def _many_gammas(name: str, given: Mapping[str, Any], result: Any) -> tuple[float, float]:
    numbers = _all(given) * max([1, *_ints(given.get("p"))])
    return 100.0 * numbers, 8.0 * numbers


_RULES: dict[str, Rule] = {
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_names("einsum tensordot"), _contraction),
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    **dict.fromkeys(_RECURRENT, _recurrent),
    **dict.fromkeys(_STEPS, _many_steps),
    **dict.fromkeys(("widepack.linear", "widepack.streamed_linear"), _grouped_linear),
    **dict.fromkeys(_ATTENTION, _attention),
    **dict.fromkeys(_POOLS, _pool),
    **dict.fromkeys(_PAIRS, _pair),
    **dict.fromkeys(_DISTANCES, _distance),
    **dict.fromkeys(_CUBIC, _linear_algebra(0.5)),
    **dict.fromkeys(_SPECTRAL, _linear_algebra(5.0)),
    **dict.fromkeys(_names("bilinear _trilinear"), _bilinear),
    **dict.fromkeys(_names("stft istft"), _windows),
    "aten.ctc_loss": _ctc,
    "aten.mvlgamma": _many_gammas,
}


# ---------------------------------------------------------------- results whose size is data


_UNSIZED = _names("_dirichlet_grad _logcumsumexp _masked_softmax dequantize native_norm")
"""Ops that torch has no sizes of without values; their results are of the size of their arguments."""


def told_by_values(op: str, args: Sequence[Any]) -> bool:
    """Whether only values tell the size of this call's result. An index does by its masks alone."""
    if op == "aten.index.Tensor" and len(args) == 2:
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors(args[1]))
    return ops.of_values(op)


def by_values(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """Bytes of a result whose size values tell, from above; the values are read. None: the op is not one of these."""
    name = op.rpartition(".")[0]
    given = ops.bind(op, tuple(args), dict(kwargs))
    x = next(tensors(dict(given)), None)
    if x is None:
        return None
    numbers = x.numel()
    if name in ("aten.nonzero", "aten.argwhere"):
        return 8.0 * numbers * max(1, x.dim())
    if name in ("aten.masked_select", "aten._unique", "aten._unique2", "aten.unique_consecutive", "aten.unique_dim", "aten.unique_dim_consecutive"):
        return 3.0 * 16 * _joint(given)
    if name == "aten.bincount":
        return 8.0 * max(_largest(x) + 1, int(given.get("minlength", 0)))
    if name == "aten.one_hot":
        classes = given.get("num_classes", -1)
        return 8.0 * numbers * (classes if isinstance(classes, int) and classes >= 0 else _largest(x) + 1)
    if op == "aten.repeat_interleave.Tensor":
        return 8.0 * _total(x)
    if op == "aten.repeat_interleave.self_Tensor":
        repeats = given.get("repeats")
        if not isinstance(repeats, torch.Tensor):
            return None
        dim = given.get("dim")
        rows = numbers if not isinstance(dim, int) else int(x.shape[dim]) if -x.dim() <= dim < x.dim() else 1
        total = _total(repeats) * (rows if repeats.numel() == 1 else 1)
        return float(x.element_size() * total * (numbers // max(1, rows) if rows else 0)) + 8.0 * total
    if name in ("aten.index", "aten.index_put"):
        found = [t for t in tensors(given.get("indices")) if t.dtype in (torch.bool, torch.uint8)]
        others = [t for t in tensors(given.get("indices")) if t.dtype not in (torch.bool, torch.uint8)]
        rows = max([int(t.count_nonzero()) for t in found] + [t.numel() for t in others] + [1])
        joint = math.prod(max(1, t.numel()) for t in others) if len(others) > 1 else rows
        return (
            float(x.element_size() * max(rows, joint) * max(1, numbers))
            if found and not _one_mask(x, given)
            else float(x.element_size() * numbers) + 64.0 * rows
        )
    if name == "aten.istft":
        return 16.0 * numbers + 8.0 * max([0, *_ints(given.get("length")), *_ints(given.get("n_fft"))])
    if name in _UNSIZED:
        return 16.0 * _joint(given)
    if name == "aten.histogram":
        return 16.0 * (numbers + max([0, *_ints(given.get("bins"))]))
    if name == "aten._local_scalar_dense":
        return 0.0
    return None


def cost_by_values(op: str, told: float, given: Any) -> Cost:
    """What an op takes whose result has up to `told` bytes."""
    each = 500.0 if op.rpartition(".")[0] in _SLOWEST else 20.0
    return Cost(CALL + each * (told + size(given)), 4.0 * size(given))


def _one_mask(x: torch.Tensor, given: Mapping[str, Any]) -> bool:
    """Whether a single mask is the only index: then nothing is taken twice."""
    return len(list(tensors(given.get("indices")))) == 1


def _joint(given: Mapping[str, Any]) -> int:
    shapes = [list(t.shape) for t in tensors(dict(given))]
    rank = max(map(len, shapes), default=0)
    padded = [[1] * (rank - len(s)) + s for s in shapes]
    return math.prod(max(row) for row in zip(*padded)) if padded else 0


def _largest(x: torch.Tensor) -> int:
    return int(x.max()) if x.numel() and not x.dtype.is_floating_point and not x.dtype.is_complex else 0


def _total(x: torch.Tensor) -> int:
    if x.dtype.is_floating_point or x.dtype.is_complex or not x.numel():
        return 0
    return int(x.to(torch.float64).clamp_min(0).sum().clamp_max(2.0**62))
