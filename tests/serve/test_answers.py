"""Tests that every model on the wire answers as each member alone, in every form of the protocol."""

from __future__ import annotations

import gzip
import zlib
from typing import Any

import orjson
import pytest
import torch
import wire_models
from asgi import InProcess, Request
from infer import Given, binary_request, document, infer, json_request, read
from support import Bound, double, leaves
from torch import Tensor, nn

import cases

ROWS = 24


def member(name: str, i: int) -> nn.Module:
    return wire_models.MODELS[name].member(i)


def sample(name: str, rows: int, seed: int = 0, words: int = 7) -> dict[str, Tensor]:
    """Returns the inputs of a model."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=g)
    if name == "text":
        ids = torch.randint(20, (rows, words), generator=g)
        return {
            "ids": ids,
            "x": torch.randn(rows, 4, generator=g),
            "loud": torch.rand(rows, generator=g) > 0.5,
        }
    if name == "typed":
        return {
            "pixels": torch.randint(256, (rows, 4), generator=g, dtype=torch.uint8),
            "half": torch.randn(rows, 4, generator=g).half(),
            "small": torch.randint(-9, 9, (rows, 4), generator=g, dtype=torch.int32),
        }
    return {"x": x, "scale": torch.randn(3, generator=g)} if name == "scaled" else {"x": x}


def alone(name: str, i: int, inputs: dict[str, Tensor], method: str = "forward") -> dict[str, Tensor]:
    """Returns the outputs of a member alone by their names on the wire."""
    with torch.no_grad():
        found = getattr(member(name, i), method)(**inputs)
    return dict(found) if isinstance(found, dict) else {"output": found}


def exact(name: str, i: int, inputs: dict[str, Tensor], method: str = "forward") -> dict[str, Tensor]:
    """Returns the same in float64."""
    one = member(name, i).double()
    with torch.no_grad():
        found = getattr(one, method)(**{k: double(v) for k, v in inputs.items()})
    return dict(found) if isinstance(found, dict) else {"output": found}


class Checked:
    """Compares outputs with members alone, each output by the rule of DESIGN.md, "Correct means"."""

    def __init__(self) -> None:
        self.bounds: dict[str, Bound] = {}

    def add(self, got: dict[str, Tensor], expected: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
        assert list(got) == list(expected)
        for name, value in got.items():
            if value.dtype in (torch.float32, torch.float64):
                self.bounds.setdefault(name, Bound()).add(value, expected[name], truth[name])
            elif value.is_floating_point():
                torch.testing.assert_close(value, expected[name])
            else:
                assert torch.equal(value, expected[name]), name

    def check(self) -> None:
        assert self.bounds
        for bound in self.bounds.values():
            bound.check()


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", ["plain", "text", "scaled", "typed"])
@pytest.mark.parametrize("kind", ["all", "each", "name", "number", "routed"])
def test_each_kind_of_model_answers_as_the_members_alone(name: str, kind: str, server: InProcess) -> None:
    inputs, count, checked = sample(name, ROWS), wire_models.MODELS[name].members, Checked()
    if kind == "all":
        got = infer(server, name, inputs)
        for i in range(count):
            one = {k: v[i] for k, v in got.items()}
            checked.add(one, alone(name, i, inputs), exact(name, i, inputs))
    elif kind == "each":
        apart = [sample(name, ROWS, 10 + i) for i in range(count)]
        got = infer(server, f"{name}.each", {k: torch.stack([a[k] for a in apart]) for k in inputs})
        for i, own in enumerate(apart):
            checked.add({k: v[i] for k, v in got.items()}, alone(name, i, own), exact(name, i, own))
    elif kind == "routed":
        ids = torch.arange(ROWS) * 7 % count
        got = infer(server, name, {**inputs, "member": ids})
        whole = [(alone(name, i, inputs), exact(name, i, inputs)) for i in range(count)]
        expected, truth = (
            {k: torch.stack([whole[i][part][k][r] for r, i in enumerate(ids.tolist())]) for k in got}
            for part in (0, 1)
        )
        checked.add(got, expected, truth)
    else:
        for i in range(count):
            got = infer(server, f"{name}.fold{i}" if kind == "name" else f"{name}.{i}", inputs)
            checked.add(got, alone(name, i, inputs), exact(name, i, inputs))
    checked.check()


@pytest.mark.parametrize("suffix", ["", ".each", ".fold2", ".2", "routed"])
def test_entries_are_models(suffix: str, server: InProcess) -> None:
    inputs, checked = sample("plain", ROWS, 3), Checked()
    if suffix == "routed":
        got = infer(server, "plain.encode", {**inputs, "member": torch.full((ROWS,), 2)})
    elif suffix == ".each":
        got = infer(server, "plain.encode.each", {"x": inputs["x"].repeat(4, 1, 1)})
    else:
        got = infer(server, f"plain.encode{suffix}", inputs)
    stacked = suffix in ("", ".each")
    checked.add(
        {k: v[2] if stacked else v for k, v in got.items()},
        alone("plain", 2, inputs, "encode"),
        exact("plain", 2, inputs, "encode"),
    )
    checked.check()


def test_members_of_rows_by_number_and_by_name(server: InProcess) -> None:
    inputs = sample("plain", 5)
    numbers: list[Given] = [
        torch.tensor([3, 0, 3, 1, 2], dtype=d) for d in (torch.int64, torch.int32, torch.uint8)
    ]
    names: list[Given] = [[f"fold{i}" for i in (3, 0, 3, 1, 2)], ["3", "0", "3", "1", "2"]]
    found = [infer(server, "plain", {**inputs, "member": m})["output"] for m in (*numbers, names[0])]
    in_json = read(server.maybe(json_request("plain", {**inputs, "member": names[0]}))).outputs["output"]
    assert all(torch.equal(f, found[0]) for f in (*found, in_json))
    for row, i in enumerate((3, 0, 3, 1, 2)):
        single = infer(server, f"plain.{i}", {"x": inputs["x"][row : row + 1]})["output"]
        torch.testing.assert_close(single[0], found[0][row])


def test_members_with_different_heads_are_models(server: InProcess) -> None:
    case = cases.load("ragged_heads")
    (x,), _ = case.sample(9, 5)
    checked = Checked()
    for i, classes in enumerate(case.CLASSES):
        got = infer(server, f"ragged_heads.{i}", {"x": x})
        assert got["output"].shape == (9, classes)
        one = case.member(i)
        with torch.no_grad():
            checked.add(got, {"output": one(x)}, {"output": one.double()(x.double())})
    checked.check()
    assert server("GET", "/v2/models/ragged_heads").status == 404


def test_a_model_whose_rows_depend_on_each_other(server: InProcess) -> None:
    inputs, checked = sample("mixing", ROWS), Checked()
    both = server.together(
        [binary_request("mixing", inputs), binary_request("mixing", sample("mixing", 5, 1))]
    )
    got = read(both[0]).outputs
    for i in range(3):
        checked.add({"output": got["output"][i]}, alone("mixing", i, inputs), exact("mixing", i, inputs))
        one = infer(server, f"mixing.{i}", inputs)
        checked.add(one, alone("mixing", i, inputs), exact("mixing", i, inputs))
    checked.check()


def test_states_are_inputs_and_outputs(server: InProcess) -> None:
    members = [member("counting", i) for i in range(3)]
    total, steps = torch.zeros(3, 6), torch.zeros(3, dtype=torch.int64)
    one_total, one_steps = torch.zeros(6), torch.zeros((), dtype=torch.int64)
    for t in range(3):
        x = sample("counting", 4, t)["x"]
        got = infer(server, "counting", {"x": x, "state.total": total, "state.steps": steps})
        single = infer(server, "counting.1", {"x": x, "state.total": one_total, "state.steps": one_steps})
        total, steps = got["state.total"], got["state.steps"]
        one_total, one_steps = single["state.total"], single["state.steps"]
        with torch.no_grad():
            for i, one in enumerate(members):
                torch.testing.assert_close(got["output"][i], one(x), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(total[i], one.total, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(single["output"], got["output"][1], rtol=1e-5, atol=1e-6)
        assert steps.tolist() == [t + 1] * 3 and int(one_steps) == t + 1
    each = infer(
        server, "counting.each", {"x": x.repeat(3, 1, 1), "state.total": total, "state.steps": steps}
    )
    with torch.no_grad():
        torch.testing.assert_close(each["output"][2], members[2](x), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- figures


def truth_of_figures(x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        y = torch.stack([member("plain", i).double()(x.double()) for i in range(4)])
    p = y.softmax(-1)
    entropy = torch.special.entr(p.mean(0)).sum(-1)
    expected = torch.special.entr(p).sum(-1).mean(0)
    votes = torch.nn.functional.one_hot(y.argmax(-1), 3).sum(0)
    return {
        "output.mean": y.mean(0),
        "output.std": y.std(0, correction=0),
        "output.quantile(0.25)": y.quantile(0.25, 0),
        "output.vote": votes.argmax(-1),
        "output.votes": votes,
        "mean of softmax": p.mean(0),
        "entropy": entropy,
        "mutual_information": (entropy - expected).clamp_min(0),
    }


def test_figures_by_name(server: InProcess) -> None:
    x = sample("plain", 9)["x"]
    truth = truth_of_figures(x)
    names = ["output.mean", "output.std", "output.quantile(0.25)", "output.vote", "output.votes"]
    got = infer(server, "plain", {"x": x}, *names)
    assert list(got) == names
    assert got["output.vote"].dtype == got["output.votes"].dtype == torch.int64
    for name in names:
        torch.testing.assert_close(got[name].double(), truth[name].double(), rtol=1e-4, atol=1e-5)
    softmax = {"of": "softmax"}
    outputs: list[dict[str, Any]] = [
        {"name": "output.mean", "parameters": softmax},
        {"name": "output.entropy", "parameters": {"of": "softmax", "dim": 1, "binary_data": False}},
        {"name": "output.mutual_information", "parameters": softmax},
        {"name": "output"},
    ]
    mixed = read(server.maybe(binary_request("plain", {"x": x}, outputs)))
    assert "data" in mixed.document["outputs"][1] and "data" not in mixed.document["outputs"][0]
    found = mixed.outputs
    torch.testing.assert_close(found["output.mean"].double(), truth["mean of softmax"], rtol=1e-4, atol=1e-5)
    for name in ("entropy", "mutual_information"):
        torch.testing.assert_close(found[f"output.{name}"].double(), truth[name], rtol=1e-4, atol=1e-5)
    assert found["output"].shape == (4, 9, 3)


def test_figures_of_shared_batches(server: InProcess) -> None:
    """Every figure of several requests in one batch is that of its own rows."""
    names = ["output.mean", "output.vote", "output.votes", "output.quantile(0.25)"]
    inputs = [sample("plain", 1 + i % 4, i)["x"] for i in range(12)]
    found = server.together([binary_request("plain", {"x": x}, names) for x in inputs])
    for x, response in zip(inputs, found):
        got, truth = read(response).outputs, truth_of_figures(x)
        for name in names:
            torch.testing.assert_close(got[name].double(), truth[name].double(), rtol=1e-4, atol=1e-5)
    entropies = [{"name": "output.entropy", "parameters": {"of": "softmax"}}]
    found = server.together([binary_request("plain", {"x": x}, entropies) for x in inputs])
    for x, response in zip(inputs, found):
        torch.testing.assert_close(
            read(response).outputs["output.entropy"].double(),
            truth_of_figures(x)["entropy"],
            rtol=1e-4,
            atol=1e-5,
        )


def test_figures_along_another_dim_than_the_last(server: InProcess) -> None:
    """The words' classes are in the last dim, and dim 1 has the words: a vote along it keeps the classes."""
    inputs = [sample("text", rows, rows, words=5) for rows in (1, 3, 2)]
    outputs = [{"name": "words.vote", "parameters": {"dim": 1}}]
    for own, response in zip(inputs, server.together([binary_request("text", i, outputs) for i in inputs])):
        y = torch.stack([alone("text", i, own)["words"] for i in range(3)]).argmax(2)
        expected = torch.nn.functional.one_hot(y, 5).sum(0).argmax(-1)
        assert torch.equal(read(response).outputs["words.vote"], expected)


