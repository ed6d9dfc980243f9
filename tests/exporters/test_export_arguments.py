"""Tests that exported programs take every form of arguments: lists, dicts, keywords, arguments without a use.

Each answer is compared with the members alone, here and by `export` itself at other sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from loaded import save_members
from torch import Tensor, nn

import widepack
from widepack.backends.exported_graph import exported_graph
from widepack.ir.fake_values import CPU, Fakes, replay
from widepack_artifacts.program import Node, Output, Program, Ref, Slot


class Both(nn.Module):
    """Two layers. Each subclass has more inputs than parameters: four."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)


class ListFirst(Both):
    def forward(self, xs: list[Tensor], y: Tensor) -> Tensor:
        z: Tensor = self.a(torch.cat(xs, 1)[:, 2:6]) + self.b(y)
        return z


class ListAndDict(Both):
    def forward(self, xs: list[Tensor], d: dict[str, Tensor]) -> Tensor:
        z: Tensor = self.a(torch.stack(xs).sum(0)) - self.b(d["u"] * d["v"])
        return z


class ListBetween(Both):
    def forward(self, y: Tensor, xs: list[Tensor], z: Tensor) -> Tensor:
        found: Tensor = self.a(y) + self.b(torch.cat(xs, 0)[: len(z)]) + z[:, :3]
        return found


class LastUnused(Both):
    def forward(self, xs: list[Tensor], y: Tensor, z: Tensor) -> Tensor:
        found: Tensor = self.a(torch.stack(xs).prod(0)) + self.b(y)
        return found


class Nested(Both):
    def forward(self, d: dict[str, Any], y: tuple[Tensor, list[Tensor]]) -> Tensor:
        found: Tensor = self.a(torch.cat(d["p"], 1)[:, ::2]) + self.b(d["q"]["r"] + y[0]) * y[1][0][:, :3]
        return found


class Keywords(Both):
    def forward(self, xs: list[Tensor], *, y: Tensor, m: Tensor | None = None, z: Tensor) -> Tensor:
        found: Tensor = self.a(torch.stack(xs).sum(0)) + self.b(y - z)
        return found if m is None else found * m


class Names(Both):
    """Arguments with the names that graphs have for weights and inputs."""

    def forward(self, x3: Tensor, w0: Tensor, x1: Tensor, input: Tensor, add_tensor: Tensor) -> Tensor:
        found: Tensor = self.a(x3) + self.b(w0) * 2 + self.a(x1 * 3 + input) + self.b(add_tensor)
        return found


class Graph(NamedTuple):
    nodes: Tensor
    edges: Tensor


class NamedFields(Both):
    def forward(self, graph: Graph, y: Tensor, z: Tensor) -> Tensor:
        found: Tensor = self.a(torch.stack([graph.nodes, graph.edges]).sum(0)) - self.b(y * z)
        return found


def r() -> Tensor:
    return torch.randn(5, 4)


CASES: dict[type[Both], tuple[Any, dict[str, Any]]] = {
    ListFirst: (([r(), r(), r()], r()), {}),
    ListAndDict: (([r(), r(), r()], {"u": r(), "v": r()}), {}),
    ListBetween: ((r(), [r(), r(), r()], r()), {}),
    LastUnused: (([r(), r()], r(), r()), {}),
    Nested: (({"p": [r(), r()], "q": {"r": r()}}, (r(), [r()])), {}),
    Keywords: (([r(), r()],), {"y": r(), "z": r()}),
    NamedFields: ((Graph(r(), r()), r(), r()), {}),
    Names: ((r(), r(), r(), r(), r()), {}),
}
PATTERNS: list[dict[str, Any]] = [{}, {"pattern": "each"}, {"member": 1}]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Both], Path]:
    """Builds an artifact of each class when it is first asked for."""
    made: dict[type[Both], Path] = {}

    class Built(dict[type[Both], Path]):
        def __missing__(self, make: type[Both]) -> Path:
            folder = tmp_path_factory.mktemp(make.__name__)
            (args, kwargs), files = CASES[make], save_members(make, folder, 3)
            widepack.build(
                files, folder / "e.wide", model=make, sample=args, sample_kwargs=kwargs, pt2=False, budget=0
            )
            self[make] = folder / "e.wide"
            return self[make]

    return Built(made)


def leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [leaf for part in parts for leaf in leaves(part)]


def members(path: Path, make: type[Both]) -> list[Tensor]:
    """Returns the answer of each member alone to the sample."""
    args, kwargs = CASES[make]
    found = []
    for i in range(3):
        module = make()
        module.load_state_dict(torch.load(path.parent / f"m{i}.pt"))
        found.append(module(*args, **kwargs).detach())
    return found


@pytest.mark.parametrize(
    "make", [ListFirst, *(pytest.param(m, marks=pytest.mark.extended) for m in [*CASES][1:])]
)
def test_every_form_of_arguments_in_onnx(
    make: type[Both], onnx: Any, built: dict[type[Both], Path], tmp_path: Path
) -> None:
    import onnxruntime

    path = built[make]
    for options in PATTERNS:
        report = widepack.export(path, tmp_path / "o.onnx", to="onnx", force=True, **options)
        assert report.checked.startswith("ONNX Runtime")
    names = [text.split("=")[0] for text in report.inputs]
    session = onnxruntime.InferenceSession(str(tmp_path / "o.onnx"))
    args, kwargs = CASES[make]
    given = dict(zip(names, [x.numpy() for x in leaves([args, kwargs])], strict=True))
    taken = {i.name for i in session.get_inputs()}
    (found,) = session.run(None, {k: v for k, v in given.items() if k in taken})
    torch.testing.assert_close(torch.from_numpy(found), members(path, make)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make", [ListFirst, *(pytest.param(m, marks=pytest.mark.extended) for m in [*CASES][1:])]
)
def test_every_form_of_arguments_in_pt2(
    make: type[Both], built: dict[type[Both], Path], tmp_path: Path
) -> None:
    path = built[make]
    args, kwargs = CASES[make]
    for options in PATTERNS:
        report = widepack.export(path, tmp_path / "o.pt2", to="pt2", force=True, **options)
        assert report.checked.startswith("torch")
    found = torch.export.load(tmp_path / "o.pt2").module()(*leaves(args), **kwargs)
    torch.testing.assert_close(found, members(path, make)[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights", range(6))
@pytest.mark.parametrize("inputs", range(1, 6))
def test_inputs_keep_their_names(weights: int, inputs: int) -> None:
    """Also if there are more of them than of weights, and whatever a graph calls its values meanwhile."""
    slots = tuple(Slot(f"v{i}", f"v{i}", "shared", "float32[2]") for i in range(weights + inputs))
    node = Node("y", "aten.add.Tensor", (Ref(slots[0].name), Ref(slots[-1].name)))
    program = Program(slots[:weights], slots[weights:], (node,), (Output(Ref("y"), "shared"),))
    fakes = Fakes({})
    names = [f"x{i}" for i in range(inputs)]
    graph = exported_graph(program, replay(program, fakes), fakes, CPU, names)
    assert [n.name for n in graph.inputs] == names
