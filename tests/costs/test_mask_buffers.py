"""Tests the FLOP that masks in buffers forbid: of a module, of an artifact, and after a revision."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_masks import HEADS, INF, WIDTH, additive, forbidden, ij
from click.testing import CliRunner
from torch import Tensor, nn

import widepack
from widepack import primitives as primitives  # fills the registry
from widepack.building.artifact_costs import program_costs, wide_program_costs
from widepack.building.mask_buffers import fresh_masks
from widepack.building.model_costs import model_costs
from widepack.building.preview import Preview
from widepack_artifacts.costs import Costs
from widepack_artifacts.costs_file import stored_costs
from widepack_artifacts.reader import Reader
from widepack_cli.main import cli

MOST = 30
"""The positions that the buffers have."""
X = ["x=float32[B,T,16]"]
Use = Callable[[nn.Module, Tensor, Tensor], Any]


def allowed(name: str) -> Tensor:
    i, j = ij(MOST, MOST)
    found: dict[str, Tensor] = {
        "causal": j <= i,
        "blocks": i // 4 == j // 4,
        "block-causal": i // 6 >= j // 6,
        "window": (j <= i) & (i - j < 5),
        "other": (i * j) % 3 != 1,
    }
    return found[name]


class Attention(nn.Module):
    """Attention over 16 channels with a mask in a buffer. how: the form of the buffer, and who reads it."""

    mask: Tensor

    def __init__(self, name: str = "causal", how: str = "filled", saved: bool = True) -> None:
        super().__init__()
        self.how, mask = how, allowed(name)
        forms = {"filled": mask.float()[None, None], "bias": additive(mask), "integers": mask.int()}
        self.register_buffer("mask", forms.get(how, mask), persistent=saved)
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        batch, length = x.shape[:2]
        parts = self.project(x).chunk(3, -1)
        q, k, v = (y.view(batch, length, HEADS, WIDTH).transpose(1, 2) for y in parts)
        mask = self.mask[..., :length, :length]
        if self.how in ("filled", "integers"):
            scores = (q @ k.mT * WIDTH**-0.5).masked_fill(mask == 0, INF)
            y = scores.softmax(-1) @ v
        elif self.how == "negated":
            y = torch.where(~mask, INF, q @ k.mT).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, 16))


def gpt() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), Attention(), nn.LayerNorm(16), Attention(saved=False))


def blocks_encoder() -> nn.Module:
    return nn.Sequential(Attention("blocks", "argument"), Attention("blocks", "bias"))


def block_causal() -> nn.Module:
    return Attention("block-causal", "negated")


def masked(costs: Costs, names: list[str], members: int = 3) -> None:
    """Compares the masked FLOP of modules with masks of these names at several sizes."""
    for b, t in ((1, 1), (2, 7), (3, MOST - 1)):
        found = costs.at(costs.values({"B": b, "T": t}, members=members))["masked_flops"]
        pairs = sum(forbidden(allowed(name)[:t, :t]) for name in names)
        assert found == members * 4 * b * HEADS * WIDTH * pairs, (b, t)


def checkpoints(folder: Path, make: Callable[[], nn.Module], count: int = 3) -> list[Path]:
    paths = []
    for i in range(count):
        torch.manual_seed(i)
        torch.save(make().state_dict(), folder / f"m{i}.pt")
        paths.append(folder / f"m{i}.pt")
    return paths


def built(folder: Path, make: Callable[[], nn.Module], paths: list[Path], inputs: list[str]) -> Reader:
    out = folder / "ens.wide"
    widepack.build(paths, out, model=make, inputs=inputs, pt2=False, race=False)
    return Reader(out)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("wide", [0, 4])
def test_modules(wide: int) -> None:
    masked(model_costs(gpt, ["input=float32[B,T,8]"], wide=wide), ["causal", "causal"])
    if not wide:
        masked(model_costs(blocks_encoder, ["input=float32[B,T,16]"]), ["blocks", "blocks"])
        masked(model_costs(block_causal, X), ["block-causal"])


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("how", ["filled", "integers", "negated", "bias", "argument"])
def test_forms_of_buffers(how: str) -> None:
    masked(model_costs(lambda: Attention("window", how), X), ["window"])


def test_the_formulas_are_those_of_masks_that_the_program_makes() -> None:
    costs = model_costs(lambda: Attention("causal"), X)
    assert costs.totals["masked_flops"] == ("0", "32*B*T*(T - 1)")


def fixed(how: str, length: int, name: str = "other") -> Costs:
    make: Callable[[], nn.Module] = lambda: Attention(name, how)  # noqa: E731
    return model_costs(make, [f"x=float32[B,{length},16]"])


@pytest.mark.extended
def test_data_of_no_form_are_counted_at_a_fixed_size() -> None:
    for how, length in (("filled", MOST), ("bias", 11), ("argument", MOST)):
        costs = fixed(how, length)
        found = costs.at(costs.values({"B": 2}))["masked_flops"]
        assert found == 4 * 2 * HEADS * WIDTH * forbidden(allowed("other")[:length, :length])
    assert "masked_flops" not in model_costs(lambda: Attention("other"), X).totals


def test_buffers_that_are_drawn_are_not_known() -> None:
    class Drawn(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.rand(1, 1, MOST, MOST).round()

    class DrawnInPlace(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.zeros(1, 1, MOST, MOST).bernoulli_()

    for make in (Drawn, DrawnInPlace):
        assert "masked_flops" not in model_costs(make, [f"x=float32[B,{MOST},16]"]).totals


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("wide", [0, 4])
def test_the_number_that_forbids_may_be_a_tensor(wide: int) -> None:
    class Where(Attention):
        def forward(self, x: Tensor) -> Any:
            q = self.project(x)[..., :16]
            least = torch.tensor(torch.finfo(x.dtype).min)
            scores = torch.where(self.mask[: x.shape[1], : x.shape[1]], q @ q.mT, least)
            return scores.softmax(-1) @ q

    costs = model_costs(lambda: Where(how="argument"), X, wide=wide)
    found = costs.at(costs.values({"B": 2, "T": 9}, members=3))["masked_flops"]
    assert found == 3 * 4 * 2 * 16 * forbidden(allowed("causal")[:9, :9])


def test_parameters_are_not_known() -> None:
    class Learned(Attention):
        def __init__(self) -> None:
            super().__init__(how="argument")
            del self.mask
            self.mask = nn.Parameter(additive(allowed("causal")))

    assert "masked_flops" not in model_costs(Learned, X).totals


def test_numbers_that_are_added_forbid_nothing() -> None:
    """A float mask of 0 and 1 is added to the scores."""

    class Added(Attention):
        def __init__(self) -> None:
            super().__init__(how="argument")
            self.mask = self.mask.float()

    assert "masked_flops" not in model_costs(Added, X).totals


@pytest.mark.extended
def test_no_module_is_made_for_its_values_if_no_weight_may_be_a_mask() -> None:
    made: list[nn.Module] = []

    def plain() -> nn.Module:
        made.append(nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)))
        return made[-1]

    program = Preview(plain, ["input=float32[B,T,8]"]).program
    made.clear()
    assert fresh_masks(program, plain, {}) == {} and not made
    assert list(fresh_masks(Preview(Attention, X).program, Attention, {})) == ["mask"]


class Large(nn.Module):
    """Attention whose weights take 40 TB."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(16, 10**12 // 2, bias=False), nn.Linear(10**12 // 2, 16, bias=False)
        self.scale = nn.Parameter(torch.ones(10**12))

    def forward(self, x: Tensor) -> Any:
        return self.attention(self.down(self.up(x)))


