"""Valid operands of ops without samples in the registry whose schema does not define valid operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.linalg import ldl_factor, lu_factor

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


def _queries(draw: Draw, rows: int, keys: int) -> list[torch.Tensor]:
    return [draw.normal(2, 2, n, 8) for n in (rows, keys, keys)]


def _half(draw: Draw, *shape: int) -> torch.Tensor:
    return draw.normal(*shape).to(torch.bfloat16)


def _sorted(draw: Draw, *shape: int) -> torch.Tensor:
    return draw.ints(1, 7, *shape).sort(descending=True).values


def _packed_state(draw: Draw) -> list[Any]:
    """Returns the state of an LSTM, and its packed weights."""
    weights = _packing("pack_lstm", draw.normal(3, 4, 24), draw.normal(3, 6, 24), False, [5, 2, 4])
    return [draw.normal(3, 2, 6), draw.normal(3, 2, 6), weights]


_MATRICES = ((2, 2), (4, 4), (3, 7, 7), (2, 5, 5), (13, 13), (40, 40))


def _matrix(draw: Draw, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns matrices of this shape in the dtypes that LAPACK has."""
    x = draw.normal(*shape)
    return [x, x.double(), draw.complex(*shape), draw.complex(*shape).to(torch.complex128)]


# ---------------------------------------------------------------- widepack's own ops


def _packing(name: str, *args: Any) -> Any:
    return ops.function(f"widepack.{name}.default")(*args)


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


def _training(draw: Draw, gates: int, *last: Any) -> list[Sample]:
    given = [args[: 7 if gates == 4 else 6] for args, _ in _steps(draw, gates)]
    return [call(*args, *last) for args in given]


