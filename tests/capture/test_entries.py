"""Tests entries: several methods of a module, built as programs over one set of weights; and refusals."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from loaded import files_of
from small_builds import QUICK
from support import Bound, double, fresh, must
from torch import Tensor, nn

import widepack
from widepack import build, load
from widepack.errors import CaptureError, InputError, UsageError
from widepack.inference.model import WideModel
from widepack_artifacts.reader import Reader
from widepack_bench import bench
from widepack_cli.main import cli

MEMBERS = 3


class Auto(nn.Module):
    """An autoencoder. Both methods read `trunk`, one reads `down`, one reads `up`; `decode` tests a size."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.trunk = nn.Linear(8, 8)
            self.down = nn.Linear(8, 4)
            self.up = nn.Linear(4, 8)
            self.register_buffer("scale", torch.rand(8) + 0.5)
            self.register_buffer("shift", torch.randn(4), persistent=False)
        self.offsets = [torch.full((4,), float(seed))]

    def encode(self, x: Tensor, gain: float = 1.0) -> dict[str, Tensor]:  # [B, 8]
        z = self.down(torch.relu(self.trunk(x * self.scale))) * gain + self.shift
        return {"z": z + torch.tensor([1.0, 2.0, 3.0, 4.0]), "norm": z.norm(dim=-1)}

    def decode(self, z: Tensor, bias: Tensor | None = None) -> Tensor:  # [B, T, 4]
        if z.shape[1] % 2:
            z = z + self.offsets[0]
        y = torch.tanh(self.trunk(self.up(z + torch.tensor([4.0, 3.0, 2.0, 1.0]))))
        return y if bias is None else y + bias

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)["z"][:, None])[:, 0]

    def score(self, x: Tensor) -> Tensor:
        """Calls the module, as a method of a user may."""
        return (self(x) - x).square().mean(-1)

    @property
    def width(self) -> int:
        return 8


def members() -> list[Auto]:
    return [Auto(i).eval() for i in range(MEMBERS)]


def save(folder: Path) -> list[str]:
    return [str(path) for path in files_of(folder, [dict(m.state_dict()) for m in members()])]


def make(state_dict: Mapping[str, Tensor]) -> Auto:
    """Returns a member with the unsaved buffers and lists that belong to its weights."""
    for member in members():
        if torch.equal(member.get_buffer("scale"), state_dict["scale"]):
            return member
    raise AssertionError("no such member")


SPECS = ["encode:x=float32[B,8]", "decode:z=float32[B,T,4]"]
ENTRIES = ("encode", "decode")


def quick(folder: Path, name: str = "e.wide", paths: list[str] | None = None, **how: Any) -> Path:
    """Builds all entries, or what `how` says, for a CPU."""
    given = {
        "model": make,
        "entries": ENTRIES,
        **({} if "sample" in how else {"inputs": SPECS}),
        **QUICK,
        **how,
    }
    build(paths or save(folder), folder / name, **given)
    return folder / name


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("entries")
    build(save(folder), folder / "e.wide", model=make, inputs=SPECS, entries=ENTRIES)
    return folder / "e.wide"


@pytest.fixture(scope="module")
def ens(artifact: Path) -> WideModel:
    return load(artifact)


def inputs(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 8, generator=g), torch.randn(batch, 6, 4, generator=g)


