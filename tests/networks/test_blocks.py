"""Tests the reference blocks: each is built like any network, without special code, and compared with every
member alone in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import files_of
from small_builds import QUICK
from support import fresh, leaves, must

from widepack import build, fuse, load
from widepack.spec.draws import InputSource, draw_all
from widepack.spec.input_spec import parse_input, type_text
from widepack_bench.models.blocks import BLOCKS
from widepack_bench.models.weights import states

N = 3
CHEAP = ("rotary", "mlp_embedder")


def drawn(name: str, batch: int, seed: int) -> dict[str, Any]:
    """Returns the inputs of one call by name, in float64."""
    specs = [parse_input(text) for text in BLOCKS[name].inputs]
    values = draw_all([InputSource(s.name, type_text(s), s.low, s.high) for s in specs], {"B": batch}, seed)
    return {s.name: v.double() for s, v in zip(specs, values)}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "name", [n if n in CHEAP else pytest.param(n, marks=pytest.mark.slow) for n in BLOCKS]
)
def test_a_block_is_built_like_any_network(name: str, tmp_path: Path) -> None:
    block = BLOCKS[name]
    members = list(states(block.make, N))
    files = files_of(tmp_path, members)
    out = tmp_path / "ens.wide"
    report = build(files, out, model=block.model, inputs=list(block.inputs), strategy="wide", **QUICK)
    assert report.wide_share == 1.0
    ens = load(out, dtype="float64")
    for batch in (1, 5):
        calls = [drawn(name, batch, seed) for seed in range(N)]
        got = leaves(ens.each(**{key: torch.stack([o[key] for o in calls]) for key in calls[0]}))
        for i, state in enumerate(members):
            alone = block.make().eval()
            alone.load_state_dict(state)
            with torch.no_grad():
                want = leaves(alone.double()(**calls[i]))
            assert len(got) == len(want)
            for g, w in zip(got, want):
                torch.testing.assert_close(g[i], w, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "name", [n if n == "mlp_embedder" else pytest.param(n, marks=pytest.mark.slow) for n in BLOCKS]
)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_gradients_of_a_fused_block_equal_those_of_the_members(name: str, train: bool) -> None:
    block = BLOCKS[name]
    members = []
    for state in states(block.make, N):
        members.append(block.make())
        members[-1].load_state_dict(state)
        members[-1].double().train(train)
    calls = [drawn(name, 4, seed) for seed in range(N)]
    fused = fuse(members, (), sample_kwargs=calls[0], validate=False)
    assert fused.training == train
    given = {key: torch.stack([o[key] for o in calls]).requires_grad_() for key in calls[0]}
    got = leaves(fused.each(**given))
    total = sum((g.square().sum() for g in got), torch.zeros((), dtype=torch.float64))
    torch.autograd.backward(total)
    for i, member in enumerate(members):
        inputs = {key: value.clone().requires_grad_() for key, value in calls[i].items()}
        want = leaves(member(**inputs))
        torch.autograd.backward(sum((w.square().sum() for w in want), torch.zeros((), dtype=torch.float64)))
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g[i], w, rtol=1e-10, atol=1e-10)
        for key, value in inputs.items():
            torch.testing.assert_close(given[key].grad[i], value.grad, rtol=1e-9, atol=1e-9)  # type: ignore[index]
        for key, p in member.named_parameters():
            torch.testing.assert_close(fused.get_parameter(key).grad[i], p.grad, rtol=1e-9, atol=1e-9)  # type: ignore[index]
        for key, b in member.named_buffers():
            torch.testing.assert_close(fused.get_buffer(key)[i], b, rtol=1e-10, atol=1e-10)


def test_every_block_runs_and_has_a_description() -> None:
    for name, block in BLOCKS.items():
        assert block.doc and block.model.startswith("widepack_bench.models.")
        results = leaves(block.make().double()(**drawn(name, 2, 0)))
        assert results and all(torch.isfinite(r).all() for r in results)


def test_rotary_products_depend_on_the_difference_of_positions() -> None:
    """The product of two rotated vectors depends only on the difference of their positions."""
    from widepack_bench.models.embedders import Rotary, rotate

    rotary = Rotary((4, 6, 6)).double()
    query, key = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)

    def product(at: list[float], other: list[float]) -> torch.Tensor:
        turned = [
            rotate(v, rotary(torch.tensor([[p]], dtype=torch.float64)))
            for v, p in ((query, at), (key, other))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product([3.0, 5, 2], [1, 4, 7]), product([13.0, 6, 3], [11, 5, 8]))
    assert not torch.allclose(product([3.0, 5, 2], [1, 4, 7]), product([4.0, 5, 2], [1, 4, 7]))


TURNED = [name for name, block in BLOCKS.items() if any(i.startswith("rope=") for i in block.inputs)]


def without_rotation(name: str, batch: int, seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Returns the inputs of one call without `rope`, and a `rope` of the same shape whose angles are 0."""
    inputs = drawn(name, batch, seed)
    rope = inputs.pop("rope")
    return inputs, torch.stack([torch.ones_like(rope[..., 0]), torch.zeros_like(rope[..., 0])], -1)


