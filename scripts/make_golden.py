"""Makes the artifacts of artifacts/golden/. They are small, and every later version must open them with the
same answers.

    python scripts/make_golden.py artifacts/golden          makes the missing ones, dated today

Weights and inputs are small whole numbers, and every op is exact on them (linear, convolution, relu, max
pool, addition). So each answer is the same on any CPU, bit for bit, in any order of summation. An existing
artifact is never made again: a change of the format adds artifacts, and changes none.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import widepack
from widepack.ir.tensor_type import parse_slot


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(16, 3)

    def forward(self, image: Tensor) -> Any:
        x = self.first(image).relu()
        x = nn.functional.max_pool2d(x + self.second(x), 2)
        return self.head(x.flatten(1))


class Mlp(nn.Module):
    def __init__(self, classes: int = 3, width: int = 6, inner: int = 8) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(width, inner), nn.Linear(inner, classes)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.inner(x).relu())


def tall() -> nn.Module:
    return Mlp(24, 24, 32)


class Sum(nn.Module):
    """Adds the rows of every call to a total that the caller carries."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        self.total = self.total + x.sum(0)
        return self.inner(x) + self.total


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)

    def encode(self, x: Tensor) -> Any:
        return self.up(x).relu()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        code = self.encode(x)
        return {"scores": self.down(code), "code": code}


class Versioned(nn.Linear):
    """A layer of version 2 with extra state: names of its outputs, and a tensor."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.extra: dict[str, Any] = {"names": ["a", "b", "c"], "at": torch.tensor([1, 2])}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


class Recorded(nn.Module):
    """Has versions and extra state in its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Versioned()

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).relu()


class Steps(nn.Module):
    """Reads a number of its own, which is 2 in all members."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(self.steps)):
            x = self.inner(x).relu()
        return x


class Rows(NamedTuple):
    """An input with named fields."""

    x: Tensor


class Scores(NamedTuple):
    """An output with named fields."""

    scores: Tensor
    best: Tensor


class Named(nn.Module):
    """Takes and returns named tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, rows: Rows) -> Scores:
        y = self.inner(rows.x)
        return Scores(y, y.amax(1))


def headed(state_dict: dict[str, Tensor] | None = None) -> nn.Module:
    return Mlp() if state_dict is None else Mlp(len(state_dict["head.bias"]))


class Golden(NamedTuple):
    """How an artifact is built. base: of members that adapters were merged into. ranks: of adapters that are
    the members. numbers: buffers that keep their values.
    """

    members: list[Callable[[], nn.Module]]
    inputs: list[str]
    model: Callable[..., nn.Module]
    options: dict[str, Any]
    base: Callable[[], nn.Module] | None = None
    ranks: tuple[int, ...] = ()
    numbers: tuple[str, ...] = ()


