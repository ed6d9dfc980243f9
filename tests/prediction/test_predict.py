"""Tests `widepack.predict`: every format, the order of rows, the three forms of answers, all shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import widepack
from prediction.conftest import ROWS
from prediction.members import exact
from widepack.inference.model import WideModel
from widepack_serve.catalog.layout import EntryLayout

SOURCES = ["in.parquet", "in.arrow", "in.feather", "stream.arrow", "in.csv", "in.npy", "in.safetensors"]
OUTPUTS = ["out.parquet", "out.arrow", "out.feather", "out.csv", "out.npy", "out.safetensors"]


@pytest.fixture
def sources(folder: Path, pa: Any, table: Any, x: Tensor) -> Path:
    """Writes the same rows in every format."""
    pa.parquet.write_table(table, "in.parquet", row_group_size=90)
    pa.csv.write_csv(table, "in.csv")
    for name in ("in.arrow", "in.feather"):
        with pa.ipc.new_file(name, table.schema) as file:
            file.write_table(table, max_chunksize=130)
    with pa.ipc.new_stream("stream.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=77)
    np.save("in.npy", x.numpy())
    save_file({"x": x, "tenant": torch.arange(ROWS) ** 2 % 4}, "in.safetensors")
    return folder


def written(pa: Any, path: str, name: str) -> Tensor:
    """Returns one column of an output, `[rows, ...]`."""
    if path.endswith(".npy"):
        return torch.from_numpy(np.load(path))
    if path.endswith(".safetensors"):
        return load_file(path)[name]
    if path.endswith(".csv"):
        found = pa.csv.read_csv(path)
        parts = [c for c in found.column_names if c == name or c.startswith(f"{name}.")]
        return torch.tensor([found[c].to_pylist() for c in parts]).T
    found = pa.parquet.read_table(path) if path.endswith(".parquet") else pa.ipc.open_file(path).read_all()
    return torch.tensor(found[name].to_pylist())


@pytest.mark.extended(keep=14)
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_every_format_to_every_format(
    source: str, output: str, sources: Path, net: WideModel, pa: Any, table: Any, x: Tensor
) -> None:
    truth = exact(net, x)
    named = {"x": "f0..f5"} if source == "in.csv" else None
    report = widepack.predict(net, source, output, inputs=named, reduce="mean", batch=64)
    assert (report.rows, report.batches, report.batch) == (ROWS, 11, 64)
    assert report.columns[-1] == "output.mean"
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(written(pa, output, "output.mean").double(), truth.mean(0), **close)
    if source != "in.npy":
        widepack.predict(net, source, output, inputs=named, member="tenant", force=True)
        own = torch.stack([truth[i * i % 4, i] for i in range(ROWS)])
        torch.testing.assert_close(written(pa, output, "output").double(), own, **close)
    if "csv" in source and output == "out.csv":
        header, first, *_ = Path(output).read_text(encoding="utf-8").splitlines()
        assert header == '"id","tenant","output.0","output.1","output.2"'
        assert first.startswith('"00000","m0",')
    elif (
        source != "in.npy" and not output.endswith((".npy", ".csv", ".safetensors")) and "safe" not in source
    ):
        found = (
            pa.parquet.read_table(output) if output == "out.parquet" else pa.ipc.open_file(output).read_all()
        )
        assert found["id"].to_pylist() == table["id"].to_pylist()
        assert found["tenant"].to_pylist() == table["tenant"].to_pylist()


@pytest.mark.parametrize("output", OUTPUTS)
def test_all_members_answer(output: str, sources: Path, net: WideModel, pa: Any, x: Tensor) -> None:
    widepack.predict(net, "in.parquet", output)
    truth = exact(net, x)
    if output in ("out.npy", "out.safetensors"):
        found = written(pa, output, "output").movedim(1, 0)  # [rows, N, 3]
    else:
        found = torch.stack([written(pa, output, f"output.{m}") for m in net.members])
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-6)


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


class Answers(nn.Module):
    """A model with the answer that a function makes of its outputs."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.head(x))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("form", "names"),
    [
        (lambda y: y, ["output"]),
        (lambda y: (y, y + 1), ["0", "1"]),
        (lambda y: {"a": y, "b": y + 1}, ["a", "b"]),
        (lambda y: Pair(y, y + 1), ["mean", "spread"]),
    ],
)
def test_outputs_have_the_names_of_the_server(
    form: Callable[[Tensor], Any], names: list[str], sources: Path
) -> None:
    fused = widepack.fuse([Answers(form) for _ in range(2)], torch.randn(4, 6))
    fused.eval().save("own.wide")
    ens = widepack.load("own.wide")
    assert [o.name for o in EntryLayout(ens.entry("forward")).outputs] == names
    assert list(widepack.predict(ens, "in.npy", "out.safetensors").columns) == names
    assert sorted(load_file("out.safetensors")) == names
    found = widepack.predict(ens, "in.npy", "last.npy", reduce="mean", answer=names[-1])
    assert found.columns == (f"{names[-1]}.mean",)


