"""Builds and checks artifacts whose members change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from widepack import load
from widepack.errors import WidepackError
from widepack_artifacts import strict_json
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.reader import Reader
from widepack_artifacts.wide_program import WideProgram
from widepack_artifacts.writer import Writer

SPECS: dict[str, Any] = {"inputs": ["x=float32[B,6]"], "targets": ("cpu",), "pt2": False}


X = torch.linspace(-2, 2, 24).reshape(4, 6)


Scratch = Callable[..., Path]


class Net(nn.Module):
    """A trunk, a norm with a buffer, a tied weight, a literal, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.trunk.weight
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.again(self.trunk(x).relu()))
        return self.head(hidden) * torch.tensor([1.0, 2.0, 3.0])


def member(make: Callable[[], nn.Module], seed: int, trunk: int = 0) -> nn.Module:
    """Makes a member. Members with the same `trunk` have equal trunks. All other weights depend on `seed`."""
    torch.manual_seed(seed + 10)
    net = make().eval()
    for name, p in net.state_dict().items():
        if p.is_floating_point():
            with torch.no_grad():
                torch.manual_seed(trunk if name.startswith(("trunk", "again")) else 100 * seed + len(name))
                p.copy_(
                    torch.randn_like(p) * 0.3 + (1.0 if "var" in name else 0.0)
                ).abs_() if "var" in name else p.copy_(torch.randn_like(p) * 0.3)
    return net


def save(folder: Path, nets: Sequence[nn.Module], stem: str = "m") -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}{i}.pt" for i in range(len(nets))]
    for path, net in zip(paths, nets):
        torch.save(net.state_dict(), path)
    return paths


def content(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def checked_manifest(path: Path) -> Manifest:
    """Checks all files of an artifact and its probe, and returns its manifest."""
    reader = Reader(path)
    reader.check_hashes()
    assert set(content(path)) == {*reader.manifest.files, "manifest.json"}
    load(path, verify="hashes").probe()
    return reader.manifest


def names_of(manifest: Manifest, but: Sequence[str] = ("probe", ".pt2")) -> set[str]:
    """Returns the files of an artifact, without those that contain random inputs or a time."""
    return {name for name in manifest.files if not any(b in name for b in but)}


def check_same(
    path: Path, scratch: Path, call: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> None:
    """Compares an artifact with one that was built from scratch: files by hash, state dicts and answers by
    bits.
    """
    found, expected = checked_manifest(path), checked_manifest(scratch)
    assert names_of(found) == names_of(expected)
    assert found.weights == expected.weights
    assert {n: (e.signatures, e.outputs, sorted(e.pt2)) for n, e in found.entries.items()} == {
        n: (e.signatures, e.outputs, sorted(e.pt2)) for n, e in expected.entries.items()
    }
    assert [(m.sha256, m.bytes) for m in found.members] == [(m.sha256, m.bytes) for m in expected.members]
    updated, rebuilt = load(path), load(scratch)
    for i in range(len(rebuilt)):
        state, expected_state = updated.state_dict(i), rebuilt.state_dict(i)
        assert list(state) == list(expected_state)
        assert all(torch.equal(state[k], expected_state[k]) for k in state)
    if call:
        many = [torch.stack([a * (1 + i) for i in range(len(rebuilt))]) for a in call]
        for a, b in ((updated(*call), rebuilt(*call)), (updated.each(*many), rebuilt.each(*many))):
            assert all(torch.equal(p, q) for p, q in zip(a, b))


def check_answers(path: Path, nets: Sequence[nn.Module], x: Tensor) -> None:
    """Compares the answers of an artifact with those of its members' modules."""
    with torch.no_grad():
        for got, net in zip(load(path)(x), nets, strict=True):
            torch.testing.assert_close(got, net(x), rtol=1e-4, atol=1e-5)


def check_refused(call: Callable[[], object], kind: type[WidepackError], *words: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing from: {caught.value}"
    assert "\n\n" not in str(caught.value)


def add_measured_plan(path: Path, wrong: bool = False) -> None:
    """Adds a measured plan of another machine to an artifact, for its program or for a wrong one."""
    reader = Reader(path)
    entry = reader.manifest.entries["forward"]
    row = next(w for w in entry.wide if (w.device, w.pattern) == ("cpu", "shared"))
    plan = {**row.plan, "machine": "theirs", "threads": 2, "at": 8, "times_ms": {"wide": 1.0}}
    with Writer(path, force=True) as writer:
        writer.keep(reader.manifest.files)
        program = reader.program(row.file)
        other = replace(
            program,
            nodes=tuple(
                replace(n, op="aten.tanh.default") if n.op == "aten.relu.default" else n
                for n in program.nodes
            ),
        )
        assert other != program
        file = (
            writer.file("programs/cpu.forward.shared", "json", strict_json.canonical(other.to_json()))
            if wrong
            else row.file
        )
        measured = WideProgram(row.device, row.pattern, file, row.batch, plan)
        writer.publish(
            replace(reader.manifest, entries={"forward": replace(entry, wide=(*entry.wide, measured))})
        )
