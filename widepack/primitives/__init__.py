"""Registers the strategies of all ops: each file holds one op family.

Importing this package fills `widepack.registry.registry.REGISTRY`. `register` adds strategies for ops of
other libraries.

| in | out | start reading |
|---|---|---|
| arguments of an op, Shared or Stacked | nodes that run it for all members | `linear.py`, then `conv.py` |

| file | what it does |
|---|---|
| `attention.py` | Attention: scaled_dot_product_attention |
| `conv.py` | Convolutions and transposed convolutions |
| `conv_patches.py` | Convolutions as batched products, over pixels or over columns of patches |
| `conv_streams.py` | Convolutions as the members' own convolutions, on a GPU side by side on several |
| `dim_order.py` | Dims and positions in another order: transpose, permute, flip, roll and rot90. |
| `distance.py` | Distances and similarities between rows |
| `dropout.py` | Dropout and random draws: the ops that read torch's random generator |
| `embedding.py` | Embedding tables and embedding bags |
| `experts.py` | Products of rows with the matrices of experts that the network selects for each row |
| `fft.py` | Fourier transforms, and views between real and complex numbers |
| `histogram.py` | Histograms: histc |
| `index_rows.py` | Reading and adding whole rows at positions that all members share |
| `index_values.py` | What the strategies of indices have in common |
| `index_writes.py` | Writing at indices: `x[i, j] = v` and the index_* ops |
| `indexing.py` | Reading at indices: `x[i, :, j]` and index_select |
| `joining.py` | Joining tensors: cat, stack and the ops named after directions |
| `linalg.py` | Matrix decompositions, solvers, and products other than those of linear.py |
| `linear.py` | Linear layers and products of matrices |
| `losses.py` | Losses: first the loss of every element of all members, then the mean or sum |
| `norm.py` | Normalization layers |
| `norm_statistics.py` | Layer norms that give their mean and deviation |
| `pointwise.py` | Pointwise ops: every operand has the shape of the result, or broadcasts to it |
| `pool.py` | Pooling, padding and resampling |
| `recurrent.py` | Recurrent layers over all steps: LSTM, GRU and plain RNN, of several layers |
| `recurrent_cells.py` | Recurrent cells: one step of an LSTM, a GRU or a plain RNN |
| `reductions.py` | Reductions: sums, means, extremes, variances and counts |
| `scatter.py` | Gather and scatter along a dim, with an index tensor of the same rank; one_hot |
| `searching.py` | Look-ups in tables: searchsorted, bucketize and isin |
| `sequences.py` | Lengths of packed sequences |
| `shape.py` | Other shapes for the same numbers: view, flatten, squeeze, expand and repeat |
| `sizes.py` | Sizes, and values made from sizes: zeros_like, new_full, fill, copy |
| `slicing.py` | Parts of a value along its dims: slices, splits, windows and diagonals |
| `softmax.py` | Ops along one dim that keep the other dims: softmax, cumulative ops, differences |
| `sorting.py` | Ops that order the numbers along a dim: sort, topk, median, mode and quantiles |
| `vector_norms.py` | Norms, distances, and cross and dot products of vectors along dims |
| `weight_factors.py` | Layers over weights that are a base of all members plus a product of thin factors |
"""

from importlib import import_module as _import_module
from typing import Any

from ..ir.op_records import OpRecord as OpRecord
from ..ir.values import Shared as Shared
from ..ir.values import Stacked as Stacked
from ..registry import aliases as aliases
from ..registry.aliases import find as find
from ..registry.samples import Draw as Draw
from ..registry.samples import call as call
from ..registry.user_ops import register as register
from ..registry.writer import Writer as Writer
from ..registry.writer import rank as rank
from ..runtime.flop_formulas import formula as formula
from . import attention as attention
from . import conv as conv
from . import conv_patches as conv_patches
from . import conv_streams as conv_streams
from . import dim_order as dim_order
from . import distance as distance
from . import dropout as dropout
from . import embedding as embedding
from . import experts as experts  # before linear: `experts` is the first strategy of each op
from . import fft as fft
from . import histogram as histogram
from . import index_rows as index_rows  # before indexing: its strategies are the first of each op
from . import index_writes as index_writes
from . import indexing as indexing
from . import joining as joining
from . import linalg as linalg
from . import linear as linear
from . import losses as losses
from . import norm as norm
from . import norm_statistics as norm_statistics
from . import pointwise as pointwise
from . import pool as pool
from . import recurrent as recurrent
from . import recurrent_cells as recurrent_cells
from . import reductions as reductions
from . import scatter as scatter
from . import searching as searching
from . import sequences as sequences
from . import shape as shape
from . import sizes as sizes
from . import slicing as slicing
from . import softmax as softmax
from . import sorting as sorting
from . import vector_norms as vector_norms
from . import weight_factors as weight_factors  # last: `split` is the last strategy of each op


def __getattr__(name: str) -> Any:
    """Imports a wide layer (`WideLinear`, ...) at first use, because lowering must not import the layers."""
    if name.startswith("Wide"):
        catalog = _import_module("widepack.layers.catalog")
        if name in catalog.LAYERS:
            globals()[name] = catalog.layer_class(name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_import_module("widepack.layers.catalog").LAYERS})