def test_weights_take_no_memory() -> None:
    masked(model_costs(Large, X), ["causal"])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = tmp_path_factory.mktemp("masks")
    return built(folder, gpt, checkpoints(folder, gpt), ["input=float32[B,T,8]"])


@pytest.mark.extended
def test_artifacts(artifact: Reader) -> None:
    stored = stored_costs(artifact)["forward"]
    wide = wide_program_costs(artifact, "forward", {"B": 2})
    for costs in (stored, program_costs(artifact, "forward"), wide):
        masked(costs, ["causal", "causal"])


@pytest.mark.extended
def test_the_command_reads_the_formula(artifact: Reader) -> None:
    words = ["analyze", str(artifact.root), "--at", "B=2,T=17"]
    text = CliRunner().invoke(cli, words, prog_name="widepack").stdout
    wanted = 3 * 2 * 4 * 2 * HEADS * WIDTH * forbidden(allowed("causal")[:17, :17])
    (line,) = [row for row in text.splitlines() if row.startswith("FLOP that masks forbid")]
    assert f"{wanted:,}" in line
    found = json.loads(CliRunner().invoke(cli, [*words, "--json"], prog_name="widepack").stdout)
    assert found["numbers"]["masked_flops"] == wanted


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "names"), [(blocks_encoder, ["blocks"] * 2), (block_causal, ["block-causal"])]
)
def test_artifacts_with_blocks(make: Callable[[], nn.Module], names: list[str], tmp_path: Path) -> None:
    inputs = ["input=float32[B,T,16]"] if make is blocks_encoder else X
    reader = built(tmp_path, make, checkpoints(tmp_path, make, 2), inputs)
    masked(stored_costs(reader)["forward"], names)


@pytest.mark.extended
def test_members_with_masks_of_their_own(tmp_path: Path) -> None:
    """Pairs count that all members forbid. A revision reads the masks of the new members."""

    def with_mask(path: Path, mask: Tensor) -> Path:
        states = torch.load(path)
        torch.save({**states, "mask": mask.float()[None, None]}, path)
        return path

    paths = checkpoints(tmp_path, lambda: Attention("causal"))
    window, blocks = allowed("window"), allowed("blocks")
    reader = built(tmp_path, Attention, [with_mask(paths[0], window), *paths[1:]], X)
    kinds = {w.name: w.kind for w in reader.manifest.weights}
    assert kinds["mask"] == "stacked"
    masked(stored_costs(reader)["forward"], ["causal"])

    widepack.update(reader.root, {1: with_mask(paths[1], window), 2: with_mask(paths[2], window & blocks)})
    masked(stored_costs(Reader(reader.root))["forward"], ["window"])

    for name in ("blocks", "causal"):  # the same for all members
        widepack.update(reader.root, {i: with_mask(path, allowed(name)) for i, path in enumerate(paths)})
        masked(stored_costs(Reader(reader.root))["forward"], [name])