VALID |= {
    "aten.segment_reduce.default": lambda d: (
        [
            call(d.normal(9, 3), "sum", lengths=torch.tensor([2, 3, 4]), unsafe=unsafe)
            for unsafe in (False, True)
        ]
        + [
            call(d.normal(9), "max", offsets=_offsets(d, 9)),
            call(d.normal(9, 2), "mean", offsets=_offsets(d, 9), unsafe=True),
            call(d.normal(9), "prod", lengths=torch.tensor([9]), axis=0, initial=1.0),
            call(d.normal(2, 6), "min", lengths=torch.tensor([[2, 4], [3, 3]]), axis=1),
        ]
    ),
    "aten.lstm.input": lambda d: _layer(d, 4),
    "aten.gru.input": lambda d: _layer(d, 3),
    **dict.fromkeys(("aten.rnn_tanh.input", "aten.rnn_relu.input"), lambda d: _layer(d, 1)),
    "aten.lstm.data": lambda d: _packed_layer(d, 4),
    "aten.gru.data": lambda d: _packed_layer(d, 3),
    **dict.fromkeys(("aten.rnn_tanh.data", "aten.rnn_relu.data"), lambda d: _packed_layer(d, 1)),
    "aten._thnn_fused_lstm_cell.default": lambda d: [
        call(d.normal(2, 16), d.normal(2, 16), d.normal(2, 4), d.normal(16), d.normal(16))
    ],
    "aten._thnn_fused_gru_cell.default": lambda d: [
        call(d.normal(2, 12), d.normal(2, 12), d.normal(2, 4), d.normal(12), d.normal(12))
    ],
    "aten._weight_norm_interface.default": lambda d: [
        call(d.normal(4, 3), d.normal(4, 1)),
        call(d.normal(4, 3, 2), d.normal(1, 1, 2), 2),
    ],
    "aten.take.default": lambda d: [call(d.normal(4, 3), d.ints(-12, 12, 5))],
    "aten.put.default": lambda d: [
        call(d.normal(4, 3), d.ints(0, 12, 5), d.normal(5), accumulate) for accumulate in (False, True)
    ],
    "aten.bincount.default": lambda d: [call(d.ints(0, 9, 20)), call(d.ints(0, 9, 20), d.normal(20), 12)],
    "aten.repeat_interleave.Tensor": lambda d: [call(d.ints(0, 4, 5)), call(d.ints(0, 4, 5), output_size=10)],
    "aten.repeat_interleave.self_Tensor": lambda d: [
        call(d.normal(5, 2), d.ints(0, 4, 5), 0),
        call(d.normal(5), d.ints(0, 4, 1)),
    ],
    "aten.nll_loss_forward.default": lambda d: [
        call(d.normal(5, 4), d.ints(0, 4, 5), d.normal(4), 1, -100),
        call(d.normal(4), d.ints(0, 4), None, 0, 1),
    ],
    "aten.multi_margin_loss.default": lambda d: [
        call(d.normal(5, 4), d.ints(0, 4, 5)),
        call(d.normal(5, 4), d.ints(0, 4, 5), 1, 1.0, d.normal(4)),
    ],
    "aten.multilabel_margin_loss.default": lambda d: [call(d.normal(5, 4), d.ints(-1, 4, 5, 4))],
    **dict.fromkeys(
        ("aten.grid_sampler_2d.default", "aten.grid_sampler.default"),
        lambda d: [
            call(d.normal(2, 3, 5, 6), d.normal(2, 4, 4, 2), mode, padding, corners)
            for mode in (0, 1, 2)
            for padding in (0, 1, 2)
            for corners in (False, True)
        ],
    ),
    "aten.grid_sampler_3d.default": lambda d: [
        call(d.normal(2, 3, 4, 5, 6), d.normal(2, 2, 3, 4, 3), m, p, True) for m in (0, 1) for p in (0, 1, 2)
    ],
    "aten.convolution.default": lambda d: [
        call(d.normal(2, 4, 9), d.normal(6, 2, 3), d.normal(6), [1], [1], [1], False, [0], 2),
        call(d.normal(2, 4, 9, 8), d.normal(6, 4, 3, 3), None, [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
        call(
            d.normal(2, 4, 5, 6), d.normal(4, 3, 3, 3), d.normal(3), [2, 2], [1, 1], [1, 1], True, [1, 1], 1
        ),
        call(
            d.normal(1, 2, 4, 5, 6),
            d.normal(3, 2, 2, 2, 2),
            None,
            [1] * 3,
            [0] * 3,
            [1] * 3,
            False,
            [0] * 3,
            1,
        ),
    ],
    "aten.conv_depthwise3d.default": lambda d: [
        call(d.normal(1, 2, 4, 5, 6), d.normal(2, 1, 3, 3, 3), [3] * 3, None, [1] * 3, [1] * 3, [1] * 3)
    ],
    "aten.conv_tbc.default": lambda d: [call(d.normal(7, 2, 3), d.normal(3, 3, 4), d.normal(4), 1)],
    "aten.native_group_norm.default": lambda d: [
        call(d.normal(2, 6, 5), d.normal(6), d.normal(6), 2, 6, 5, 3, 1e-05),
        call(d.normal(2, 6, 5), None, None, 2, 6, 5, 2, 1e-05),
    ],
    "aten.native_layer_norm.default": lambda d: [call(d.normal(5, 8), [8], d.normal(8), d.normal(8), 1e-05)],
    **dict.fromkeys(
        ("aten._fft_c2c.default", "aten._fft_r2c.default", "aten._fft_c2r.default"),
        lambda d: [
            call(d.complex(4, 6), [0, 1], 0, True),
            call(d.normal(4, 6), [1], 1, True),
            call(d.complex(4, 6), [1], 0, 10),
            call(d.complex(4, 6), [0, 1], 2, 7),
        ],
    ),
    **dict.fromkeys(
        ("aten.as_strided.default", "aten._reshape_alias.default"),
        lambda d: [
            call(d.normal(24), [4, 6], [6, 1]),
            call(d.normal(4, 6), [6, 4], [1, 6]),
            call(d.normal(24), [3, 5], [4, 2]),
        ],
    ),
    "aten.as_strided_scatter.default": lambda d: [
        call(d.normal(24), d.normal(4, 6), [4, 6], [6, 1], 0),
        call(d.normal(24), d.normal(3, 2), [3, 2], [4, 2], 3),
    ],
    **dict.fromkeys(
        ("aten._stack.default", "aten.block_diag.default", "aten.cartesian_prod.default"),
        lambda d: [call([d.normal(4), d.normal(4), d.normal(4)])],
    ),
    "aten._trilinear.default": lambda d: [
        call(d.normal(5, 3), d.normal(2, 3, 4), d.normal(5, 4), [1, 3], [0], [1, 2], [2, 3], 1)
    ],
    "aten.histogram.bin_ct": lambda d: [
        call(d.normal(20), 5),
        call(d.normal(20), 5, range=[-1.0, 1.0], weight=d.uniform(0, 1, 20)),
    ],
    **dict.fromkeys(
        (f"aten.{kind}_pad{n}d.default" for kind in ("reflection", "replication") for n in (1, 2, 3)),
        lambda d: [call(d.normal(*[2, 3, 5, 6, 7][: n + 2]), [1, 2] * n) for n in (1, 2, 3)],
    ),
    "aten.index_fill.int_Tensor": lambda d: [call(d.normal(4, 5), 1, d.ints(0, 5, 3), torch.tensor(2.0))],
    **dict.fromkeys(
        ("aten.searchsorted.Scalar", "aten.bucketize.Scalar"),
        lambda d: [call(d.normal(9).sort().values, 0.5), call(0.5, d.normal(9).sort().values)],
    ),
    "aten.nonzero_static.default": lambda d: [
        call(d.bools(4, 5), size=7),
        call(d.bools(4, 5), size=40, fill_value=-2),
    ],
    "aten.linalg_lstsq.default": lambda d: [
        call(d.normal(6, 4), d.normal(6, 2)),
        call(d.normal(4, 6), d.normal(4, 2), driver="gelsd"),
    ],
    **dict.fromkeys(
        (
            "aten.linalg_eig.default",
            "aten.linalg_eigvals.default",
            "aten._linalg_det.default",
            "aten._linalg_slogdet.default",
            "aten.nuclear_norm.default",
        ),
        lambda d: [call(x) for shape in _MATRICES for x in _matrix(d, shape)],
    ),
    "aten._linalg_eigh.default": lambda d: [call(x + x.mH) for shape in _MATRICES for x in _matrix(d, shape)],
    "aten.unique_dim.default": lambda d: [call(d.ints(0, 2, 6, 2), 0, True, True, True)],
    **dict.fromkeys(
        ("aten.unsafe_split_with_sizes.default", "aten.split_with_sizes_copy.default"),
        lambda d: [call(d.normal(7, 4), [2, 5], 0), call(d.normal(7, 4), [1, 3], 1)],
    ),
    "aten.native_channel_shuffle.default": lambda d: [call(d.normal(2, 6, 4, 4), 3)],
    **dict.fromkeys(
        (
            "aten._conj.default",
            "aten._conj_physical.default",
            "aten.view_as_real_copy.default",
            "aten._neg_view.default",
        ),
        lambda d: [call(d.complex(3, 4))],
    ),
    "aten.view_as_complex_copy.default": lambda d: [call(d.normal(3, 2))],
    "aten._adaptive_avg_pool2d.default": lambda d: [
        call(d.normal(2, 3, 7, 8), [2, 3]),
        call(d.normal(2, 3, 4, 4), [5, 1]),
    ],
    "aten._adaptive_avg_pool3d.default": lambda d: [call(d.normal(2, 3, 4, 7, 8), [2, 2, 3])],
    "aten._linalg_solve_ex.default": lambda d: [
        call(d.normal(2, 4, 4), d.normal(2, 4, 3)),
        call(d.normal(4, 4), d.normal(4)),
    ],
    "aten.addbmm.default": lambda d: [call(d.normal(3, 5), d.normal(2, 3, 4), d.normal(2, 4, 5))],
    "aten.linspace.Tensor_Tensor": lambda d: [call(torch.tensor(0.0), torch.tensor(2.0), 9)],
    "aten.where.default": lambda d: [call(d.bools(4, 5)), call(d.normal(7))],
    "aten.view_copy.dtype": lambda d: [
        call(d.normal(4, 6), torch.int32),
        call(d.normal(4, 6), torch.float64),
    ],
    "widepack.pack_convolution.default": lambda d: [
        call(d.normal(6, 4, 3, 3), [1, 1], [1, 1], [1, 1], 1, [2, 4, 8, 8]),
        call(d.normal(6, 2, 3, 3), [2, 1], [0, 1], [1, 2], 2, [2, 4, 9, 8]),
        call(d.normal(6, 4, 2, 2, 2), [1] * 3, [0] * 3, [1] * 3, 1, [1, 4, 5, 5, 5]),
    ],
    "widepack.pack_convolutions.default": lambda d: [
        call(d.normal(3, 6, 4, 3, 3), [1, 1], [1, 1], [1, 1], 1, [2, 4, 8, 8])
    ],
    "widepack.pack_linear.default": lambda d: [call(d.normal(3, 6, 4), 5)],
    "widepack.pack_inner_product.default": lambda d: [call(d.normal(6, 4))],
    "widepack.pack_inner_products.default": lambda d: [call(d.normal(3, 6, 4))],
    "widepack.inner_product.default": lambda d: [
        call(d.normal(*rows, 4), d.normal(6, 4), bias)
        for rows in ((), (5,), (2, 3))
        for bias in (None, d.normal(6))
    ],
    "widepack.streamed_linear.default": lambda d: [
        call(d.normal(3, rows, 4), d.normal(3, 4, 6), bias)
        for rows in (1, 5)
        for bias in (None, d.normal(3, 6))
    ],
    "widepack.delta_linear.default": lambda d: [
        call(d.normal(x, 5, 4), d.normal(6, 4), d.normal(3, 6, 2), d.normal(3, 2, 4), bias)
        for x in (1, 3)
        for bias in (None, d.normal(1, 6), d.normal(3, 6))
    ],
    "widepack.factored_weight.default": lambda d: [
        call(d.normal(6, 4), d.normal(6, 2), d.normal(2, 4)),
        call(d.normal(6, 4, 3, 3), d.normal(6, 1), d.normal(1, 36)),
        call(d.normal(6, 4), d.normal(6, 2), d.normal(2, 4), d.normal(6, 1)),
    ],
    "widepack.lstm_steps.default": lambda d: _steps(d, 4),
    "widepack.gru_steps.default": lambda d: _steps(d, 3),
    "widepack.rnn_steps.default": lambda d: _steps(d, 1),
    "widepack.lstm_training.default": lambda d: _training(d, 4),
    "widepack.gru_training.default": lambda d: _training(d, 3),
    "widepack.rnn_training.default": lambda d: _training(d, 1, "tanh"),
    "widepack.pack_lstm.default": lambda d: [
        call(d.normal(3, 4, 24), d.normal(3, 6, 24), reverse, [5, 2, 4]) for reverse in (False, True)
    ],
    "aten.lu_unpack.default": lambda d: [
        call(*lu_factor(d.normal(2, 4, 4))),
        call(*lu_factor(d.normal(3, 5))),
        call(*lu_factor(d.normal(2, 4, 4)), True, False),
    ],
    "aten.linalg_lu_solve.default": lambda d: [
        call(*lu_factor(d.normal(2, 4, 4)), d.normal(2, 4, 3)),
        call(*lu_factor(d.normal(2, 4, 4)), d.normal(2, 3, 4), left=False),
    ],
    "aten.linalg_ldl_solve.default": lambda d: [
        call(*ldl_factor(x + x.mT), d.normal(2, 4, 3)) for x in (d.normal(2, 4, 4),)
    ],
    "aten._scaled_dot_product_flash_attention_for_cpu.default": lambda d: [
        call(*_queries(d, 5, 5)),
        call(*_queries(d, 5, 5), 0.0, True),
        call(*_queries(d, 5, 5), 0.0, False, attn_mask=d.normal(5, 5)),
        call(*_queries(d, 5, 7), attn_mask=d.normal(2, 1, 5, 7), scale=0.5),
    ],
    "aten._masked_softmax.default": lambda d: [
        call(d.normal(2, 3, 4, 4), d.bools(4, 4), -1, 0),
        call(d.normal(2, 3, 4, 4), d.bools(2, 4), -1, 1),
        call(d.normal(2, 3, 4, 4), d.bools(2, 3, 4, 4), 3, 2),
    ],
    "widepack.grouped_experts.default": lambda d: [
        call(_half(d, 3, 5, 8), _half(d, 3, 4, 8, 16), d.ints(-4, 4, 3, 5)),
        call(_half(d, 2, 6, 16), _half(d, 2, 3, 8, 16).transpose(2, 3), d.ints(0, 3, 2, 6)),
    ],
    "widepack.expert_linear.default": lambda d: [
        call(d.normal(3, 2, 4), d.normal(3, 5, 6, 4), d.ints(-5, 5, 3, 2)),
        call(d.normal(3, 20, 4), d.normal(3, 5, 6, 4), d.ints(0, 5, 3, 20)),
        call(d.normal(2, 8, 130), d.normal(2, 3, 130, 130), d.ints(0, 3, 2, 8)),
    ],
    "widepack.expert_mm.default": lambda d: [
        call(d.normal(7, 4), d.normal(5, 4, 6), d.ints(-5, 5, 7), True),
        call(d.normal(8, 130), d.normal(3, 130, 130), d.ints(0, 3, 8)),
    ],
    "widepack.linear.default": lambda d: [
        call(d.normal(3, 5, 4), _packing("pack_linear", d.normal(3, 6, 4), 5), d.normal(3, 6), "gelu"),
        call(d.normal(3, 5, 4), _packing("pack_linear", d.normal(3, 6, 4), 5), None),
        call(d.normal(3, 5, 4), d.normal(18, 4, 1, 1), d.normal(3, 6)),
    ],
    "widepack.sequence_lengths.default": lambda d: [
        call(_sorted(d, 2, 5), d.normal(6)),
        call(_sorted(d, 5), d.normal(7)),
    ],
    "aten.ctc_loss.IntList": lambda d: [
        call(d.normal(12, 2, 6).log_softmax(-1), d.ints(1, 6, 2, 4), [12, 12], [4, 3], 0, 1, False),
        call(d.normal(12, 2, 6).log_softmax(-1), d.ints(1, 6, 7), [12, 10], [4, 3], 0, 0, True),
        call(
            d.normal(12, 2, 6).log_softmax(-1).double(),
            d.ints(1, 6, 2, 4, dtype=torch.int32),
            [12, 12],
            [4, 3],
        ),
    ],
    "aten._linalg_svd.default": lambda d: [
        call(x, full)
        for shape in ((4, 4), (3, 7, 5), (5, 13), (40, 40))
        for full in (False, True)
        for x in _matrix(d, shape)
    ],
    "widepack.convolution.default": lambda d: [
        call(d.normal(2, 4, 9, 8), w, d.normal(6), *args, "relu")
        for args in (([1, 1], [1, 1], [1, 1], 1), ([2, 1], [0, 1], [1, 2], 2))
        for weight in (d.normal(6, 4 // args[3], 3, 3),)
        for w in (weight, _packing("pack_convolution", weight, *args, [2, 4, 9, 8]))
    ],
    "widepack.member_products.default": lambda d: [
        *(call(d.normal(x, 5, 4), d.normal(3, 6, 4), b) for x in (1, 3) for b in (None, d.normal(3, 6))),
        *(call(d.normal(x, 130, 128), d.normal(2, 130, 128), d.normal(2, 130)) for x in (1, 2)),
        call(d.normal(2, 130, 128), d.normal(2, 128, 130).transpose(1, 2), None),
    ],
    "widepack.packed_lstm.default": lambda d: [
        call(d.normal(3, 5, 2, 4), *_packed_state(d), d.normal(3, 24), d.normal(3, 24), False),
        call(d.normal(1, 5, 2, 4), *_packed_state(d), None, None, False),
    ],
    "widepack.mlp_chain.default": lambda d: [
        call(d.normal(members, 7, 4), [d.normal(3, 6, 4), d.normal(3, 5, 6)], biases, ["relu", "gelu_tanh"])
        for members in (1, 3)
        for biases in ([None, None], [d.normal(3, 6), d.normal(3, 5)], [None, d.normal(3, 5)])
    ],
}
