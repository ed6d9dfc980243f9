"""Valid operands of ops without samples in the registry whose schema does not define valid operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from widepack.ir import ops
from widepack.registry.samples import Draw, Sample, call

VALID: dict[str, Callable[[Draw], list[Sample]]] = {}
Make = Callable[[Draw], list[Sample]]


def _valid(*names: str) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        for name in names:
            VALID[name] = make
        return make

    return add


def _offsets(draw: Draw, end: int) -> torch.Tensor:
    return torch.tensor([0, end // 3, end // 2, end])


@_valid("aten.segment_reduce.default")
def _segment_reduce(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(9, 3), "sum", lengths=torch.tensor([2, 3, 4]), unsafe=unsafe)
        for unsafe in (False, True)
    ] + [
        call(draw.normal(9), "max", offsets=_offsets(draw, 9)),
        call(draw.normal(9, 2), "mean", offsets=_offsets(draw, 9), unsafe=True),
        call(draw.normal(9), "prod", lengths=torch.tensor([9]), axis=0, initial=1.0),
        call(draw.normal(2, 6), "min", lengths=torch.tensor([[2, 4], [3, 3]]), axis=1),
    ]


@_valid(
    "aten._embedding_bag.default",
    "aten._embedding_bag_forward_only.default",
    "aten.embedding_bag.padding_idx",
)
def _embedding_bag(draw: Draw) -> list[Sample]:
    ids, starts = draw.ints(0, 10, 12), torch.tensor([0, 3, 6])
    rows = [call(draw.normal(10, 4), ids, starts, False, mode, False, None, False, -1) for mode in (0, 1, 2)]
    weights = call(draw.normal(10, 4), ids, starts, False, 0, False, draw.normal(12), True, 2)
    return [
        *rows,
        weights,
        call(draw.normal(10, 32), ids, torch.tensor([0, 3, 12]), False, 0, False, None, True, -1),
    ]


@_valid("aten.ctc_loss.IntList")
def _ctc_loss(draw: Draw) -> list[Sample]:
    log_probs = draw.normal(12, 2, 6).log_softmax(-1)
    return [
        call(log_probs, draw.ints(1, 6, 2, 4), [12, 12], [4, 3], 0, 1, False),
        call(log_probs, draw.ints(1, 6, 7), [12, 10], [4, 3], 0, 0, True),
        call(log_probs.double(), draw.ints(1, 6, 2, 4, dtype=torch.int32), [12, 12], [4, 3]),
    ]


def _recurrent_weights(draw: Draw, gates: int, layers: int = 1, directions: int = 1) -> list[torch.Tensor]:
    weights = []
    for layer in range(layers):
        inputs = 3 if layer == 0 else 4 * directions
        for _ in range(directions):
            weights += [draw.normal(gates * 4, inputs), draw.normal(gates * 4, 4)]
            weights += [draw.normal(gates * 4), draw.normal(gates * 4)]
    return weights


def _layer(draw: Draw, gates: int) -> list[Sample]:
    rows = []
    for layers, directions, first in ((1, 1, False), (2, 1, True), (1, 2, False)):
        x = draw.normal(5, 2, 3) if not first else draw.normal(2, 5, 3)
        state: Any = draw.normal(layers * directions, 2, 4)
        if gates == 4:
            state = [state, draw.normal(layers * directions, 2, 4)]
        weights = _recurrent_weights(draw, gates, layers, directions)
        rows.append(call(x, state, weights, True, layers, 0.0, False, directions == 2, first))
    return rows


def _packed_layer(draw: Draw, gates: int) -> list[Sample]:
    state: Any = draw.normal(1, 3, 4)
    if gates == 4:
        state = [state, draw.normal(1, 3, 4)]
    sizes = torch.tensor([3, 3, 2, 1])
    weights = _recurrent_weights(draw, gates)
    return [call(draw.normal(9, 3), sizes, state, weights, True, 1, 0.0, False, False)]


_valid("aten.lstm.input")(lambda draw: _layer(draw, 4))
_valid("aten.gru.input")(lambda draw: _layer(draw, 3))
_valid("aten.rnn_tanh.input", "aten.rnn_relu.input")(lambda draw: _layer(draw, 1))
_valid("aten.lstm.data")(lambda draw: _packed_layer(draw, 4))
_valid("aten.gru.data")(lambda draw: _packed_layer(draw, 3))
_valid("aten.rnn_tanh.data", "aten.rnn_relu.data")(lambda draw: _packed_layer(draw, 1))


@_valid("aten._thnn_fused_lstm_cell.default")
def _lstm_gates(draw: Draw) -> list[Sample]:
    return [call(draw.normal(2, 16), draw.normal(2, 16), draw.normal(2, 4), draw.normal(16), draw.normal(16))]


@_valid("aten._thnn_fused_gru_cell.default")
def _gru_gates(draw: Draw) -> list[Sample]:
    return [call(draw.normal(2, 12), draw.normal(2, 12), draw.normal(2, 4), draw.normal(12), draw.normal(12))]


@_valid("aten._scaled_dot_product_flash_attention_for_cpu.default")
def _attention(draw: Draw) -> list[Sample]:
    q, k, v = (draw.normal(2, 2, 5, 8) for _ in range(3))
    return [
        call(q, k, v),
        call(q, k, v, 0.0, True),
        call(q, k, v, 0.0, False, attn_mask=draw.normal(5, 5)),
        call(
            q, draw.normal(2, 2, 7, 8), draw.normal(2, 2, 7, 8), attn_mask=draw.normal(2, 1, 5, 7), scale=0.5
        ),
    ]


@_valid("aten._weight_norm_interface.default")
def _weight_norm(draw: Draw) -> list[Sample]:
    return [call(draw.normal(4, 3), draw.normal(4, 1)), call(draw.normal(4, 3, 2), draw.normal(1, 1, 2), 2)]


@_valid("aten.lu_unpack.default")
def _lu_unpack(draw: Draw) -> list[Sample]:
    lu, pivots = torch.linalg.lu_factor(draw.normal(2, 4, 4))
    wide, fewer = torch.linalg.lu_factor(draw.normal(3, 5))
    return [call(lu, pivots), call(wide, fewer), call(lu, pivots, True, False)]


@_valid("aten.linalg_lu_solve.default")
def _lu_solve(draw: Draw) -> list[Sample]:
    lu, pivots = torch.linalg.lu_factor(draw.normal(2, 4, 4))
    return [call(lu, pivots, draw.normal(2, 4, 3)), call(lu, pivots, draw.normal(2, 3, 4), left=False)]


@_valid("aten.linalg_ldl_solve.default")
def _ldl_solve(draw: Draw) -> list[Sample]:
    x = draw.normal(2, 4, 4)
    ldl, pivots = torch.linalg.ldl_factor(x + x.mT)
    return [call(ldl, pivots, draw.normal(2, 4, 3))]


@_valid("aten.take.default")
def _take(draw: Draw) -> list[Sample]:
    return [call(draw.normal(4, 3), draw.ints(-12, 12, 5))]


@_valid("aten.put.default")
def _put(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(4, 3), draw.ints(0, 12, 5), draw.normal(5), accumulate)
        for accumulate in (False, True)
    ]


@_valid("aten.bincount.default")
def _bincount(draw: Draw) -> list[Sample]:
    return [call(draw.ints(0, 9, 20)), call(draw.ints(0, 9, 20), draw.normal(20), 12)]


@_valid("aten.repeat_interleave.Tensor")
def _repeats(draw: Draw) -> list[Sample]:
    return [call(draw.ints(0, 4, 5)), call(draw.ints(0, 4, 5), output_size=10)]


@_valid("aten.repeat_interleave.self_Tensor")
def _repeat(draw: Draw) -> list[Sample]:
    return [call(draw.normal(5, 2), draw.ints(0, 4, 5), 0), call(draw.normal(5), draw.ints(0, 4, 1))]


@_valid("aten.nll_loss_forward.default")
def _nll(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(5, 4), draw.ints(0, 4, 5), draw.normal(4), 1, -100),
        call(draw.normal(4), draw.ints(0, 4), None, 0, 1),
    ]


@_valid("aten.multi_margin_loss.default")
def _multi_margin(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(5, 4), draw.ints(0, 4, 5)),
        call(draw.normal(5, 4), draw.ints(0, 4, 5), 1, 1.0, draw.normal(4)),
    ]


@_valid("aten.multilabel_margin_loss.default")
def _multilabel_margin(draw: Draw) -> list[Sample]:
    return [call(draw.normal(5, 4), draw.ints(-1, 4, 5, 4))]


@_valid("aten.grid_sampler_2d.default", "aten.grid_sampler.default")
def _grid_2d(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(2, 3, 5, 6), draw.normal(2, 4, 4, 2), mode, padding, corners)
        for mode in (0, 1, 2)
        for padding in (0, 1, 2)
        for corners in (False, True)
    ]


@_valid("aten.grid_sampler_3d.default")
def _grid_3d(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(2, 3, 4, 5, 6), draw.normal(2, 2, 3, 4, 3), m, p, True)
        for m in (0, 1)
        for p in (0, 1, 2)
    ]


@_valid("aten.convolution.default")
def _convolution(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(2, 4, 9), draw.normal(6, 2, 3), draw.normal(6), [1], [1], [1], False, [0], 2),
        call(
            draw.normal(2, 4, 9, 8), draw.normal(6, 4, 3, 3), None, [2, 1], [1, 0], [1, 2], False, [0, 0], 1
        ),
        call(
            draw.normal(2, 4, 5, 6),
            draw.normal(4, 3, 3, 3),
            draw.normal(3),
            [2, 2],
            [1, 1],
            [1, 1],
            True,
            [1, 1],
            1,
        ),
        call(
            draw.normal(1, 2, 4, 5, 6),
            draw.normal(3, 2, 2, 2, 2),
            None,
            [1] * 3,
            [0] * 3,
            [1] * 3,
            False,
            [0] * 3,
            1,
        ),
    ]


@_valid("aten.conv_depthwise3d.default")
def _depthwise(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(1, 2, 4, 5, 6), draw.normal(2, 1, 3, 3, 3), [3] * 3, None, [1] * 3, [1] * 3, [1] * 3)
    ]


@_valid("aten.conv_tbc.default")
def _conv_tbc(draw: Draw) -> list[Sample]:
    return [call(draw.normal(7, 2, 3), draw.normal(3, 3, 4), draw.normal(4), 1)]


@_valid("aten.native_group_norm.default")
def _group_norm(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(2, 6, 5), draw.normal(6), draw.normal(6), 2, 6, 5, 3, 1e-5),
        call(draw.normal(2, 6, 5), None, None, 2, 6, 5, 2, 1e-5),
    ]


@_valid("aten.native_layer_norm.default")
def _layer_norm(draw: Draw) -> list[Sample]:
    return [call(draw.normal(5, 8), [8], draw.normal(8), draw.normal(8), 1e-5)]


@_valid("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default")
def _fft(draw: Draw) -> list[Sample]:
    return [
        call(draw.complex(4, 6), [0, 1], 0, True),
        call(draw.normal(4, 6), [1], 1, True),
        call(draw.complex(4, 6), [1], 0, 10),
        call(draw.complex(4, 6), [0, 1], 2, 7),
    ]


@_valid("aten.as_strided.default", "aten._reshape_alias.default")
def _as_strided(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(24), [4, 6], [6, 1]),
        call(draw.normal(4, 6), [6, 4], [1, 6]),
        call(draw.normal(24), [3, 5], [4, 2]),
    ]


@_valid("aten.as_strided_scatter.default")
def _as_strided_scatter(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(24), draw.normal(4, 6), [4, 6], [6, 1], 0),
        call(draw.normal(24), draw.normal(3, 2), [3, 2], [4, 2], 3),
    ]


@_valid("aten._stack.default", "aten.block_diag.default", "aten.cartesian_prod.default")
def _lists(draw: Draw) -> list[Sample]:
    return [call([draw.normal(4), draw.normal(4), draw.normal(4)])]


@_valid("aten._trilinear.default")
def _trilinear(draw: Draw) -> list[Sample]:
    return [call(draw.normal(5, 3), draw.normal(2, 3, 4), draw.normal(5, 4), [1, 3], [0], [1, 2], [2, 3], 1)]


@_valid("aten.histogram.bin_ct")
def _histogram(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(20), 5),
        call(draw.normal(20), 5, range=[-1.0, 1.0], weight=draw.uniform(0, 1, 20)),
    ]


@_valid("aten._masked_softmax.default")
def _masked_softmax(draw: Draw) -> list[Sample]:
    x = draw.normal(2, 3, 4, 4)
    return [
        call(x, draw.bools(4, 4), -1, 0),
        call(x, draw.bools(2, 4), -1, 1),
        call(x, draw.bools(2, 3, 4, 4), 3, 2),
    ]


@_valid(*(f"aten.{kind}_pad{n}d.default" for kind in ("reflection", "replication") for n in (1, 2, 3)))
def _pads(draw: Draw) -> list[Sample]:
    return [call(draw.normal(*([2, 3, 5, 6, 7][: n + 2])), [1, 2] * n) for n in (1, 2, 3)]


@_valid("aten.index_fill.int_Tensor")
def _index_fill(draw: Draw) -> list[Sample]:
    return [call(draw.normal(4, 5), 1, draw.ints(0, 5, 3), torch.tensor(2.0))]


@_valid("aten.searchsorted.Scalar", "aten.bucketize.Scalar")
def _searched(draw: Draw) -> list[Sample]:
    return [call(draw.normal(9).sort().values, 0.5), call(0.5, draw.normal(9).sort().values)]


@_valid("aten.nonzero_static.default")
def _nonzero_static(draw: Draw) -> list[Sample]:
    return [call(draw.bools(4, 5), size=7), call(draw.bools(4, 5), size=40, fill_value=-2)]


@_valid("aten.linalg_lstsq.default")
def _lstsq(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(6, 4), draw.normal(6, 2)),
        call(draw.normal(4, 6), draw.normal(4, 2), driver="gelsd"),
    ]


_MATRICES = ((2, 2), (4, 4), (3, 7, 7), (2, 5, 5), (13, 13), (40, 40))


def _matrix(draw: Draw, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns matrices of this shape in the dtypes that LAPACK has."""
    x = draw.normal(*shape)
    return [x, x.double(), draw.complex(*shape), draw.complex(*shape).to(torch.complex128)]