def test_a_number_a_row_has_figures_without_classes(server: InProcess) -> None:
    inputs = [sample("score", rows, rows)["x"] for rows in (1, 3, 2)]
    for x, response in zip(
        inputs,
        server.together([binary_request("score", {"x": x}, ["output.mean", "output.std"]) for x in inputs]),
    ):
        got = read(response).outputs
        y = torch.stack([alone("score", i, {"x": x})["output"] for i in range(3)])
        torch.testing.assert_close(got["output.mean"], y.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(got["output.std"], y.std(0, correction=0), rtol=1e-3, atol=1e-5)
    sigmoid = [{"name": f"output.{f}", "parameters": {"of": "sigmoid"}} for f in ("entropy", "vote", "mean")]
    got = read(server.maybe(binary_request("score", {"x": inputs[1]}, sigmoid))).outputs
    assert [v.shape for v in got.values()] == [(3,)] * 3


# ---------------------------------------------------------------- forms


def test_json_flat_json_nested_binary_and_mixed_are_the_same(server: InProcess) -> None:
    for name in ("plain", "text"):
        inputs = sample(name, 4)
        expected = infer(server, name, inputs)
        for request in (
            json_request(name, inputs),
            json_request(name, inputs, nested=True),
            binary_request(name, inputs, in_json=list(inputs)[:1]),
            binary_request(name, inputs, parameters={}),
        ):
            found = read(server.maybe(request)).outputs
            assert list(found) == list(expected)
            assert all(torch.equal(found[k], v) for k, v in expected.items())


@pytest.mark.parametrize("rows", [2, 20_000])
def test_json_refuses_what_is_no_number_and_binary_has_it_exactly(rows: int, server: InProcess) -> None:
    x = torch.zeros(rows, 6)
    x[1] = float("nan")
    got = infer(server, "plain.0", {"x": x})["output"]
    assert bool(got[1].isnan().all()) and not got[0].isnan().any()
    for name, outputs in (("plain.0", []), ("plain", ["output.mean"]), ("plain", ["output"])):
        answer = server.maybe(binary_request(name, {"x": x}, outputs, parameters={}))
        assert answer is not None and answer.status == 400
        assert "numbers are NaN or infinite, which JSON cannot carry" in answer.error
        assert answer.error.endswith("request it with the parameter binary_data")
    assert read(server.maybe(binary_request("plain.0", {"x": x[:1]}, parameters={}))).outputs


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [False, True])
def test_compressed_requests_and_answers(encoding: str, binary: bool, server: InProcess) -> None:
    pack: Any = gzip.compress if encoding == "gzip" else zlib.compress
    unpack: Any = gzip.decompress if encoding == "gzip" else zlib.decompress
    inputs = sample("plain", 200)
    expected = infer(server, "plain", inputs)["output"]
    made = binary_request("plain", inputs) if binary else json_request("plain", inputs)
    assert isinstance(made.body, bytes)
    headers = {**made.headers, "content-encoding": encoding, "accept-encoding": f"br, {encoding};q=0.5"}
    got = server.maybe(Request("POST", made.path, pack(made.body), headers))
    assert got is not None
    assert got.headers["content-encoding"] == encoding
    assert int(got.headers["content-length"]) == len(got.body)
    plain = type(got)(got.status, got.headers, unpack(got.body))
    torch.testing.assert_close(read(plain).outputs["output"], expected)
    refused = {**made.headers, "accept-encoding": f"{encoding};q=0.000, br"}
    unpacked = server.maybe(Request("POST", made.path, made.body, refused))
    assert unpacked is not None
    assert "content-encoding" not in unpacked.headers


