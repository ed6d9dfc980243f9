"""Tests the peak of activations against torch's allocator, for one member and for wide programs.

The formulas count what a program allocates. Kernels of convolutions, of recurrent layers and of attention
over few keys allocate memory of their own, which no formula has, so such networks are not here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from counted import allocated_peak, call_at

from cases import load
from widepack import primitives as primitives  # fills the registry
from widepack.building.costs import model_costs
from widepack.building.preview import Preview
from widepack.runtime.executable import Executable
from widepack_bench.models.blocks import BLOCKS

BATCHES = [{"B": 8}, {"B": 16}, {"B": 48}]
LENGTHS = [{"B": 8, "T": 24}, {"B": 4, "T": 32}, {"B": 16, "T": 30}]
NETWORKS = {name: (load(name).model, load(name).INPUTS) for name in ("mlp", "vit", "gpt2", "guard_size")}
NETWORKS |= {
    name: (BLOCKS[name].make, BLOCKS[name].inputs)
    for name in ("mlp_embedder", "ada_norm", "rotary", "mlp_block", "attention", "transformer")
}


def weights_of(preview: Preview, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    saved = module.state_dict()
    return {name: saved.get(name, t) for name, (_, t) in preview.captured.weights.items()}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", NETWORKS)
def test_peak_of_a_member_and_of_three(name: str) -> None:
    make, inputs = NETWORKS[name]
    preview = Preview(make, inputs)
    module = make().eval()
    weights = weights_of(preview, module)
    member, wide = model_costs(make, inputs), model_costs(make, inputs, wide=8)
    one = Executable(preview.captured.program, weights, torch.device("cpu"), prologue=False)
    program = preview.of(3).lower(preview.of(8).plan("cpu")).program
    stacked = {
        s.source: torch.stack([weights[s.source]] * 3) if s.kind == "stacked" else weights[s.source]
        for s in program.weights
    }
    three = Executable(program, stacked, torch.device("cpu"))
    for sizes in LENGTHS if "T" in member.dims else BATCHES:
        given: list[Any] = [leaf.example for leaf in call_at(module, inputs, sizes).leaves]
        for costs, run, members in ((member, one, 1), (wide, three, 3)):
            foreseen = costs.at(costs.values(sizes, members=members))["peak"]
            measured = allocated_peak(partial(run.run, *given))
            assert foreseen == pytest.approx(measured, rel=0.001), (name, sizes, members)