@_valid(
    "aten.linalg_eig.default",
    "aten.linalg_eigvals.default",
    "aten._linalg_det.default",
    "aten._linalg_slogdet.default",
    "aten.nuclear_norm.default",
)
def _square_matrices(draw: Draw) -> list[Sample]:
    return [call(x) for shape in _MATRICES for x in _matrix(draw, shape)]


@_valid("aten._linalg_eigh.default")
def _hermitian_matrices(draw: Draw) -> list[Sample]:
    return [call(x + x.mH) for shape in _MATRICES for x in _matrix(draw, shape)]


@_valid("aten._linalg_svd.default")
def _singular_values(draw: Draw) -> list[Sample]:
    shapes = ((4, 4), (3, 7, 5), (5, 13), (40, 40))
    return [call(x, full) for shape in shapes for full in (False, True) for x in _matrix(draw, shape)]


@_valid("aten.unique_dim.default")
def _unique_dim(draw: Draw) -> list[Sample]:
    return [call(draw.ints(0, 2, 6, 2), 0, True, True, True)]


@_valid("aten.unsafe_split_with_sizes.default", "aten.split_with_sizes_copy.default")
def _split(draw: Draw) -> list[Sample]:
    return [call(draw.normal(7, 4), [2, 5], 0), call(draw.normal(7, 4), [1, 3], 1)]