def test_files_name_the_artifact(sources: Path, net: WideModel, pa: Any) -> None:
    for output in ("out.parquet", "out.arrow"):
        widepack.predict(net, "in.parquet", output, reduce="mean")
        read = pa.parquet.read_schema if output == "out.parquet" else lambda p: pa.ipc.open_file(p).schema
        assert read(output).metadata[b"widepack.digest"].decode() == net.manifest.digest
    widepack.predict(net, "in.parquet", "out.safetensors", reduce="mean")
    data = Path("out.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"]["widepack.digest"] == net.manifest.digest


def test_figures_and_their_columns(sources: Path, net: WideModel, pa: Any, x: Tensor) -> None:
    names = ["mean", "std", "vote", "entropy", "quantile(0.9)"]
    report = widepack.predict(net, "in.npy", "out.parquet", reduce=names, of="softmax")
    assert report.columns == (
        "output.mean",
        "output.std",
        "output.vote",
        "output.entropy",
        "output.quantile(0.9)",
    )
    p = exact(net, x).softmax(-1)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(written(pa, "out.parquet", "output.mean").double(), p.mean(0), **close)
    std = p.std(0, correction=0)
    torch.testing.assert_close(written(pa, "out.parquet", "output.std").double(), std, **close)
    entropy = torch.special.entr(p.mean(0)).sum(-1)
    torch.testing.assert_close(written(pa, "out.parquet", "output.entropy").double(), entropy, **close)
    vote = written(pa, "out.parquet", "output.vote")
    assert vote.dtype == torch.int64
    assert torch.equal(vote, p.argmax(-1).mode(0).values)


@pytest.mark.extended
def test_named_outputs_lists_and_shapes(folder: Path, tokens: WideModel, pa: Any) -> None:
    ids, scale = torch.arange(60).view(15, 4) % 10, torch.linspace(-1, 1, 15)
    rows = {"words": ids.tolist(), "scale": scale.tolist(), "kept": list("abcdefghijklmno")}
    pa.parquet.write_table(pa.table(rows), "in.parquet")
    report = widepack.predict(tokens, "in.parquet", "out.parquet", inputs={"ids": "words"}, batch=4)
    members = tokens.members
    assert report.columns == ("kept", *(f"{n}.{m}" for n in ("logits", "map") for m in members))
    assert report.inputs == {"ids": ("words",), "scale": ("scale",)}
    answers = tokens(ids, scale)
    schema = pa.parquet.read_schema("out.parquet")
    for k, m in enumerate(members):
        logits = written(pa, "out.parquet", f"logits.{m}")
        torch.testing.assert_close(logits, answers["logits"][k], rtol=1e-5, atol=1e-6)
        assert json.loads(schema.field(f"map.{m}").metadata[b"shape"]) == [2, 3]
        flat = written(pa, "out.parquet", f"map.{m}")
        torch.testing.assert_close(flat.view(15, 2, 3), answers["map"][k], rtol=1e-5, atol=1e-6)
    widepack.predict(
        tokens, "in.parquet", "out.csv", inputs={"ids": "words"}, reduce="mean", answer="map", name="m"
    )
    header = Path("out.csv").read_text(encoding="utf-8").splitlines()[0].replace('"', "").split(",")
    assert header == ["kept", *(f"m.mean.{i}.{j}" for i in range(2) for j in range(3))]
    # what one run wrote is an input of the next
    pa.parquet.write_table(pa.table({"ids": ids.tolist(), "s.1": scale.tolist()}), "again.parquet")
    again = widepack.predict(
        tokens, "again.parquet", "again.npy", inputs={"scale": "s.1"}, reduce="mean", answer="logits"
    )
    assert again.columns == ("logits.mean",)
    torch.testing.assert_close(
        torch.from_numpy(np.load("again.npy")), answers["logits"].mean(0), rtol=1e-5, atol=1e-6
    )


def test_one_number_for_each_row(folder: Path, classes: WideModel, pa: Any) -> None:
    """A column of numbers is an input [B, 1], and answers [B] are a column of numbers."""
    x = torch.linspace(-3, 3, 50)
    pa.parquet.write_table(pa.table({"x": x.tolist(), "other": [1.0] * 50}), "in.parquet")
    report = widepack.predict(classes, "in.parquet", "out.csv")
    assert report.columns == ("other", *(f"output.{m}" for m in classes.members))
    found = torch.stack([written(pa, "out.csv", f"output.{m}")[:, 0] for m in classes.members])
    assert torch.equal(found, classes(x[:, None]))
    widepack.predict(classes, "in.parquet", "out.npy", ids=())
    assert torch.equal(written(pa, "out.npy", "").T, classes(x[:, None]))


