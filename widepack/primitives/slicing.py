"""Parts of a value along its dims: slices, splits, windows and diagonals, and the ops that write them.

select, slice, narrow         y[i] = x[i][..., part, ...]                 x: [N, *s]
split, chunk, unbind          y[i] = the parts along dim, as a tuple
unfold                        y[i] = windows along dim, in one more dim at the end
diagonal, diag_embed          y[i] = a diagonal of x[i], or x[i] as a diagonal
tril, triu                    y[i] = x[i] with zeros above or below a diagonal
*_scatter                     y[i] = x[i] with one such part replaced by src[i]
"""

from __future__ import annotations

from ..registry.families import along, leading
from ..registry.samples import B, along_dim, call, samples

samples("select.int")(lambda draw: [call(draw.normal(B, 4, 6), d, i) for d, i in ((0, 1), (1, -1), (-1, 2))])


samples("slice.Tensor")(
    lambda draw: [
        call(draw.normal(B, 4, 6), *a)
        for a in ((), (0, 1), (1, 0, -1), (-1, 1, 9223372036854775807, 2), (0, None, 3))
    ]
)


samples("narrow")(lambda draw: [call(draw.normal(B, 4, 6), *a) for a in ((0, 1, 2), (1, 2, 2), (-1, -3, 2))])


samples("split.Tensor chunk")(lambda draw: [call(draw.normal(B, 4, 6), 2, *d) for d in ((), (1,), (-1,))])


samples("split_with_sizes split.sizes")(
    lambda draw: [
        call(draw.normal(B, 4, 6), s, *d) for s, d in (([2, 3], ()), ([1, 3], (1,)), ([2, 4], (-1,)))
    ]
)
samples("unbind.int")(along_dim())
samples("unfold unfold_copy")(
    lambda draw: [call(draw.normal(B, 4, 6), *a) for a in ((0, 2, 1), (1, 2, 2), (-1, 3, 1))]
)


samples("diagonal")(
    lambda draw: [call(draw.normal(B, 4, 6), *a) for a in ((), (1, 1, 2), (-1, -1, -2), (0, 0, 2))]
)


samples("diag_embed")(lambda draw: [call(draw.normal(B, 4), *a) for a in ((), (1,), (0, 0, 1), (-1, 1, -1))])


samples("tril triu")(
    lambda draw: [call(draw.normal(B, 4), *d) for d in ((), (1,), (-1,))] + [call(draw.normal(B, 3, 4))]
)


samples("slice_scatter")(
    lambda draw: [
        call(draw.normal(B, 4), draw.normal(2, 4), 0, 1, 3),
        call(draw.normal(B, 4), draw.normal(B, 2), 1, 0, 4, 2),
        call(draw.normal(B, 4), draw.normal(B, 1), -1, -1),
    ]
)


samples("select_scatter")(
    lambda draw: [
        call(draw.normal(B, 4), draw.normal(4), 0, 1),
        call(draw.normal(B, 4), draw.normal(B), -1, -2),
        call(draw.normal(4), draw.normal(), 0, 1),
    ]
)


samples("diagonal_scatter")(
    lambda draw: [
        call(draw.normal(4, B), draw.normal(4)),
        call(draw.normal(B, 4, 6), draw.normal(B, 4), 1, 1, 2),
    ]
)
along("select.int slice.Tensor narrow split.Tensor split_with_sizes split.sizes chunk unbind.int")
along("unfold unfold_copy diagonal diag_embed slice_scatter")
along("select_scatter diagonal_scatter", mixed=True)
leading("tril triu")
