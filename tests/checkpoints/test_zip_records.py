"""Tests that zip files with compressed, short or too large records are read correctly or refused."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest
import torch
from torch import nn

from checkpoints.refusals import refusal as refused
from widepack.checkpoints import zip_records
from widepack.checkpoints.discovery import open_checkpoint
from widepack.errors import CheckpointError

NAMES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
NAMES += ["complex64", "complex128"]
STATE = {"weight": torch.arange(64.0).reshape(8, 8), "bias": torch.full((3,), 2, dtype=torch.int16)}


def rewritten(
    path: Path,
    change: Callable[[str, bytes], bytes] = lambda _, data: data,
    compression: int = zipfile.ZIP_DEFLATED,
    only: str = "",
) -> Path:
    """Writes the file at `path` again. Changes or compresses the records whose names end with `only`."""
    target = path.with_stem("again")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as archive:
        for name in source.namelist():
            chosen = compression if name.endswith(only) else zipfile.ZIP_STORED
            archive.writestr(name, change(name, source.read(name)), chosen)
    return target


def refusal(path: Path) -> str:
    start = perf_counter()
    text = refused(path)
    assert perf_counter() - start < 5
    assert len(text) < 500
    return text


@pytest.mark.parametrize("only", ["", "data.pkl", "/data/0", "/data/1", "byteorder"])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("trust", [False, True])
def test_records_that_were_compressed_again_are_read_right(
    tmp_path: Path, only: str, compression: int, trust: bool
) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    path = rewritten(tmp_path / "a.pt", compression=compression, only=only)
    found = open_checkpoint(path, trust_pickle=trust)
    assert all(torch.equal(found.get(name), value) for name, value in STATE.items())


def test_a_module_in_compressed_records(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    torch.save(model, tmp_path / "a.pt")
    found = open_checkpoint(rewritten(tmp_path / "a.pt"), trust_pickle=True)
    assert torch.equal(found.get("weight"), model.weight)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("record", ["/data/0", "/data/1"])
def test_a_record_that_is_shorter_than_its_tensor(
    tmp_path: Path, compression: int, trust: bool, record: str
) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    path = rewritten(
        tmp_path / "a.pt", lambda name, data: data[:4] if name.endswith(record) else data, compression
    )
    with pytest.raises(CheckpointError, match=r"needs (256|6) bytes, its record data/[01] has 4; copy or"):
        open_checkpoint(path, trust_pickle=trust)


def test_other_compressions_and_encrypted_records(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    assert "which torch.load does not read" in refusal(
        rewritten(tmp_path / "a.pt", compression=zipfile.ZIP_BZIP2)
    )
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "a.pt").write_bytes(bytes(data))
    assert "has the encrypted record" in refusal(tmp_path / "a.pt")


def zeros(path: Path, name: str, megabytes: int) -> None:
    """Adds a compressed record of zeros."""
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open(name, "w", force_zip64=True) as file,
    ):
        for _ in range(megabytes):
            file.write(bytes(1 << 20))


def test_weights_that_are_a_zip_bomb(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    zeros(tmp_path / "a.pt", "a/data/9", 300)
    assert "has compressed records of 3145" in refusal(tmp_path / "a.pt")


def test_a_pickle_that_is_a_zip_bomb(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    path = rewritten(tmp_path / "a.pt", lambda n, d: bytes(40 << 20) if n.endswith("data.pkl") else d)
    assert "has a record that is too large: a/data.pkl has 41943040 bytes" in refusal(path)


def test_a_pickle_of_many_opcodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zip_records, "_MOST_OPCODES", 1000)
    torch.save({"state_dict": STATE, "history": list(range(2000))}, tmp_path / "a.pt")
    assert "has a pickle of more than 1000 opcodes" in refusal(tmp_path / "a.pt")


def test_a_number_that_is_expanded_to_gigabytes(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(1 << 20, 1 << 20)}, tmp_path / "a.pt")
    assert "has tensors of 4398046511104 bytes by their shapes" in refusal(tmp_path / "a.pt")
    torch.save({"w": torch.zeros(1).expand(1000, 1000)}, tmp_path / "a.pt")
    assert open_checkpoint(tmp_path / "a.pt").get("w").shape == (1000, 1000)


def test_storages_of_every_class_are_known(tmp_path: Path) -> None:
    dtypes = [
        getattr(torch, name)
        for name in (*NAMES, "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64")
    ]
    state = {str(dtype): torch.zeros(5, 3).to(dtype) for dtype in dtypes}
    for protocol in (2, 4):
        torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol)
        with zipfile.ZipFile(tmp_path / "a.pt") as archive:
            found = list(zip_records.storages_of(archive.read("a/data.pkl")))
            assert {s.record: s.bytes for s in found} == {
                entry.filename.rpartition("/")[2]: entry.file_size
                for entry in archive.infolist()
                if entry.filename.startswith("a/data/")
            }
        assert len(found) == len(state)
