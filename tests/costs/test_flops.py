"""Tests FLOP formulas against torch's counter, and against counts by hand where that sees nothing.

The sizes are never those of the capture: 4 for the batch, and 16 or more for other dims.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted import flops, torch_flops
from torch import Tensor, nn

from cases import GUARDED, NAMES, load
from widepack import primitives as primitives  # fills the registry
from widepack.building.costs import model_costs
from widepack.kernels.library import FUNCTIONS
from widepack.runtime.flop_formulas import own_formula
from widepack_bench.models.blocks import BLOCKS

SIZES = {
    "unet": [{"B": 1, "H": 1, "W": 2}, {"B": 3, "H": 2, "W": 5}, {"B": 2, "H": 7, "W": 3}],
    "bert": [{"B": 1, "T": 7}, {"B": 3, "T": 61}, {"B": 7, "T": 33}],
    "gpt2": [{"B": 1, "T": 7}, {"B": 3, "T": 29}, {"B": 7, "T": 32}],
    "encoder": [{"B": 1, "T": 7}, {"B": 3, "T": 29}, {"B": 7, "T": 32}],
    "textcnn": [{"B": 1, "T": 7}, {"B": 3, "T": 61}, {"B": 7, "T": 33}],
    "guard_pad": [{"B": 1, "T": 8}, {"B": 3, "T": 62}, {"B": 7, "T": 34}],
}
BATCHES = [{"B": 1}, {"B": 3}, {"B": 7}]
SEEN = [name for name in (*NAMES, *GUARDED) if name != "lstm"]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", SEEN)
def test_reference_networks_equal_torchs_counter(name: str) -> None:
    case = load(name)
    costs = model_costs(case.model, case.INPUTS)
    assert not costs.lower_bound, costs.uncounted
    for sizes in SIZES.get(name, BATCHES):
        assert flops(costs, sizes) == torch_flops(case.model, case.INPUTS, sizes) > 0


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", BLOCKS)
def test_reference_blocks_equal_torchs_counter(name: str) -> None:
    block = BLOCKS[name]
    costs = model_costs(block.make, block.inputs)
    for sizes in BATCHES:
        assert flops(costs, sizes) == torch_flops(block.make, block.inputs, sizes) > 0


@pytest.mark.slow
def test_a_language_model_of_seven_billion_parameters() -> None:
    """Llama-2-7B from its config: nothing of its 13 GB of weights exists."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=32000,
        use_cache=False,
        dtype="bfloat16",
    )
    costs = model_costs(
        lambda: transformers.AutoModelForCausalLM.from_config(config).eval(),
        ["input_ids=int64[B,T]:0..31999"],
    )
    assert costs.totals["flops"] == ("0", "524288*B*T*(T + 25204)") and not costs.lower_bound
    assert flops(costs, {"B": 1, "T": 2048}) == 29_261_612_187_648
    assert costs.parameters == ("64", "6738415616") and costs.dtype == "bfloat16"


def test_an_lstm_counts_every_weight_at_every_step() -> None:
    """torch's counter sees nothing of an LSTM on the CPU."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(12, 20, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.lstm(x)[0]

    costs = model_costs(Net, ["x=float32[B,16,12]"])
    first, second = 4 * 20 * (12 + 20), 4 * 20 * (40 + 20)
    for batch in (1, 3, 7):
        assert flops(costs, {"B": batch}) == 2 * batch * 16 * 2 * (first + second)
    assert torch_flops(Net, ["x=float32[B,16,12]"], {"B": 3}) == 0


def test_a_bilinear_layer_counts_every_weight_for_every_sample() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear = nn.Bilinear(5, 7, 3)

        def forward(self, a: Tensor, b: Tensor) -> Any:
            return self.bilinear(a, b)

    inputs = ["a=float32[B,5]", "b=float32[B,7]"]
    costs = model_costs(Net, inputs)
    for batch in (1, 3, 9):
        assert flops(costs, {"B": batch}) == 2 * batch * 5 * 7 * 3
    assert torch_flops(Net, inputs, {"B": 3}) == 0


@pytest.mark.extended
def test_multi_head_attention_is_counted_though_its_fast_path_is_one_op() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(24, 3, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x, need_weights=False)[0]

    costs = model_costs(Net, ["x=float32[B,T,24]"])
    for b, t in ((1, 5), (3, 17), (2, 64)):
        by_hand = 2 * b * t * (3 * 24 * 24 + 24 * 24) + 4 * b * t * t * 24
        assert flops(costs, {"B": b, "T": t}) == by_hand


@pytest.mark.extended
def test_attention_on_the_cpu_counts_two_products() -> None:
    class Net(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return nn.functional.scaled_dot_product_attention(q, k, v)

    costs = model_costs(Net, ["q=float32[B,3,S,8]", "k=float32[B,3,T,8]", "v=float32[B,3,T,10]"])
    for b, s, t in ((1, 5, 9), (3, 17, 2), (2, 64, 33)):
        assert flops(costs, {"B": b, "S": s, "T": t}) == 2 * b * 3 * s * t * (8 + 10)


def test_experts_of_a_grouped_product_count_their_rows() -> None:
    """Every row meets one expert, however rows are distributed. torch's counter has no formula."""
    formula = own_formula("aten._grouped_mm.default")
    assert formula is not None and own_formula("transformers.grouped_mm_fallback.default") is formula
    for rows, experts in ((8, 4), (24, 2), (56, 8)):
        x, weights = torch.empty(rows, 16, device="meta"), torch.empty(experts, 16, 32, device="meta")
        made = torch.empty(rows, 32, device="meta")
        assert formula(x, weights, out_val=made) == 2 * rows * 16 * 32


def test_products_with_a_vector_are_counted() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v = nn.Parameter(torch.zeros(24))

        def forward(self, x: Tensor) -> Any:
            return torch.mv(x, self.v)

    costs = model_costs(Net, ["x=float32[B,24]"])
    assert flops(costs, {"B": 7}) == 2 * 7 * 24 and not costs.lower_bound


def test_every_op_of_widepack_that_multiplies_has_a_formula() -> None:
    """Those that pack or quantize weights run before a call. They and checks multiply nothing."""
    others = ("widepack.pack_", "widepack.int8_scales", "widepack.int8_weight", "widepack.sequence_lengths")
    missing = [n for n in FUNCTIONS if not n.startswith(others) and own_formula(n) is None]
    assert not missing


def test_rows_that_meet_one_expert_each() -> None:
    x, weight = torch.empty(3, 7, 4, device="meta"), torch.empty(3, 5, 6, 4, device="meta")
    formula = own_formula("widepack.expert_linear.default")
    assert formula is not None
    assert formula(x, weight, torch.empty(3, 7), out_val=torch.empty(3, 7, 6)) == 2 * 3 * 7 * 6 * 4
