"""Ops along one dim that keep the other dims: softmax, cumulative ops, differences and gated linear units.

softmax             y[i] = exp(x[i]) / sum(exp(x[i]), dim)      x: [N, *s]    y: [N, *s]
cumsum, cummax, ... y[i, k] = op(x[i, 0], ..., x[i, k])         along dim, the shape stays
diff                y[i, k] = x[i, k + 1] - x[i, k]             along dim, which becomes shorter by one
glu                 y[i] = a * sigmoid(b)                       a and b are the two halves of x[i] along dim

Every dim of the schema moves by one, because the member axis is dim 0.
"""

from __future__ import annotations

import torch

from ..registry.families import along
from ..registry.samples import B, along_dim, call, samples

samples("softmax.int log_softmax.int cumsum cumprod")(
    lambda draw: [
        *along_dim()(draw),
        call(draw.normal(), 0),
        call(draw.normal(B, 3), -1, dtype=torch.float64),
    ]
)


samples("_softmax _log_softmax")(along_dim(False))


samples("_safe_softmax")(along_dim())
samples("cummax cummin logcumsumexp")(along_dim())
samples("diff")(
    lambda draw: [
        call(draw.normal(B, 4)),
        call(draw.normal(B, 4), 2, 0),
        call(draw.normal(B, 4), 1, -1, draw.normal(B, 2), draw.normal(B, 1)),
        call(draw.normal(B, 4), 1, 0, draw.normal(1, 4)),
    ]
)


samples("glu")(lambda draw: [call(draw.normal(2, 4, 6), d) for d in (0, 1, -1)] + [call(draw.normal(B, 4))])
along("softmax.int log_softmax.int _softmax _log_softmax _safe_softmax glu diff")
along("cumsum cumprod cummax cummin logcumsumexp")