@_valid("aten.native_channel_shuffle.default")
def _shuffle(draw: Draw) -> list[Sample]:
    return [call(draw.normal(2, 6, 4, 4), 3)]


@_valid(
    "aten._conj.default",
    "aten._conj_physical.default",
    "aten.view_as_real_copy.default",
    "aten._neg_view.default",
)
def _complex(draw: Draw) -> list[Sample]:
    return [call(draw.complex(3, 4))]


@_valid("aten.view_as_complex_copy.default")
def _as_complex(draw: Draw) -> list[Sample]:
    return [call(draw.normal(3, 2))]


@_valid("aten._adaptive_avg_pool2d.default")
def _pool_2d(draw: Draw) -> list[Sample]:
    return [call(draw.normal(2, 3, 7, 8), [2, 3]), call(draw.normal(2, 3, 4, 4), [5, 1])]


@_valid("aten._adaptive_avg_pool3d.default")
def _pool_3d(draw: Draw) -> list[Sample]:
    return [call(draw.normal(2, 3, 4, 7, 8), [2, 2, 3])]


@_valid("aten._linalg_solve_ex.default")
def _solve(draw: Draw) -> list[Sample]:
    return [call(draw.normal(2, 4, 4), draw.normal(2, 4, 3)), call(draw.normal(4, 4), draw.normal(4))]