def leaves(value: Any) -> list[Tensor]:
    return list(value.values()) if isinstance(value, Mapping) else [value]


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("pattern", ["shared", "each"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_gives_the_answers_of_each_member(entry: str, pattern: str, ens: WideModel) -> None:
    bounds: list[Bound] = []
    which = ENTRIES.index(entry)
    for batch in (1, 2, 7, 33):
        given = [inputs(batch, 10 + (i if pattern == "each" else 0))[which] for i in range(MEMBERS)]
        run = ens.entry(entry)
        wide = leaves(run.each(torch.stack(given)) if pattern == "each" else run(given[0]))
        bounds = bounds or [Bound() for _ in wide]
        for i, member in enumerate(members()):
            with torch.no_grad():
                alone = leaves(getattr(member, entry)(given[i]))
                raised = copy.deepcopy(member).double()
                raised.offsets = [o.double() for o in raised.offsets]
                truth = leaves(getattr(raised, entry)(double(given[i])))
            for bound, w, o, t in zip(bounds, wide, alone, truth, strict=True):
                bound.add(w[i], o, t)
    for bound in bounds:
        bound.check()


def test_weights_are_one_table(artifact: Path, ens: WideModel) -> None:
    manifest = Reader(artifact).manifest
    names = [w.name for w in manifest.weights]
    assert len(set(names)) == len(names)
    assert {"trunk.weight", "down.weight", "up.weight", "scale", "shift"} <= set(names)
    literals = [n for n in names if "lifted_tensor" in n]
    assert len(literals) == 2, "the two entries do not have separate literals"
    reads = {
        e: {s.source for s in Reader(artifact).program(manifest.entries[e].member[0]).weights}
        for e in ENTRIES
    }
    assert "trunk.weight" in reads["encode"] & reads["decode"]
    assert "down.weight" not in reads["decode"]
    assert "up.weight" not in reads["encode"]
    assert manifest.version == (1, 2)
    assert sum(n.startswith("weights-") for n in manifest.files) == 1
    for i, member in enumerate(members()):
        want = member.state_dict()
        assert set(ens.state_dict(i)) == set(want)
        assert all(torch.equal(v, want[k]) for k, v in ens.state_dict(i).items())


def test_names_of_files(artifact: Path) -> None:
    stems = {n.rpartition("-")[0] for n in Reader(artifact).manifest.files}
    for entry in ENTRIES:
        assert {
            f"programs/member.{entry}",
            f"programs/cpu.{entry}.shared",
            f"programs/cuda.{entry}.each",
            f"programs/{entry}.shared",
        } <= stems


def test_a_model_without_forward_names_its_entries(ens: WideModel) -> None:
    assert ens.entries == ("decode", "encode")
    assert "entries decode, encode" in repr(ens)
    for call in (
        lambda: ens(torch.zeros(2, 8)),
        lambda: ens.plan,
        lambda: ens.member(0),
        lambda: ens.mean(torch.zeros(2, 8)),
    ):
        with pytest.raises(
            UsageError, match=r"no entry forward; its entries are decode, encode.*ens\.decode\(\.\.\.\)"
        ):
            call()
    with pytest.raises(UsageError, match="no entry 'forward'; the entries are decode, encode"):
        ens.entry("forward")
    with pytest.raises(AttributeError, match=r"no attribute 'enocde'; its entries are decode, encode"):
        ens.enocde  # noqa: B018


def test_entries_are_called_as_methods_are(ens: WideModel) -> None:
    x, z = inputs(4)
    assert ens.encode(x)["z"].shape == (MEMBERS, 4, 4)
    assert torch.equal(ens.encode(x=x)["norm"], ens.entry("encode")(x)["norm"])
    assert ens.decode.each([z] * MEMBERS).shape == (MEMBERS, 4, 6, 8)
    mixed = ens.decode(widepack.each(z.expand(MEMBERS, 4, 6, 4)))
    assert torch.equal(mixed, ens.decode.each(z.expand(MEMBERS, 4, 6, 4)))
    for i, member in enumerate(members()):
        with torch.no_grad():
            torch.testing.assert_close(
                ens.encode.member(i)(x)["z"], member.encode(x)["z"], rtol=1e-5, atol=1e-6
            )
            torch.testing.assert_close(ens.decode.member(f"m{i}")(z), member.decode(z), rtol=1e-5, atol=1e-6)
    assert ens.decode.plan.pattern == "shared"
    assert len(ens.decode) == MEMBERS
    assert "WideEntry(decode of 3 members" in repr(ens.decode)


def test_each_entry_keeps_its_conditions(ens: WideModel) -> None:
    ens.decode(torch.zeros(2, 4, 4))
    with pytest.raises(InputError, match="captured under the condition T % 2 == 0"):
        ens.decode(torch.zeros(2, 5, 4))
    with pytest.raises(InputError, match="the model was built without 'bias'"):
        ens.decode(torch.zeros(2, 4, 4), bias=torch.zeros(8))
    with pytest.raises(InputError, match="x has 7 at axis 1"):
        ens.encode(torch.zeros(2, 7))
    with pytest.raises(InputError, match="was built with 1.0 there"):
        ens.encode(torch.zeros(2, 8), gain=2.0)


@pytest.mark.extended
def test_a_fresh_process_without_the_model(artifact: Path, ens: WideModel, tmp_path: Path) -> None:
    x, z = inputs(5, 3)
    torch.save((x, z), tmp_path / "in.pt")
    must(
        fresh(
            "import sys, torch, widepack\n"
            "ens = widepack.load(sys.argv[1])\n"
            "x, z = torch.load(sys.argv[2] + '/in.pt')\n"
            "assert 'test_entries' not in sys.modules\n"
            "torch.save((ens.encode(x), ens.decode.each(z.expand(3, *z.shape))), sys.argv[2] + '/out.pt')",
            artifact,
            tmp_path,
        )
    )
    encoded, decoded = torch.load(tmp_path / "out.pt")
    assert torch.equal(encoded["z"], ens.encode(x)["z"])
    assert torch.equal(decoded, ens.decode.each(z.expand(MEMBERS, *z.shape)))


def test_without_widepack(artifact: Path, ens: WideModel) -> None:
    manifest = Reader(artifact).manifest
    from safetensors.torch import load_file

    weights = load_file(artifact / next(n for n in manifest.files if n.startswith("weights-")))
    x, z = inputs(3)
    for entry, given in zip(ENTRIES, (x, z)):
        exported = torch.export.load(artifact / manifest.entries[entry].pt2["shared"])
        exported.state_dict.update({name: weights[name] for name in exported.state_dict})
        with torch.no_grad():
            found = exported.module()(given)
        for a, b in zip(leaves(found), leaves(ens.entry(entry)(given)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_probes_are_of_every_entry(
    artifact: Path, ens: WideModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from widepack.verification import probe

    seen: list[str] = []
    check = probe.check

    def noted(tensors: Any, at: str, *rest: Any) -> None:
        seen.append(at)
        check(tensors, at, *rest)

    monkeypatch.setattr(probe, "check", noted)
    ens.probe()
    assert {"encode.shared", "encode.each", "decode.shared", "decode.each"} <= set(seen)
    seen.clear()
    some = load(artifact, members=[2, 0], warmup=False)
    some.probe()
    assert {"encode.shared", "decode.each"} <= set(seen)
    x, _ = inputs(2)
    torch.testing.assert_close(some.encode(x)["z"][0], ens.encode(x)["z"][2], rtol=1e-5, atol=1e-6)


@pytest.mark.extended
def test_members_do_not_leak_in_any_entry(tmp_path: Path) -> None:
    paths = save(tmp_path)
    state = torch.load(paths[1])
    torch.save(
        {k: v if k == "scale" else torch.full_like(v, float("nan")) for k, v in state.items()}, paths[1]
    )
    quick(tmp_path, "nan.wide", paths)
    a, b = load(tmp_path / "nan.wide", strategies="wide"), load(quick(tmp_path), strategies="wide")
    x, z = inputs(4)
    for i in (0, 2):
        assert torch.equal(a.encode(x)["z"][i], b.encode(x)["z"][i])
        assert torch.equal(a.decode(z)[i], b.decode(z)[i])
    assert a.decode(z)[1].isnan().all()


@pytest.mark.extended
def test_forward_among_others(tmp_path: Path) -> None:
    specs = {"forward": ["x=float32[B,8]"], "score": ["x=float32[B,8]", "B=2..9"]}
    ens = load(quick(tmp_path, entries=["forward", "score"], inputs=specs))
    x, _ = inputs(4)
    with torch.no_grad():
        want = torch.stack([m(x) for m in members()])
        torch.testing.assert_close(ens(x), want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ens.forward(x), want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            ens.score(x), torch.stack([m.score(x) for m in members()]), rtol=1e-5, atol=1e-6
        )
    assert ens(torch.zeros(11, 8)).shape == (MEMBERS, 11, 8)
    with pytest.raises(InputError, match="B = 11 .* 2 <= B <= 9"):
        ens.score(torch.zeros(11, 8))
    assert ens.plan.pattern == "shared"
    assert set(Reader(tmp_path / "e.wide").manifest.verification) > {"wide", "entries"}


@pytest.mark.extended
def test_samples_by_entry(tmp_path: Path) -> None:
    x, z = inputs(4)
    quick(
        tmp_path,
        sample={"encode": (x,), "decode": z},
        sample_kwargs={"decode": {"bias": torch.ones(8)}},
        dynamic={"encode": {"x": {0: "N"}}, "decode": {"z": {0: "N", 1: "T"}}},
    )
    entries = Reader(tmp_path / "e.wide").manifest.entries
    assert entries["encode"].inputs[0].type == "float32[N,8]"
    assert [i.type for i in entries["decode"].inputs] == ["float32[N,T,4]", "float32[8]"]
    one = quick(tmp_path, "one.wide", entries=["encode"], sample={"encode": (x,)})
    assert load(one).encode(x)["norm"].shape == (MEMBERS, 4)


# Refusals


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"entries": ["encode", "decod"], "inputs": ["x=float32[B,8]"]},
            UsageError,
            "decod ... did you mean decode? ... forward, decode, encode, score",
        ),
        (
            {"entries": ["width"], "inputs": ["x=float32[B,8]"]},
            UsageError,
            "width ... no public method ... forward, decode, encode, score",
        ),
        ({"entries": ["trunk"], "inputs": ["x=float32[B,8]"]}, UsageError, "trunk ... no public method"),
        ({"entries": ["eval"], "inputs": ["x=float32[B,8]"]}, UsageError, "eval ... no public method"),
        ({"entries": ["mean"]}, UsageError, "mean ... a loaded model itself has 'mean' ... another name"),
        ({"entries": ["each"]}, UsageError, "a loaded model itself has 'each'"),
        ({"entries": ["encode", "encode"]}, UsageError, "encode is given twice"),
        ({"entries": ["en code"]}, UsageError, "'en code' is not the name of a method"),
        ({"entries": []}, UsageError, "entries is empty"),
        ({"inputs": ["enc:x=float32[B,8]"]}, UsageError, "no entry is called 'enc' ... encode, decode ... ^"),
        (
            {"inputs": ["encode:x=float32[B,8]"]},
            CaptureError,
            "decode ... does not take the inputs (none) ... decode:z=...",
        ),
        (
            {"inputs": ["x=float32[B,8]"]},
            CaptureError,
            "Auto.decode ... does not take the inputs x ... decode:z=...",
        ),
        ({"inputs": [*SPECS, "decode:B=2..9", "encode:T=2..9"]}, UsageError, "no input has the dim T ... ^"),
        ({"inputs": [*SPECS, "Q=2..9"]}, UsageError, "no input has the dim Q ... ^"),
        (
            {"inputs": {"encode": SPECS[:1], "deocde": SPECS[1:]}},
            UsageError,
            "the entry 'deocde' ... encode, decode",
        ),
        (
            {"inputs": None, "sample": (torch.zeros(2, 8),)},
            UsageError,
            "sample is a tuple ... encode, decode",
        ),
        (
            {"inputs": None, "sample": {"encode": (torch.zeros(2, 8),)}},
            UsageError,
            "each input of decode ... decode:x=",
        ),
        ({"inputs": None, "sample": {"z": 1}}, UsageError, "sample is a dict with the keys z"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    paths = save(tmp_path)
    with pytest.raises(error) as caught:
        build(paths, tmp_path / "e.wide", **{"model": make, "inputs": SPECS, "entries": ENTRIES, **change})
    assert not (tmp_path / "e.wide").exists()
    for word in words.split(" ... "):
        assert word in str(caught.value), caught.value


@pytest.mark.extended
def test_bounds_without_an_entry_apply_to_every_entry_with_the_dim(tmp_path: Path) -> None:
    entries = Reader(quick(tmp_path, inputs=[*SPECS, "T=2..8", "B=1..64"])).manifest.entries
    found = {name: {d: dim.max for d, dim in entry.dims.items()} for name, entry in entries.items()}
    assert found == {"encode": {"B": 64}, "decode": {"B": 64, "T": 8}}


class Differs(Auto):
    """A module with a method whose answers depend on a Python number that differs between members."""

    def encode(self, x: Tensor, gain: float = 1.0) -> dict[str, Tensor]:
        return {"z": self.down(x) * float(self.offsets[0][0])}


@pytest.mark.extended
def test_a_wrong_entry_is_caught_and_nothing_is_written(tmp_path: Path) -> None:
    def differs(state_dict: Mapping[str, Tensor]) -> Auto:
        member = make(state_dict)
        member.__class__ = Differs
        return member

    with pytest.raises(widepack.WidepackError):
        build(save(tmp_path), tmp_path / "e.wide", model=differs, inputs=SPECS, entries=ENTRIES)
    assert not (tmp_path / "e.wide").exists()


# The command line


def cli_run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(w) for w in words])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "net.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_entries import make\n"
    )
    words = ["build", *save(folder), "-o", f"{folder}/e.wide", "--model", f"{folder}/net.py:make", "--no-pt2"]
    done = cli_run(
        *words, *(w for e in ENTRIES for w in ("--entry", e)), *(w for s in SPECS for w in ("--input", s))
    )
    assert done.exit_code == 0, done.output
    assert "plan         encode, " in done.output
    assert "plan         decode, " in done.output
    return folder


@pytest.mark.extended
def test_inspect_and_trace(built: Path) -> None:
    shown = cli_run("inspect", built / "e.wide").output
    assert "entry encode" in shown
    assert "entry decode" in shown
    assert "guard   T % 2 == 0" in shown
    assert "encode z" in shown, "the verification is not shown for each entry"
    first = cli_run("trace", built / "e.wide", "--json")
    assert json.loads(first.output)["entry"] == "decode"
    second = cli_run("trace", built / "e.wide", "--entry", "encode", "--json")
    assert {s["node"] for s in json.loads(second.output)["steps"]} != {
        s["node"] for s in json.loads(first.output)["steps"]
    }
    wrong = cli_run("trace", built / "e.wide", "--entry", "forward")
    assert wrong.exit_code == 2
    assert "there is no entry 'forward'; the entries of this artifact are decode, encode" in wrong.output


@pytest.mark.extended
def test_verify(built: Path) -> None:
    done = cli_run(
        "verify",
        built / "e.wide",
        *(str(built / f"m{i}.pt") for i in range(MEMBERS)),
        "--model",
        f"{built}/net.py:make",
    )
    assert done.exit_code == 0, done.output
    assert "entries decode, encode" in done.output
    one = cli_run("verify", built / "e.wide", "--entry", "decode", "--model", f"{built}/net.py:make")
    assert one.exit_code == 0, one.output
    assert "entry decode" in one.output
    assert cli_run("verify", built / "e.wide", "--entry", "forward").exit_code == 2


@pytest.mark.extended
def test_bench(built: Path) -> None:
    how: Any = {"batches": (2,), "baselines": ("loop",), "budget_s": 0.2, "threads": 1}
    report = bench(built / "e.wide", entry="encode", **how)
    assert (report.entry, report.rows[0].sizes["B"]) == ("encode", 2)
    assert bench(built / "e.wide", factory=make, **how).entry == "decode"
    with pytest.raises(UsageError, match="no entry 'forward'; the entries are decode, encode"):
        bench(built / "e.wide", batches=(2,), entry="forward")


@pytest.mark.extended
def test_a_toml_names_the_entries(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = save(tmp_path)
    rows = [f'model = "{built}/net.py:make"', f"input = {json.dumps(SPECS)}", 'entry = ["encode", "decode"]']
    (tmp_path / "widepack.toml").write_text("\n".join(rows))
    done = cli_run("build", *paths, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert set(json.loads(done.stdout)["entries"]) == set(ENTRIES)
