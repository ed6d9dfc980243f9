"""Lists what another project publishes for layers, blocks and networks: the figures to compare with.

Each figure is a ratio: the time of N separate calls over the time of one call for all. For layers and blocks
it is the best over N = 4, 8, 16, 32 on an A100. It was measured with gradients on, against one compiled
module that is called N times from Python, with equal inputs. The networks have the numbers of members and
the batch of the row; `baseline` says what the N separate calls were.

Sources: WideCompiler (github.com/AbstractEyes/pytorch-parallel-compiler), and NetFuse (arXiv 2009.13062).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from widepack_bench.suite.rows import SuiteRow, chosen

LAYERS: Mapping[str, float] = {
    "linear": 8.8, "layernorm": 9.8, "block:mlp_block": 3.9, "block:attention": 10.7,
    "multiheadattention": 9.6, "conv2d": 6.2, "batchnorm2d": 35.8, "embedding": 27.1, "rmsnorm": 20.8,
    "groupnorm": 12.9, "gru": 2.9, "lstm": 3.3, "conv1d": 12.1, "multiheadcrossattention": 17.8,
    "block:joint_attention": 5.5, "block:double_stream": 6.8, "block:single_stream": 3.5, "dropout": 173.7,
    "batchnorm1d": 36.7, "batchnorm3d": 23.5, "instancenorm2d": 21.3, "adaptiveavgpool2d": 15.2,
    "block:ada_norm": 15.2, "block:mlp_embedder": 14.8, "prelu": 12.0, "convtranspose2d": 5.7,
    "convtranspose1d": 5.3, "rnn": 5.6, "conv3d": 4.4,
}  # fmt: skip
"""Ratios by the names of `widepack bench-layers`, in the order in which they are measured."""

LOOP, COMPILED = "loop", "compiled-member"
ONE_MODULE, ONE_PROGRAM = "one module", "one program"
"""Baselines of layers with gradients on: one compiled module called N times, and N modules in one program."""


@dataclass(frozen=True, slots=True)
class PeerClaim:
    """A published ratio of a network.

    baseline: what took the longer time, a name of `widepack_bench.baselines`. source: who published it.
    """

    baseline: str
    ratio: float
    source: str = "WideCompiler"


NETWORKS: Mapping[str, tuple[PeerClaim, ...]] = {
    "mlp-b32": (PeerClaim(LOOP, 40.0),),
    "deep-mlp": (PeerClaim(LOOP, 6.2),),
    "resblock": (PeerClaim(LOOP, 4.9), PeerClaim(COMPILED, 2.9)),
    "mlp-20": (PeerClaim(COMPILED, 3.2),),
    "resnet18": (PeerClaim(LOOP, 2.3), PeerClaim(COMPILED, 1.9)),
    "resnet50": (PeerClaim(LOOP, 3.6, "NetFuse"),),
}
"""Claims by network, in the order in which they are measured."""


def network(name: str) -> SuiteRow:
    """Returns the network of a claim: a row of the suite, or one of them with another number of members."""
    if name == "mlp-20":
        (row,) = chosen(["mlp-b32"])
        return replace(row, name=name, members=20)
    (row,) = chosen([name])
    return row