@_valid("aten.addbmm.default")
def _addbmm(draw: Draw) -> list[Sample]:
    return [call(draw.normal(3, 5), draw.normal(2, 3, 4), draw.normal(2, 4, 5))]


@_valid("aten.linspace.Tensor_Tensor")
def _linspace(draw: Draw) -> list[Sample]:
    return [call(torch.tensor(0.0), torch.tensor(2.0), 9)]


@_valid("aten.where.default")
def _where(draw: Draw) -> list[Sample]:
    return [call(draw.bools(4, 5)), call(draw.normal(7))]


@_valid("aten.view_copy.dtype")
def _view_as(draw: Draw) -> list[Sample]:
    return [call(draw.normal(4, 6), torch.int32), call(draw.normal(4, 6), torch.float64)]


# ---------------------------------------------------------------- widepack's own ops


def _packing(name: str, *args: Any) -> Any:
    return ops.function(f"widepack.{name}.default")(*args)


@_valid("widepack.pack_convolution.default")
def _pack_convolution(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(6, 4, 3, 3), [1, 1], [1, 1], [1, 1], 1, [2, 4, 8, 8]),
        call(draw.normal(6, 2, 3, 3), [2, 1], [0, 1], [1, 2], 2, [2, 4, 9, 8]),
        call(draw.normal(6, 4, 2, 2, 2), [1] * 3, [0] * 3, [1] * 3, 1, [1, 4, 5, 5, 5]),
    ]