def test_a_body_in_chunks_is_the_same(server: InProcess) -> None:
    request = binary_request("plain", sample("plain", 5))
    body = request.body
    assert isinstance(body, bytes)
    whole = server.maybe(request)
    parts = [body[i : i + 7] for i in range(0, len(body), 7)]
    assert server.maybe(Request("POST", request.path, parts, request.headers)) == whole
    assert server.maybe(Request("POST", request.path, [b"", *parts, b""], request.headers)) == whole


def test_ids_names_and_versions_come_back(server: InProcess) -> None:
    x = sample("plain", 1)
    got = read(server.maybe(json_request("plain.fold3", x, id="wünsch/1"))).document
    version = server("GET", "/v2/models/plain").json["versions"][0]
    assert (got["id"], got["model_name"], got["model_version"]) == ("wünsch/1", "plain.fold3", version)
    assert len(version) == 12
    assert "id" not in read(server.maybe(json_request("plain", x))).document
    path = f"/v2/models/plain/versions/{version}"
    assert server("POST", f"{path}/infer", orjson.dumps(document(x))).status == 200
    assert server("GET", path).json == server("GET", "/v2/models/plain").json
    assert server("GET", f"{path}/ready").json == {"name": "plain", "ready": True}
    assert server("GET", f"{path}/stats").status == 200


