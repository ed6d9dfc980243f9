"""Tests `load(dtype=...)`: the answers are checked against those of the members in that dtype, and other
casts are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from default_dtype import double_by_default
from loaded import built, files_of, seeded
from support import Artifacts, Bound, leaves
from torch import Tensor, nn

import cases
from widepack import (
    CheckpointError,
    InputError,
    LoweringError,
    UsageError,
    VerificationError,
    append,
    build,
    load,
    update,
)
from widepack.ir.cast import raised
from widepack_artifacts.reader import Reader

N = 3


class Masked(nn.Module):
    """Has numbers that depend on a dtype: a mask with its largest number, integer positions and quotients, a
    constant, a norm, a state.
    """

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm, self.out = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("state", torch.randn(8))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:  # [B, T, 8], [B, T]
        h = self.norm(self.inside(x)) + torch.arange(8) / 8 + torch.linspace(0, 1, 8)
        h = h + keep.sum(1)[:, None, None] / 3
        h = h + self.state
        self.state = 0.5 * self.state + 0.5 * h.mean((0, 1))
        scores = (h @ h.transpose(1, 2)).masked_fill(~keep[:, None], torch.finfo(x.dtype).min)
        weighed = scores.softmax(-1) @ h
        return self.out(weighed + torch.where(keep, 1.0, 0.5)[..., None].to(x.dtype))


def member(seed: int, make: Callable[[], nn.Module] = Masked) -> Any:
    return seeded(make, seed)


def artifact(folder: Path, make: Callable[[], nn.Module], *inputs: str, **options: Any) -> Path:
    return built(folder, make, [member(i, make) for i in range(N)], *inputs, **options)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = "x=float32[B,T,8]", "keep=bool[B,T]"
    return artifact(tmp_path_factory.mktemp("masked"), Masked, *inputs, state=["state"])


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        pytest.param("fp16", torch.float16, marks=pytest.mark.slow),
        pytest.param("fp64", torch.float64, marks=pytest.mark.slow),
        (torch.float32, torch.float32),
    ],
)
def test_answers_are_those_of_the_members_in_the_dtype(masked: Path, name: Any, dtype: torch.dtype) -> None:
    ens = load(masked, dtype=name)
    assert ens.entry("forward").entry.inputs[0].type.startswith(str(dtype).removeprefix("torch."))
    x, keep = torch.randn(6, 5, 8).to(dtype), torch.rand(6, 5) > 0.3
    state = ens.state()
    assert state["state"].dtype == dtype
    y, after = ens(x, keep, state=state)
    assert y.dtype == after["state"].dtype == dtype
    bound = Bound()
    for i in range(N):
        one = ens.member(i)
        member_answer = one(x, keep, state=one.state())[0]
        module = member(i).double()
        with double_by_default(), torch.no_grad():
            exact = module(x.double(), keep)
        bound.add(y[i], member_answer, exact)
        assert torch.allclose(
            member_answer.double(),
            exact,
            atol=20 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps),
        )
    if dtype.itemsize < 8:
        bound.check()
    assert all(v.dtype == torch.float32 for k, v in ens.state_dict(0).items())  # as the checkpoint has it
    with pytest.raises(InputError, match=f"the model takes {str(dtype).removeprefix('torch.')}"):
        ens(x.to(torch.float32 if dtype != torch.float32 else torch.float16), keep, state=state)
    ens.each(torch.stack([x] * N), torch.stack([keep] * N), state=state)
    ens.probe()
    Reader(masked).check_hashes()


@pytest.mark.parametrize("members", [[0, 2], pytest.param(None, marks=pytest.mark.slow)])
def test_a_member_is_swapped_in_the_dtype(masked: Path, members: list[int | str] | None) -> None:
    new = member(9)
    path = masked.parent / "new.pt"
    torch.save(new.state_dict(), path)
    ens = load(masked, dtype="bf16", members=members)
    x, keep = torch.randn(6, 5, 8).bfloat16(), torch.rand(6, 5) > 0.3
    before = ens(x, keep, state=ens.state())[0]
    module_before = ens.member(1)
    ens.swap(1, path)
    for one in (module_before, ens.member(1)):
        assert torch.equal(one.get_buffer("w_p_inside_bias"), new.get_parameter("inside.bias").bfloat16())
    y = ens(x, keep, state=ens.state())[0]
    error = y[1].float() - member(9)(x.float(), keep)
    assert float(error.detach().abs().mean()) < 0.1 < float((y[1] - before[1]).abs().mean())
    assert torch.equal(y[0], before[0]) and torch.equal(
        ens.state()["state"][1], new.get_buffer("state").bfloat16()
    )
    ens.probe()


@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [
        "ragged_heads",
        pytest.param("lstm", marks=pytest.mark.slow),
        pytest.param("resnet18", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
    ],
)
def test_networks(name: str, artifacts: Artifacts) -> None:
    ens = load(artifacts(name), dtype="bf16")
    args, kwargs = cases.load(name).sample(2, 5)
    args, kwargs = [_down(a) for a in args], {k: _down(v) for k, v in kwargs.items()}
    found = ens(*args, **kwargs)
    wide = found if isinstance(found, list) else leaves(found)[0]
    for i in range(len(ens)):
        with torch.no_grad():
            member_answer = cases.load(name).member(i).to(torch.bfloat16)(*args, **kwargs)
        member_answer = leaves(member_answer)[0]
        scale = float(member_answer.float().square().mean().sqrt())
        assert wide[i].dtype == torch.bfloat16
        assert float((wide[i].float() - member_answer.float()).abs().max()) < 0.15 * scale


def _down(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value


def test_a_weight_past_the_range_of_the_dtype_is_refused(tmp_path: Path) -> None:
    def large() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        with torch.no_grad():
            module[0].weight[0, 0] = 70000.0
        return module

    path = artifact(tmp_path, large, "input=float32[B,4]")
    with pytest.raises(
        UsageError,
        match=r"weight 0.weight has 7e\+04, but the largest number of float16 is 6.55e\+04"
        r".*bfloat16 has the range",
    ):
        load(path, dtype="fp16")
    ens = load(path, dtype="bf16")
    x = torch.randn(3, 4).bfloat16()
    assert ens(x).dtype == torch.bfloat16
    with pytest.raises(UsageError, match="unknown dtype 'int8'"):
        load(path, dtype="int8")


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("command", ["build", "update", "append", "swap"])
def test_a_checkpoint_with_a_number_past_the_range_is_refused_by_name(tmp_path: Path, command: str) -> None:
    """Otherwise the number would be inf in the file, in the reference answer and in the answer, and the bound
    would hide it.
    """
    paths = files_of(tmp_path, [member(i, lambda: nn.Linear(4, 2)) for i in range(N)])
    bad = torch.load(paths[0])
    bad["bias"][0] = 1e6
    torch.save(bad, tmp_path / "bad.pt")
    out = tmp_path / "e.wide"
    more: Any = {"model": lambda: nn.Linear(4, 2), "inputs": ["input=float16[B,4]"], "dtype": "fp16"}
    more |= {"pt2": False, "targets": ("cpu",)}
    if command != "build":
        build(paths, out, **more)
    before = Reader(out).manifest.digest if command != "build" else ""
    with pytest.raises(
        CheckpointError,
        match=r"bad.pt: bias has 1e\+06, but the largest number of float16 is 6.55e\+04"
        r".*bfloat16 has the range",
    ):
        if command == "build":
            build([*paths, tmp_path / "bad.pt"], out, **more)
        elif command == "update":
            update(out, {1: tmp_path / "bad.pt"})
        elif command == "append":
            append(out, [tmp_path / "bad.pt"])
        else:
            load(out).swap(1, tmp_path / "bad.pt")
    assert not out.exists() if command == "build" else Reader(out).manifest.digest == before


def test_answers_that_overflow_are_refused(tmp_path: Path) -> None:
    class Far(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(self.fc(x) + 12.0)

    path = artifact(tmp_path, Far, "x=float32[B,4]")
    with pytest.raises(
        VerificationError,
        match="in float16 member m. answers NaN or inf in output output .*load without dtype",
    ):
        load(path, dtype="fp16")


def test_an_op_without_a_kernel_is_named(tmp_path: Path) -> None:
    class Solved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.solve(torch.eye(3) * 4 + x @ x.transpose(1, 2), self.fc(x))

    path = artifact(tmp_path, Solved, "x=float32[B,3,3]")
    with pytest.raises(
        LoweringError,
        match="entry forward does not run in bfloat16 on cpu: node linalg_solve"
        ".*test_dtype.py.*load without dtype",
    ):
        load(path, dtype="bf16")


def test_float64_of_integers_needs_no_default_dtype(masked: Path) -> None:
    reader = Reader(masked)
    program = raised(reader.program(reader.manifest.entries["forward"].member[0]))
    assert not [
        n for n in program.nodes if n.out.startswith("float32") and not n.name.endswith("as_it_comes")
    ]