@_valid("widepack.pack_convolutions.default")
def _pack_convolutions(draw: Draw) -> list[Sample]:
    return [call(draw.normal(3, 6, 4, 3, 3), [1, 1], [1, 1], [1, 1], 1, [2, 4, 8, 8])]


@_valid("widepack.convolution.default")
def _own_convolution(draw: Draw) -> list[Sample]:
    rows = []
    for args in ([1, 1], [1, 1], [1, 1], 1), ([2, 1], [0, 1], [1, 2], 2):
        weight = draw.normal(6, 4 // args[3], 3, 3)
        packed = _packing("pack_convolution", weight, *args, [2, 4, 9, 8])
        for w in (weight, packed):
            rows.append(call(draw.normal(2, 4, 9, 8), w, draw.normal(6), *args, "relu"))
    return rows


@_valid("widepack.pack_linear.default")
def _pack_linear(draw: Draw) -> list[Sample]:
    return [call(draw.normal(3, 6, 4), 5)]


@_valid("widepack.linear.default")
def _own_linear(draw: Draw) -> list[Sample]:
    packed = _packing("pack_linear", draw.normal(3, 6, 4), 5)
    return [
        call(draw.normal(3, 5, 4), packed, draw.normal(3, 6), "gelu"),
        call(draw.normal(3, 5, 4), packed, None),
        call(draw.normal(3, 5, 4), draw.normal(18, 4, 1, 1), draw.normal(3, 6)),
    ]


@_valid("widepack.streamed_linear.default")
def _streamed(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(3, rows, 4), draw.normal(3, 4, 6), bias)
        for rows in (1, 5)
        for bias in (None, draw.normal(3, 6))
    ]