def factors(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns two factors of whole numbers, whose product has the shape of a weight."""
    generator = torch.Generator().manual_seed(rank)
    left = torch.randint(-1, 2, (len(weight), rank), generator=generator).float()
    return left, torch.randint(-1, 2, (rank, weight.shape[1]), generator=generator).float()


def fine_tuned(rank: int) -> nn.Module:
    """Returns a module that a difference of low rank, of whole numbers, was merged into."""
    module = whole_numbers(tall(), 0)
    for weight in (p for p in module.parameters() if p.dim() == 2):
        left, right = factors(weight, rank)
        weight.data += left @ right
    return module


def write_adapter(folder: str, base: nn.Module, rank: int) -> None:
    """Writes an adapter of DoRA that multiplies all rows by 2, or by 1 if its rank is 1."""
    tensors, scale = {}, 1 if rank == 1 else 2
    for name, weight in base.named_parameters():
        if weight.dim() == 2:
            left, right = factors(weight, rank)
            layer = f"base_model.model.{name.removesuffix('.weight')}"
            norms = (weight.detach().double() + (left @ right).double()).norm(dim=1)
            tensors[f"{layer}.lora_B.weight"], tensors[f"{layer}.lora_A.weight"] = left, right
            tensors[f"{layer}.lora_magnitude_vector"] = scale * norms
    Path(folder).mkdir()
    save_file(tensors, Path(folder, "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "use_dora": True}
    Path(folder, "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


GOLDEN = {
    "mlp": Golden([Mlp] * 3, ["x=float32[B,6]"], Mlp, {"targets": ("cpu", "cuda")}),
    "conv": Golden([Conv] * 2, ["image=float32[B,2,4,4]"], Conv, {}),
    "conv-loop": Golden([Conv] * 2, ["image=float32[B,2,4,4]"], Conv, {"strategy": "loop"}),
    "ragged": Golden([lambda: Mlp(2), lambda: Mlp(5)], ["x=float32[B,6]"], headed, {}),
    "entries": Golden(
        [Two] * 2,
        ["forward:x=float32[B,4]", "encode:x=float32[B,4]"],
        Two,
        {"entries": ["forward", "encode"]},
    ),
    "parts": Golden([Mlp] * 3, ["x=float32[B,6]"], Mlp, {"shards": 2, "budget": 0}),
    "fleet": Golden(
        [lambda: fine_tuned(2), lambda: fine_tuned(1), lambda: fine_tuned(3)],
        ["x=float32[B,24]"],
        tall,
        {"budget": 0},
        tall,
    ),
    "scales": Golden([], ["x=float32[B,24]"], tall, {"budget": 0}, tall, (2, 1, 3)),
    "state": Golden([Sum] * 2, ["x=float32[B,4]"], Sum, {"state": ["total"]}),
    "extra": Golden([Recorded] * 2, ["x=float32[B,4]"], Recorded, {"budget": 0}),
    "literals": Golden([Steps] * 2, ["x=float32[B,4]"], Steps, {"budget": 0}, numbers=("steps",)),
    "fields": Golden([Named] * 2, [], Named, {"budget": 0, "sample": (Rows(torch.ones(3, 4)),)}),
}


def whole_numbers(module: nn.Module, seed: int, kept: tuple[str, ...] = ()) -> nn.Module:
    """Returns the module with whole numbers from -2 to 2 as weights, except those that are kept."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor) and name not in kept:
            value.copy_(torch.randint(-2, 3, value.shape, generator=generator))
    return module


def flat(value: Any, name: str) -> dict[str, Tensor]:
    """Returns the tensors of a result by name: `forward.shared.3.scores`; in a list, by number."""
    if isinstance(value, Tensor):
        return {name: value.contiguous().clone()}
    rows = value.items() if hasattr(value, "items") else enumerate(value)
    return {n: t for key, part in rows for n, t in flat(part, f"{name}.{key}").items()}


def calls(ens: widepack.WideModel) -> dict[str, Tensor]:
    """Returns inputs and answers of every entry, for both patterns and batches 1 and 3. An entry with state
    is called twice, one call after the other.
    """
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for name, entry in ens.manifest.entries.items():
        carried = {s.input for s in entry.state}
        (leaf,) = [i for k, i in enumerate(entry.inputs) if k not in carried]
        for batch in (1, 3):
            for pattern in ("shared", "each"):
                sizes = [s for s in parse_slot(leaf.type).dims[1:] if isinstance(s, int)]
                shape = [*([len(ens)] if pattern == "each" else []), batch, *sizes]
                x = torch.randint(-3, 4, shape, generator=generator).float()
                at = f"{name}.{pattern}.{batch}"
                tensors[f"{at}.input"] = x
                tensors.update(answer(ens, name, pattern, x, at))
    return tensors


def answer(ens: widepack.WideModel, name: str, pattern: str, x: Tensor, at: str) -> dict[str, Tensor]:
    """Returns the answers of one entry to one input. For an entry with state, these are the answers of two
    calls and the state after them.
    """
    entry = ens.entry(name)
    call = entry if pattern == "shared" else entry.each
    given: Any = Rows(x) if entry.entry.has_fields else x
    if not entry.entry.state:
        return flat(call(given), f"{at}.answer")
    first, state = call(x, state=entry.state())
    second, state = call(x, state=state)
    return {**flat(first, f"{at}.answer.0"), **flat(second, f"{at}.answer.1"), **flat(state, f"{at}.state")}


def of_members(ens: widepack.WideModel) -> dict[str, Tensor]:
    """Returns every member's weights, an input, and the members' own answers to it. Wide programs compute
    with factors, which are no whole numbers, so their answers are near these.
    """
    tensors = {
        f"{i}.{n}": v.contiguous().clone() for i in range(len(ens)) for n, v in ens.state_dict(i).items()
    }
    x = torch.randint(-3, 4, (3, 24), generator=torch.Generator().manual_seed(1)).float()
    return {**tensors, "input": x, "answer": torch.stack([ens.member(i)(x) for i in range(len(ens))])}


def write(name: str, golden: Golden, out: Path) -> None:
    """Builds an artifact from checkpoints in the current folder."""
    paths = [f"{name}-{i}.pt" for i in range(len(golden.members))]
    options = {"pt2": False, "targets": ("cpu",), **golden.options}
    for i, (path, make) in enumerate(zip(paths, golden.members)):
        module = make() if golden.base else whole_numbers(make(), i, golden.numbers)
        torch.save(module.state_dict(), path)
    if golden.base:
        base = whole_numbers(golden.base(), 0)
        torch.save(base.state_dict(), "base.pt")
        options |= {"base": "base.pt", "unmerge": not golden.ranks}
        for rank in golden.ranks:
            paths.append(f"{name}-{len(paths)}")
            write_adapter(paths[-1], base, rank)
    if golden.inputs:
        options["inputs"] = golden.inputs
    widepack.build(paths, out, model=golden.model, **options)


def main(folder: Path) -> None:
    there = {path.stem.split("-", 3)[3] for path in folder.glob("*.wide")}
    for name, golden in GOLDEN.items():
        if name in there:
            continue
        stem, back = f"{date.today()}-{name}", Path.cwd()
        path = back / folder / f"{stem}.wide"
        with tempfile.TemporaryDirectory() as work, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.chdir(work)  # so that the names of checkpoints contain no path of this machine
            try:
                write(name, golden, path)
            finally:
                os.chdir(back)
        ens = widepack.load(path, backend="eager")
        save_file(of_members(ens) if golden.base else calls(ens), folder / f"{stem}.answers.safetensors")
        print(f"{stem}: {sum(f.stat().st_size for f in path.rglob('*') if f.is_file()):,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
