"""Tests the twelve networks on a device: each member's answers in every form, isolation of
members, and the probe.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_stand_in import use_stand_in
from isolating import answers, poisoned, to
from support import Artifacts, Bound, double, fresh, leaves, must, run, stack

import cases
from widepack import VerificationError, load

REFUSED = """
import os, sys
import torch, widepack
ens = widepack.load(sys.argv[1], device=sys.argv[2])
args, kwargs = torch.load(sys.argv[3])
try:
    y = ens(*args, **kwargs)
    torch.cuda.is_available() and torch.cuda.synchronize()
except Exception as error:
    print("refused", type(error).__name__, flush=True)
else:
    print("answered", flush=True)
os._exit(0)  # skips what CUDA does at the end of a process whose context a kernel has ended
"""


FORMS: dict[str, dict[str, Any]] = {
    "eager": {"warmup": False},
    "graph": {"graph": True},
    "compile": {"backend": "compile", "compile": "now", "warmup": False},
}
"""How a model is loaded, by the name of the form."""


@pytest.fixture(autouse=True)
def stand_in(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        use_stand_in(monkeypatch)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which Inductor imports
@pytest.mark.filterwarnings("ignore:.*graph:UserWarning")  # some of the networks draw random numbers
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", cases.NAMES)
def test_members_answer_on_the_device_as_alone(
    name: str, form: str, artifacts: Artifacts, device: str, tmp_path: Path
) -> None:
    case = cases.load(name)
    ens = load(artifacts(name), device=device, cache=tmp_path, verify="off", **FORMS[form])
    assert ens.backend == FORMS[form].get("backend", "eager")
    bounds: dict[int, Bound] = {}
    for batch in (1, 2, 5):
        calls = [case.sample(batch, 1000 * batch + 10 * i) for i in range(case.N)]
        shared = ens(*to(calls[0][0], device), **to(calls[0][1], device))
        each = ens.each(*to(stack([a for a, _ in calls]), device), **to(stack([k for _, k in calls]), device))
        for i in range(case.N):
            for answer, (args, kwargs) in ((shared, calls[0]), (each, calls[i])):
                alone = leaves(run(case.member(i).to(device), to(args, device), to(kwargs, device)))
                truth = leaves(run(case.member(i).double(), double(args), double(kwargs)))
                for k, (wide, member_answer, exact) in enumerate(
                    zip(_leaves(answer), alone, truth, strict=True)
                ):
                    assert wide[i].device.type == torch.device(device).type
                    bounds.setdefault(k, Bound()).add(wide[i].cpu(), member_answer.cpu(), exact)
    for bound in bounds.values():
        bound.check()


def _leaves(answer: Any) -> list[Any]:
    """Returns the leaves of a wide answer: `[N, ...]`, or a list of N where shapes differ by member."""
    return [answer] if isinstance(answer, (torch.Tensor, list)) else leaves(answer)


@pytest.mark.parametrize("name", cases.NAMES)
def test_nan_in_one_members_weights_reaches_no_other_member(
    name: str, artifacts: Artifacts, tmp_path: Path, device: str
) -> None:
    def found(path: Path) -> list[list[torch.Tensor]]:
        return answers(load(path, device=device, verify="off"), name, device)

    clean = found(artifacts(name))
    for j in range(len(clean)):
        for i, (before, after) in enumerate(
            zip(clean, found(poisoned(artifacts(name), j, tmp_path / f"{j}")))
        ):
            for a, b in zip(before, after, strict=True):
                assert b.isnan().all() if i == j else torch.equal(a, b), (
                    f"NaN in member {j}, answers of member {i}"
                )


@pytest.mark.parametrize("name", ["encoder", "textcnn"])
def test_an_index_out_of_range_is_refused(
    name: str, artifacts: Artifacts, tmp_path: Path, device: str
) -> None:
    """The call runs in a new process, because a GPU kernel that finds the index ends the process's use of the
    device.
    """
    case = cases.load(name)
    for value, expected in ((3, "answered"), (200, "refused"), (2**40, "refused")):
        args, kwargs = case.sample(2, 0)
        args = [a.clone() for a in args]
        args[0][1, 3] = value
        torch.save((to(args, device), to(kwargs, device)), tmp_path / "call.pt")
        assert must(fresh(REFUSED, artifacts(name), device, tmp_path / "call.pt")).split()[0] == expected


def test_the_probe_finds_a_changed_weight(artifacts: Artifacts, tmp_path: Path, device: str) -> None:
    path = tmp_path / "other.wide"
    shutil.copytree(artifacts("mlp"), path)
    (weights,) = path.glob("weights-*.safetensors")
    with open(weights, "r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        rows = json.loads(file.read(length))
        begin, end = next(
            r["data_offsets"]
            for n, r in rows.items()
            if n != "__metadata__" and r["dtype"] == "F32" and len(r["shape"]) == 3
        )
        file.seek(8 + length + begin)
        file.write(struct.pack("<f", 3.0) * ((end - begin) // 4))
    with pytest.raises(VerificationError):
        load(path, device=device).probe()
    load(artifacts("mlp"), device=device).probe()