@_valid("widepack.mlp_chain.default")
def _mlp_chain(draw: Draw) -> list[Sample]:
    weights = [draw.normal(3, 6, 4), draw.normal(3, 5, 6)]
    return [
        call(draw.normal(members, 7, 4), weights, biases, ["relu", "gelu_tanh"])
        for members in (1, 3)
        for biases in ([None, None], [draw.normal(3, 6), draw.normal(3, 5)], [None, draw.normal(3, 5)])
    ]


@_valid("widepack.member_convs.default")
def _member_convs(draw: Draw) -> list[Sample]:
    plain = [
        call(draw.normal(x, 2, 4, 9, 8), draw.normal(3, 6, 4 // args[3], 3, 3), bias, *args)
        for x in (1, 3)
        for args in (([1, 1], [1, 1], [1, 1], 1), ([2, 1], [0, 1], [1, 2], 2))
        for bias in (None, draw.normal(3, 6))
    ]
    transposed = [
        call(draw.normal(x, 2, 4, 5, 4), draw.normal(3, 4, 6 // args[3], 3, 3), draw.normal(3, 6), *args)
        for x in (1, 3)
        for args in (([1, 1], [1, 1], [1, 1], 1, [0, 0]), ([2, 1], [0, 1], [1, 2], 2, [1, 1]))
    ]
    return [*plain, *transposed]


@_valid("widepack.member_products.default")
def _member_products(draw: Draw) -> list[Sample]:
    small = [
        call(draw.normal(x, 5, 4), draw.normal(3, 6, 4), bias)
        for x in (1, 3)
        for bias in (None, draw.normal(3, 6))
    ]
    large = [call(draw.normal(x, 130, 128), draw.normal(2, 130, 128), draw.normal(2, 130)) for x in (1, 2)]
    turned = draw.normal(2, 128, 130).transpose(1, 2)
    return [*small, *large, call(draw.normal(2, 130, 128), turned, None)]


@_valid("widepack.delta_linear.default")
def _delta_linear(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(x, 5, 4), draw.normal(6, 4), draw.normal(3, 6, 2), draw.normal(3, 2, 4), bias)
        for x in (1, 3)
        for bias in (None, draw.normal(1, 6), draw.normal(3, 6))
    ]


@_valid("widepack.grouped_experts.default")
def _grouped_experts(draw: Draw) -> list[Sample]:
    half = torch.bfloat16
    return [
        call(draw.normal(3, 5, 8).to(half), draw.normal(3, 4, 8, 16).to(half), draw.ints(-4, 4, 3, 5)),
        call(
            draw.normal(2, 6, 16).to(half),
            draw.normal(2, 3, 8, 16).to(half).transpose(2, 3),
            draw.ints(0, 3, 2, 6),
        ),
    ]


@_valid("widepack.expert_linear.default")
def _expert_linear(draw: Draw) -> list[Sample]:
    few = call(draw.normal(3, 2, 4), draw.normal(3, 5, 6, 4), draw.ints(-5, 5, 3, 2))
    many = call(draw.normal(3, 20, 4), draw.normal(3, 5, 6, 4), draw.ints(0, 5, 3, 20))
    return [few, many, call(draw.normal(2, 8, 130), draw.normal(2, 3, 130, 130), draw.ints(0, 3, 2, 8))]


@_valid("widepack.expert_mm.default")
def _expert_mm(draw: Draw) -> list[Sample]:
    few = call(draw.normal(7, 4), draw.normal(5, 4, 6), draw.ints(-5, 5, 7), True)
    return [few, call(draw.normal(8, 130), draw.normal(3, 130, 130), draw.ints(0, 3, 8))]


@_valid("widepack.sequence_lengths.default")
def _sequence_lengths(draw: Draw) -> list[Sample]:
    lengths = draw.ints(1, 7, 2, 5).sort(descending=True).values
    return [call(lengths, draw.normal(6)), call(lengths[0], draw.normal(7))]


@_valid("widepack.masked_attention.default")
def _masked_attention(draw: Draw) -> list[Sample]:
    long = [draw.normal(2, 3, t, 32) for t in (200, 210, 210)]
    window = draw.bools(200, 210).tril().triu(-40)
    window[:, 0] = True
    return [
        call(*(draw.normal(2, 3, 5, 4) for _ in range(3)), draw.normal(5, 5)),
        call(*long, window),
        call(*long, None, 0.0, True),
    ]


@_valid("widepack.factored_weight.default")
def _factored_weight(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(6, 4), draw.normal(6, 2), draw.normal(2, 4)),
        call(draw.normal(6, 4, 3, 3), draw.normal(6, 1), draw.normal(1, 36)),
        call(draw.normal(6, 4), draw.normal(6, 2), draw.normal(2, 4), draw.normal(6, 1)),
    ]


def _steps(draw: Draw, gates: int) -> list[Sample]:
    rows = []
    for members in (1, 3):
        x, h = draw.normal(members, 5, 2, 4), draw.normal(3, 2, 6)
        state = (h, draw.normal(3, 2, 6)) if gates == 4 else (h,)
        bias = draw.normal(3, gates * 6), draw.normal(3, gates * 6)
        weights = draw.normal(3, 4, gates * 6), draw.normal(3, 6, gates * 6)
        last: tuple[Any, ...] = (None, False) if gates == 4 else (True,) if gates == 3 else (False, "tanh")
        rows += [call(x, *state, *weights, *bias, *last), call(x, *state, *weights, None, None, *last)]
    return rows


_valid("widepack.lstm_steps.default")(lambda draw: _steps(draw, 4))
_valid("widepack.gru_steps.default")(lambda draw: _steps(draw, 3))
_valid("widepack.rnn_steps.default")(lambda draw: _steps(draw, 1))


def _training(draw: Draw, gates: int, *last: Any) -> list[Sample]:
    given = [args[: 7 if gates == 4 else 6] for args, _ in _steps(draw, gates)]
    return [call(*args, *last) for args in given]


_valid("widepack.lstm_training.default")(lambda draw: _training(draw, 4))
_valid("widepack.gru_training.default")(lambda draw: _training(draw, 3))
_valid("widepack.rnn_training.default")(lambda draw: _training(draw, 1, "tanh"))


@_valid("widepack.pack_lstm.default")
def _pack_lstm(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(3, 4, 24), draw.normal(3, 6, 24), reverse, [5, 2, 4]) for reverse in (False, True)
    ]


@_valid("widepack.packed_lstm.default")
def _packed_lstm(draw: Draw) -> list[Sample]:
    weights = _packing("pack_lstm", draw.normal(3, 4, 24), draw.normal(3, 6, 24), False, [5, 2, 4])
    x, h, c = draw.normal(3, 5, 2, 4), draw.normal(3, 2, 6), draw.normal(3, 2, 6)
    return [
        call(x, h, c, weights, draw.normal(3, 24), draw.normal(3, 24), False),
        call(x[:1], h, c, weights, None, None, False),
    ]
