"""Tests runs in processes of their own: a killed run, a full disk, the memory of large files, interrupts."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import fresh, must

import widepack
from widepack.inference.model import WideModel
from widepack.prediction.arrow_files import IpcTable
from widepack.prediction.table import RowBlock
from widepack.prediction.tensor_files import SafetensorsSink, TensorTable, open_npy

RUN = """
import sys, widepack
source, output = sys.argv[2:4]
widepack.predict(sys.argv[1], source, output, batch=4, progress=lambda *now: print(*now, flush=True))
"""


def slow(value: str) -> Any:
    """Returns a parameter that only the long tests try: it is one of many alike."""
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize("output", ["out.parquet", slow("out.npy"), slow("out.safetensors")])
def test_a_killed_run_leaves_no_output(output: str, folder: Path, artifact: str, pa: Any) -> None:
    np.save("in.npy", np.zeros((200_000, 6), "f4"))
    command = [sys.executable, "-c", RUN, artifact, "in.npy", output]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as p:
        assert p.stdout is not None
        for line in p.stdout:
            if line.startswith("predict"):
                break
        p.send_signal(signal.SIGKILL)
        p.stdout.read()
    assert p.returncode == -signal.SIGKILL
    left = set(os.listdir()) - {"in.npy"}
    assert output not in left
    assert all(name.startswith(".widepack-") for name in left)
    np.save("in.npy", np.zeros((10, 6), "f4"))
    widepack.predict(artifact, "in.npy", output)
    assert set(os.listdir()) == {"in.npy", output}


def test_an_interrupt_removes_the_temporary_file(folder: Path, net: WideModel) -> None:
    np.save("in.npy", np.zeros((10_000, 6), "f4"))

    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        widepack.predict(net, "in.npy", "out.npy", progress=stop)
    assert os.listdir() == ["in.npy"]


@pytest.mark.parametrize("output", ["out.parquet", "out.arrow", "out.csv", "out.npy", "out.safetensors"])
def test_a_full_disk_names_the_file(output: str, folder: Path, net: WideModel, pa: Any) -> None:
    """A limit of the size of files stands for a full disk."""
    np.save("in.npy", np.zeros((50_000, 6), "f4"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            widepack.predict(net, "in.npy", output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, output)
    assert os.listdir() == ["in.npy"]


def test_a_disk_that_is_full_when_the_file_gets_its_name(
    folder: Path, net: WideModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may say so only when it writes the file out."""

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    np.save("in.npy", np.zeros((10, 6), "f4"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device: 'out.npy'"):
        widepack.predict(net, "in.npy", "out.npy")
    assert os.listdir() == ["in.npy"]


@pytest.mark.extended
@pytest.mark.parametrize("source", [slow("in.npy"), "in.parquet", slow("in.arrow")])
def test_the_memory_does_not_grow_with_the_file(source: str, folder: Path, artifact: str, pa: Any) -> None:
    """120 MB of numbers in one row group or one record batch take a small part of it."""
    rows = 5_000_000
    if source == "in.npy":
        np.lib.format.open_memmap(source, "w+", "f4", (rows, 6))
    else:
        table = pa.table({f"f{k}": pa.array(np.random.default_rng(k).random(rows, "f4")) for k in range(6)})
        if source == "in.parquet":
            pa.parquet.write_table(table, source, row_group_size=rows)
        else:
            with pa.ipc.new_file(source, table.schema) as file:
                file.write_table(table)
    code = (
        "import sys, widepack\n"
        "def private():\n"
        "    with open('/proc/self/status') as file:\n"
        "        return int(next(l for l in file if l.startswith('RssAnon')).split()[1]) / 1024\n"
        "import pyarrow, pyarrow.parquet, pyarrow.csv\n"
        "ens, most = widepack.load(sys.argv[1]), 0\n"
        "import torch; ens.mean(torch.zeros(4096, 6))\n"
        # the first examination of rows imports torch's symbolic sizes: no part of the file
        "ens.route(torch.zeros(4, 6), member=[0, 1, 1, 0])\n"
        "before, seen = private(), 0\n"
        "class Enough(Exception): pass\n"
        "def look(stage, done, total):\n"
        "    global most, seen\n"
        "    most, seen = max(most, private()), seen + 1\n"
        "    if seen == 60: raise Enough\n"
        "try: widepack.predict(ens, sys.argv[2], 'out.parquet', reduce='mean', batch=4096, progress=look)\n"
        "except Enough: print(most - before)\n"
    )
    assert float(must(fresh(code, artifact, source))) < 60


def test_a_file_with_other_rows_than_it_said(folder: Path) -> None:
    sink = SafetensorsSink(Path("out"), 5, {})
    sink.write({"y": torch.zeros(4, 2)})
    with pytest.raises(widepack.InputError, match="the input file changed"):
        sink.close()


def test_a_file_that_becomes_shorter(folder: Path) -> None:
    np.save("in.npy", np.zeros((1000, 6), "f4"))
    table: TensorTable = open_npy(Path("in.npy"))
    blocks = table.blocks(["array"], {}, 100)
    first: RowBlock = next(blocks)
    assert first.tensor("array").shape == (100, 6)
    os.truncate("in.npy", 10_000)
    with pytest.raises(widepack.InputError, match="in.npy: the file became shorter"):
        list(blocks)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_an_arrow_file_that_becomes_shorter(
    folder: Path, pa: Any, stream: bool, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mapped:
        monkeypatch.setattr("widepack.prediction.arrow_files._MOST_READ", 0)
    columns = {name: np.random.default_rng(0).random(9000) for name in "abc"}
    table = pa.table(columns).combine_chunks()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)("in.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=3000)
    opened = IpcTable(Path("in.arrow"))
    blocks = opened.blocks(["c", "a"], {}, 1000)
    np.testing.assert_array_equal(next(blocks).tensor("a"), columns["a"][:1000])
    np.testing.assert_array_equal(next(blocks).tensor("c"), columns["c"][1000:2000])
    os.truncate("in.arrow", 10_000)
    with pytest.raises(widepack.InputError, match="in.arrow: "):
        for block in blocks:
            block.tensor("a")


def test_an_arrow_file_that_is_replaced_is_read_to_its_end(folder: Path, pa: Any) -> None:
    table = pa.table({"a": np.arange(9.0)})
    with pa.ipc.new_stream("in.arrow", table.schema) as writer:
        writer.write_table(table)
    blocks = IpcTable(Path("in.arrow")).blocks(["a"], {}, 4)
    next(blocks)
    Path("other").write_bytes(b"shorter")
    os.replace("other", "in.arrow")
    assert sum(len(block.tensor("a")) for block in blocks) == 5