@pytest.mark.parametrize("name", TURNED)
def test_a_block_without_rope_equals_one_with_zero_angles(name: str) -> None:
    assert len(TURNED) == 4
    block = BLOCKS[name].make().double().eval()
    inputs, zero_rope = without_rotation(name, 2, 0)
    with torch.no_grad():
        got, want = leaves(block(**inputs)), leaves(block(**inputs, rope=zero_rope))
        other = leaves(block(**drawn(name, 2, 0)))
    for g, w, o in zip(got, want, other, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(g, o)


@pytest.mark.extended
@pytest.mark.parametrize(
    "name", [n if n == "attention" else pytest.param(n, marks=pytest.mark.slow) for n in TURNED]
)
def test_a_fused_block_without_rope_equals_its_members(name: str) -> None:
    members = [BLOCKS[name].make() for _ in range(N)]
    for member, state in zip(members, states(BLOCKS[name].make, N), strict=True):
        member.load_state_dict(state)
        member.double().eval()
    calls = [without_rotation(name, 2, seed)[0] for seed in range(N)]
    fused = fuse(members, (), sample_kwargs=calls[0], validate=False)
    with torch.no_grad():
        got = leaves(fused.each(**{key: torch.stack([o[key] for o in calls]) for key in calls[0]}))
        for i, member in enumerate(members):
            for g, w in zip(got, leaves(member(**calls[i])), strict=True):
                torch.testing.assert_close(g[i], w, rtol=1e-10, atol=1e-10)


def test_zero_angles_for_the_text_rotate_only_the_image() -> None:
    """docs/how-to/migrate.md describes this for blocks that rotate only the image."""
    from torch.nn.functional import scaled_dot_product_attention

    from widepack_bench.models.embedders import rotate

    block: Any = BLOCKS["joint_attention"].make().double().eval()
    inputs = drawn("joint_attention", 2, 0)
    x, text, rope = inputs["x"], inputs["text"], inputs["rope"]
    first = text.shape[1]
    rope[:, :, :first] = torch.tensor([1.0, 0.0], dtype=torch.float64)
    with torch.no_grad():
        image, words = block.image(x), block.text(text)
        query, key = (
            torch.cat([w, rotate(i, rope[:, :, first:])], 2)
            for w, i in zip(words[:2], image[:2], strict=True)
        )
        y = (
            scaled_dot_product_attention(query, key, torch.cat([words[2], image[2]], 2))
            .transpose(1, 2)
            .flatten(2)
        )
        want = block.image_out(y[:, first:]), block.text_out(y[:, :first])
        for g, w in zip(block(**inputs), want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


def test_a_list_of_the_blocks_needs_no_torch() -> None:
    must(
        fresh(
            "import sys; from widepack_bench.models.blocks import BLOCKS; assert "
            "'double_stream' in BLOCKS and 'torch' not in sys.modules"
        )
    )