def test_rows_in_another_dim(folder: Path, steps: WideModel) -> None:
    x = torch.randn(5, 9, 4)
    np.save("in.npy", x.movedim(1, 0).contiguous().numpy())
    widepack.predict(steps, "in.npy", "out.npy", batch=4)
    found = torch.from_numpy(np.load("out.npy"))  # [rows, N, 5, 2]
    torch.testing.assert_close(found.permute(1, 2, 0, 3), steps(x), rtol=1e-5, atol=1e-6)
    widepack.predict(steps, "in.npy", "mean.npy", reduce="mean", batch=4)
    mean = torch.from_numpy(np.load("mean.npy"))  # [rows, 5, 2]
    torch.testing.assert_close(mean.movedim(0, 1), steps(x).mean(0), rtol=1e-5, atol=1e-6)


def test_batches_that_the_model_does_not_take_are_filled(folder: Path, paired: WideModel) -> None:
    x = torch.randn(9, 6)
    np.save("in.npy", x.numpy())
    widepack.predict(paired, "in.npy", "out.npy", reduce="mean", batch=8)
    filled = torch.cat([x, x[-1:]])
    expected = paired(filled).mean(0)[:9]
    torch.testing.assert_close(torch.from_numpy(np.load("out.npy")), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("source", ["in.parquet", "in.csv", "in.npy", "in.safetensors"])
def test_a_file_without_rows(
    source: str, output: str, folder: Path, net: WideModel, pa: Any, table: Any
) -> None:
    pa.parquet.write_table(table[:0], "in.parquet")
    pa.csv.write_csv(table[:0], "in.csv")
    np.save("in.npy", np.zeros((0, 6), "f4"))
    save_file({"x": torch.zeros(0, 6)}, "in.safetensors")
    report = widepack.predict(
        net, source, output, inputs={"x": "f0..f5"} if "v" in source else None, reduce="mean"
    )
    assert (report.rows, report.batches) == (0, 0)
    if output in ("out.npy", "out.safetensors"):
        assert written(pa, output, "output.mean").shape == (0, 3)
    elif output == "out.parquet":
        found = pa.parquet.read_table(output)
        assert found.num_rows == 0
        assert found.schema.field("output.mean").type == pa.list_(pa.float32(), 3)


def test_the_same_answers_at_any_batch(sources: Path, net: WideModel, pa: Any) -> None:
    found = []
    for batch in (1, 7, 256, 4096):
        widepack.predict(net, "in.parquet", "out.npy", batch=batch, reduce="mean", force=True)
        found.append(torch.from_numpy(np.load("out.npy")))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-5, atol=1e-6)


def test_a_path_is_loaded_with_its_options(sources: Path, net: WideModel, tmp_path: Path) -> None:
    path = net.__reduce__()[0].args[0]  # type: ignore[attr-defined]
    stages: list[str] = []
    report = widepack.predict(
        path, "in.npy", "out.npy", reduce="std", backend="eager", threads=1, device="cpu",
        progress=lambda stage, done, total: stages.append(stage),
    )  # fmt: skip
    assert report.digest == net.manifest.digest
    assert set(stages) == {"load", "predict"}
    assert report.to_json()["rows"] == ROWS and report.rows_per_s > 0


def test_dependent_rows_run_only_on_request(folder: Path, centered: WideModel) -> None:
    x = torch.randn(10, 6)
    np.save("in.npy", x.numpy())
    some: list[dict[str, Any]] = [{}, {"allow_dependent_rows": True}, {"batch": 5}]
    for more in some:
        with pytest.raises(widepack.UsageError, match="the split into batches may change the answers") as e:
            widepack.predict(centered, "in.npy", "out.npy", **more)
        assert "mean" in str(e.value) and len(str(e.value).splitlines()) <= 5
    with pytest.raises(widepack.UsageError, match="cannot be routed"):
        save_file({"x": x, "m": torch.zeros(10, dtype=torch.int64)}, "in.safetensors")
        widepack.predict(
            centered, "in.safetensors", "out.npy", member="m", batch=5, allow_dependent_rows=True
        )
    assert not Path("out.npy").exists()
    widepack.predict(centered, "in.npy", "out.npy", batch=5, allow_dependent_rows=True)
    found = torch.from_numpy(np.load("out.npy")).movedim(1, 0)
    expected = torch.cat([centered(x[:5]), centered(x[5:])], 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
