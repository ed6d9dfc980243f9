"""Tests how checkpoints are opened: files that are read, errors of refused files, and members' names."""

import argparse
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from checkpoints.refusals import refusal
from widepack.checkpoints import torch_file
from widepack.checkpoints.discovery import listed, member_names, open_all, open_checkpoint, places_of
from widepack.checkpoints.state_dict import TensorInfo
from widepack.errors import CheckpointError, UsageError


class Evil:
    """Runs code when pickle loads it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("evil-was-here",)


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


STATE = dict(linear().state_dict())
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64"]
DTYPES = [getattr(torch, name) for name in (*FLOATS, "bool", "uint8", "int8", "int32", "int64")]


@pytest.mark.parametrize("form", ["zip", "legacy", "safetensors"])
@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "no suffix"])
def test_the_format_of_a_file_is_found_from_its_content(tmp_path: Path, form: str, name: str) -> None:
    path = tmp_path / name
    if form == "safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, _use_new_zipfile_serialization=form == "zip")
    found = open_checkpoint(path)
    assert found.tensors() == {"weight": TensorInfo("float32", (2, 3)), "bias": TensorInfo("float32", (2,))}
    assert all(torch.equal(found.get(k), v) for k, v in STATE.items())
    assert found.bytes == path.stat().st_size
    assert found.sha256() == sha256(path.read_bytes()).hexdigest()
    assert found.path == str(path)


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_every_dtype_and_shape_keeps_its_bits(tmp_path: Path, save: Callable[..., None]) -> None:
    drawn = torch.randint(0, 2, (2, 3), generator=torch.Generator().manual_seed(1))
    state = {str(d).removeprefix("torch."): drawn.to(d) for d in DTYPES}
    state |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    save(state, tmp_path / "a.pt")
    found = open_checkpoint(tmp_path / "a.pt")
    assert (
        found.tensors()
        == {k: TensorInfo(str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in state.items()}
        or save is save_file
    )
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == state[name].dtype
        assert tensor.shape == state[name].shape
        assert (
            tensor.reshape(-1).view(torch.uint8).tolist()
            == state[name].reshape(-1).view(torch.uint8).tolist()
        )


def test_parameters_views_and_conjugates_are_read(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "parameter": nn.Parameter(base.clone()),
        "transposed": base.T,
        "part": base[1],
        "conj": torch.tensor([1 + 2j]).conj(),
    }
    torch.save(state, tmp_path / "a.pt")
    found = open_checkpoint(tmp_path / "a.pt").state_dict()
    assert all(
        torch.equal(found[k], v) and type(found[k]) is torch.Tensor and not found[k].requires_grad
        for k, v in state.items()
    )


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_weights_are_mapped_not_read(tmp_path: Path, save: Callable[..., None]) -> None:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    save({"w": torch.ones(16 << 20), "v": torch.ones(16 << 20)}, tmp_path / "a.pt")

    def anonymous_kib() -> int:
        return int(status.read_text().split("RssAnon:")[1].split()[0])

    before = anonymous_kib()
    found = open_checkpoint(tmp_path / "a.pt")
    assert float(found.mapped_state_dict()["w"][-1]) == 1.0
    assert torch.equal(found.first_numbers("w"), torch.ones(1024))
    assert found.sha256()
    assert anonymous_kib() - before < 16 << 10  # of 128 MiB
    tensor = found.get("w")
    assert float(tensor[-1]) == 1.0
    assert anonymous_kib() - before < 80 << 10  # the copy of one weight, which is released
    del tensor
    assert anonymous_kib() - before < 16 << 10


def test_a_state_dict_is_found_in_a_training_checkpoint(tmp_path: Path) -> None:
    model = linear()
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    path = tmp_path / "a.pt"
    for key in ("state_dict", "model"):
        torch.save(
            {"epoch": 3, key: model.state_dict(), "optimizer": adam.state_dict(), "best": torch.tensor(0.5)},
            path,
        )
        assert set(open_checkpoint(path).tensors()) == {"weight", "bias"}
    torch.save({"net": model.state_dict(), "epoch": 3}, path)
    assert "Dicts of tensors in it: net (2 tensors); name one, for example --key net" in refusal(path)
    assert set(open_checkpoint(path, "net").tensors()) == {"weight", "bias"}
    torch.save({"model": model.state_dict(), "ema": {"deep.er": {"w": model.state_dict()}}}, path)
    assert "Dicts of tensors in it: model (2 tensors), ema.deep.er.w (2 tensors)" in refusal(path)
    assert set(open_checkpoint(path, "ema.deep.er.w").tensors()) == {"weight", "bias"}
    assert "has no 'emma'. Dicts of tensors in it" in refusal(path, "emma")
    assert "'ema' is a dict ('deep.er' is dict), not a dict of tensors" in refusal(path, "ema")
    torch.save({"model": model.state_dict(), "epoch": 3}, path)
    assert "'epoch' is an int, not a dict of tensors" in refusal(path, "epoch")
    torch.save({"model": {**model.state_dict(), "extra": [3]}}, path)
    assert "'model' is a dict ('extra' is list)" in refusal(path, "model")


def test_an_unknown_key_of_safetensors_is_refused(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    assert "has no dicts, and no name in it begins with 'ema.', so the key 'ema' names nothing" in refusal(
        tmp_path / "a.safetensors", "ema"
    )


def test_a_prefix_of_all_names_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({f"module._orig_mod.{k}": v for k, v in STATE.items()}, path)
    found = open_checkpoint(path)
    assert set(found.tensors()) == {"weight", "bias"}
    assert torch.equal(found.get("bias"), STATE["bias"])
    assert torch.equal(found.unstripped().get("module._orig_mod.bias"), STATE["bias"])
    save_file({"module.a": STATE["bias"], "other.a": STATE["weight"]}, path)
    assert set(open_checkpoint(path).tensors()) == {"module.a", "other.a"}
    save_file({"module.": STATE["bias"]}, path)
    assert set(open_checkpoint(path).tensors()) == {"module."}
    with pytest.raises(KeyError):
        open_checkpoint(path).get("weight")


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def torchscript(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.* is deprecated")
        torch.jit.trace(linear().eval(), torch.zeros(1, 3)).save(str(path))  # type: ignore[no-untyped-call]


def npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, a=np.array(["x"]))


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("notes.txt", "hello")


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps(STATE))


BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: None, "there is no such file"),
    (lambda p: p.mkdir(), "is a folder, and it has no weights: no .safetensors"),
    (lambda p: os.mkfifo(p), "is not a plain file"),
    (lambda p: write(p, b""), "is empty (0 bytes)"),
    (lambda p: write(p, b"epoch,loss\n1,0.5\n" * 9), "is a text file (it starts with 'epoch,loss 1,0.5"),
    (lambda p: write(p, "größe: 3".encode()), "is a text file (it starts with 'größe: 3')"),
    (lambda p: write(p, b"8 chars {not safetensors}"), "is a text file"),
    (lambda p: write(p, b"version https://git-lfs.github.com/spec/v1\noid"), "is a Git LFS pointer"),
    (lambda p: write(p, b"<!doctype html><html>"), "is a web page"),
    (lambda p: write(p, b"\x1f\x8b\x08" + b"\0" * 40), "is gzip-compressed"),
    (lambda p: write(p, b"\x89HDF\r\n\x1a\n" + b"\0" * 40), "is an HDF5 file"),
    (
        lambda p: write(p, b"\0" * 1000),
        "is neither a file of torch.save nor safetensors; it starts with the bytes 00 00",
    ),
    (lambda p: write(p, b"\x80"), "is truncated"),
    (npz, "which torch does not have"),
    (zipped, "is a zip file, but not one of torch.save"),
    (torchscript, "is a TorchScript archive, which contains code"),
    (
        pickled,
        "is a plain pickle, which can run code when it is loaded; save the weights "
        "alone: torch.save(model.state_dict(), path)",
    ),
    (
        lambda p: torch.save(linear(), p),
        "has a pickled torch.nn.modules.linear.Linear, and loading it can run code; save the weights alone",
    ),
    (
        lambda p: torch.save(linear(), p, _use_new_zipfile_serialization=False),
        "has a pickled torch.nn.modules.linear.Linear",
    ),
    (lambda p: torch.save(argparse.Namespace(a=1), p), "has a pickled argparse.Namespace"),
    (
        lambda p: torch.save({"model": linear()}, p),
        "has no dict of tensors: it has model (torch.nn.modules.linear.Linear)",
    ),
    (lambda p: torch.save({**STATE, "x": Evil()}, p), "has a pickled posix.mkdir"),
    (lambda p: torch.save(torch.zeros(3), p), "has a single tensor, [3] float32, not a state dict"),
    (lambda p: torch.save([1, 2], p), "has a list, not a state dict"),
    (lambda p: torch.save({}, p), "has an empty dict, no tensors"),
    (lambda p: torch.save({"epoch": 3}, p), "has no dict of tensors: it has epoch (int)"),
    (
        lambda p: torch.save({**{f"w{i}": torch.zeros(1) for i in range(9)}, "classes": ["a"]}, p),
        "has no dict of tensors: it has classes (list), w0 (Tensor)",
    ),
    (
        lambda p: torch.save({"model": {"w": np.zeros(2, np.float32)}, "author": "x"}, p),
        "; or give --trust-pickle if you trust the origin of the file",
    ),
    (lambda p: save_file({}, p), "has no tensors"),
    (
        lambda p: torch.save({"a": torch.eye(3).to_sparse()}, p),
        "a is a sparse tensor (layout torch.sparse_coo), and widepack stacks dense tensors only",
    ),
    (lambda p: torch.save({"a": torch.zeros(3, device="meta")}, p), "a is on the device meta"),
]


@pytest.mark.parametrize(("make", "words"), BAD, ids=[words[:40] for _, words in BAD])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_files_that_are_not_checkpoints_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a.pt")
    assert words in refusal(tmp_path / "a.pt")
    assert not (tmp_path / "evil-was-here").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    torch.save(STATE, folder / "zip")
    torch.save(STATE, folder / "legacy", _use_new_zipfile_serialization=False)
    save_file(STATE, folder / "safetensors")
    return {form: (folder / form).read_bytes() for form in ("zip", "legacy", "safetensors")}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["zip", "legacy", "safetensors"]), st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(
    whole: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, form: str, part: float
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.pt"
    path.write_bytes(whole[form][: int(part * len(whole[form]))])
    words = refusal(path)
    assert "truncated" in words or len(path.read_bytes()) < 32, words


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["zip", "legacy", "safetensors"]),
    st.integers(0, 10**6),
    st.binary(min_size=1, max_size=8),
)
def test_a_file_overwritten_anywhere_is_read_or_refused(
    whole: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory, form: str, at: int, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("hurt") / "a.pt"
    at %= len(whole[form])
    path.write_bytes((whole[form][:at] + data + whole[form][at + len(data) :])[: len(whole[form])])
    try:
        found = open_checkpoint(path)
        assert all(tuple(found.get(k).shape) == info.shape for k, info in found.tensors().items())
    except CheckpointError as error:
        assert "\n" not in str(error)


def test_one_error_names_all_bad_checkpoints(tmp_path: Path) -> None:
    good, text, gone = tmp_path / "good.pt", tmp_path / "text.pt", tmp_path / "gone.pt"
    torch.save(STATE, good)
    text.write_text("hello")
    with pytest.raises(CheckpointError) as caught:
        open_all(places_of([str(gone), str(good), str(text)]))
    assert str(caught.value).split("\n") == [
        "2 of 3 checkpoints cannot be used:",
        f"- checkpoint 0 ({gone}): there is no such file",
        f"- checkpoint 2 ({text}): is a text file (it starts with 'hello'), not a file of "
        "torch.save or safetensors",
    ]
    with pytest.raises(CheckpointError, match=r"^checkpoint 1 \(.*gone.pt\): there is no such file$"):
        open_all(places_of([str(good), str(gone)]))
    assert [c.path for c in open_all(places_of([str(good)] * 2))] == [str(good)] * 2


def test_no_checkpoints() -> None:
    with pytest.raises(UsageError, match="no checkpoints: name the files"):
        listed([])
    with pytest.raises(UsageError, match="must be a list of paths, not the one path 'a.pt'"):
        listed("a.pt")


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(STATE, path)
    found = open_checkpoint(path)
    torch.save(dict(linear(1).state_dict()), tmp_path / "b.pt")
    (tmp_path / "b.pt").replace(path)
    with pytest.raises(CheckpointError, match="was changed or replaced after it was opened"):
        found.sha256()
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        found.sha256()


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a/best.pt", "runs/b/best.pt"], ["a", "b"]),
        (["ckpts/m0.pt", "ckpts/m1.pt"], ["m0", "m1"]),
        (["m1.pt", "m0.safetensors"], ["m1", "m0"]),
        (["r/a/x/best.pt", "r/b/y/best.pt"], ["x", "y"]),
        (["r/a/f0/b.pt", "r/a/f1/b.pt", "r/b/f0/b.pt"], ["a/f0", "a/f1", "b/f0"]),
        (["a.pt", "s/a.pt", "s/b.pt"], ["a", "s/a", "s/b"]),
        (["m.pt", "m.safetensors"], ["m.pt", "m.safetensors"]),
        (["v1.0", "v1.1"], ["v1.0", "v1.1"]),
        (["m.pt", "./m.pt", "m-2.pt"], ["m", "m-3", "m-2"]),
        (["/r/a/m.pt"], ["m"]),
        ([], []),
    ],
)
def test_names_are_the_shortest_that_tell_members_apart(paths: list[str], names: list[str]) -> None:
    assert member_names(paths) == names


PARTS = st.lists(
    st.sampled_from(["a", "b", "m", "m-2", "best.pt", "m.pt", "m.pth", ".."]), min_size=1, max_size=4
).map("/".join)


@given(st.lists(PARTS, max_size=8))
def test_names_are_unique_and_a_part_of_their_path(paths: list[str]) -> None:
    names = member_names(paths)
    assert len(set(names)) == len(names) == len(paths)
    assert all(names)
    whole = [os.path.abspath(p) for p in paths]
    for path, name in zip(whole, names, strict=True):
        plain = name if name in path else name.rpartition("-")[0]
        assert plain in path
        assert whole.count(path) > 1 or any(other != path for other in whole) or len(whole) == 1


@pytest.mark.parametrize("name", ["a\nb.pt", "tab\t.pt", "\x1b[31m.pt", "\udcff.pt", "\u202egpj.pt"])
def test_a_path_that_no_artifact_can_name_is_refused_before_any_work(name: str) -> None:
    with pytest.raises(UsageError, match="this path has a character that is not text.*rename it"):
        listed([name])
    assert listed(["größe \u00a0 中.pt"])


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The records that were checked are those of the file that torch reads."""
    path, other = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save({"w": torch.ones(3)}, path)
    torch.save({"w": torch.zeros(3)}, other)
    checked = torch_file.can_be_mapped

    def replaced(name: str, size: int) -> bool:
        found = checked(name, size)
        other.replace(path)
        return found

    monkeypatch.setattr(torch_file, "can_be_mapped", replaced)
    assert torch.equal(open_checkpoint(path).state_dict()["w"], torch.ones(3))


def test_versions_of_submodules_without_tensors_stay_under_a_removed_prefix(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Dropout()), nn.BatchNorm1d(2))
    torch.save(nn.ModuleDict({"module": net, "other": nn.ReLU()}).state_dict(), tmp_path / "a.pt")
    found = open_checkpoint(tmp_path / "a.pt")
    state: Any = found.state_dict()
    assert dict(vars(state)["_metadata"]) == dict(vars(net.state_dict())["_metadata"])