def test_a_request_without_rows_is_answered_without_rows(server: InProcess) -> None:
    for name, given, wanted in (
        ("plain", (0, 6), (4, 0, 3)),
        ("plain.1", (0, 6), (0, 3)),
        ("plain.each", (4, 0, 6), (4, 0, 3)),
        ("mixing", (0, 6), (3, 0, 3)),
    ):
        inputs = {"x": torch.empty(given)}
        for found in (infer(server, name, inputs), read(server.maybe(binary_request(name, inputs))).outputs):
            assert found["output"].shape == wanted and found["output"].dtype == torch.float32
    x, none = torch.empty(0, 6), torch.empty(0, dtype=torch.int64)
    assert infer(server, "plain", {"x": x, "member": none})["output"].shape == (0, 3)
    figures = ["output.mean", "output.vote"]
    found = infer(server, "plain", {"x": x}, *figures)
    assert [found[name].shape for name in figures] == [(0, 3), (0,)]
    states = {"state.total": torch.zeros(3, 6), "state.steps": torch.zeros(3, dtype=torch.int64)}
    got = server.maybe(binary_request("counting", {"x": x, **states}))
    assert got is not None and got.status == 400 and "valid for 1 <= B" in got.error


def test_the_largest_batch_of_a_model_and_more(server: InProcess) -> None:
    """guard_size is captured for at most 100 rows: more are refused, and batches have no more."""
    case = cases.load("guard_size")
    many = [torch.randn(60, 16) for _ in range(4)]
    for x, response in zip(many, server.together([binary_request("guard_size", {"x": x}) for x in many])):
        y = read(response).outputs["output"]
        with torch.no_grad():
            torch.testing.assert_close(y[1], case.member(1)(x), rtol=1e-4, atol=1e-5)
    got = server.maybe(binary_request("guard_size", {"x": torch.zeros(101, 16)}))
    assert got is not None
    assert got.status == 400
    assert "B <= 100" in got.error
    assert leaves(torch.zeros(1))
