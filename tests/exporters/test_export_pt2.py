"""Tests that torch.export programs of `widepack.export` run without widepack with the members' answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import fresh, must

from exporters.export_models import (
    HEADS,
    SMALL,
    N,
    Step,
    assert_answers,
    assert_same,
    call_of,
    file_names,
    seeded,
)
from widepack import export
from widepack.errors import LoweringError, VerificationError
from widepack_artifacts.reader import Reader

ALONE = """
import sys, torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].startswith("widepack"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
with torch.no_grad():
    for path in sys.argv[2:]:
        answers = [torch.export.load(path).module()(*args) for args in torch.load(sys.argv[1])]
        torch.save(answers, path + ".out")
"""


@pytest.mark.extended
def test_a_program_runs_without_widepack(heads: Path, tmp_path: Path) -> None:
    export(heads, tmp_path / "e.pt2", to="pt2", member="m1")
    x = torch.randn(7, 4)
    torch.save([(x,)], tmp_path / "calls.pt")
    must(fresh(ALONE, tmp_path / "calls.pt", tmp_path / "e.pt2"))
    ((y, z),) = torch.load(tmp_path / "e.pt2.out")
    with torch.no_grad():
        out, trunk = HEADS[1](x)
    assert_same(y, out)
    assert_same(z, trunk)


@pytest.mark.extended
def test_programs_of_all_members_and_of_one(small: Path, tmp_path: Path) -> None:
    whole = export(small, tmp_path / "all.pt2", to="pt2")
    one = export(small, tmp_path / "one.pt2", to="pt2", member="m1")
    assert whole.checked.startswith(f"torch {torch.__version__}: the probe; B = 5")
    assert whole.unchecked == ["ids in 0..6"]
    shown = (whole.inputs[0], whole.outputs[0], one.outputs[0])
    assert shown == ("x=float32[B,T,4]", "y=float32[3,B,T,5]", "y=float32[B,T,5]")
    assert file_names(tmp_path) == {"all.pt2", "one.pt2"}
    many, single = (torch.export.load(tmp_path / name).module() for name in ("all.pt2", "one.pt2"))
    with torch.no_grad():
        for batch, length in ((1, 5), (2, 3), (40, 12)):
            x, ids = call_of(batch, length, batch)
            assert_answers(many(x, ids), SMALL, x, ids)
            assert_answers({k: v[None] for k, v in single(x, ids).items()}, SMALL[1:2], x, ids)
        # torch checks the bounds of dims at each call
        with pytest.raises(RuntimeError, match="to be <= 12, but got 13"):
            many(*call_of(2, 13))


@pytest.mark.slow
def test_programs_of_some_members_each_and_weightless(small: Path, tmp_path: Path) -> None:
    report = export(small, tmp_path / "two.pt2", to="pt2", members=[2, 0], pattern="each")
    assert report.inputs == ["x=float32[2,B,T,4]", "ids=int64[2,B,T]"]
    calls = [call_of(4, seed=i) for i in range(2)]
    with torch.no_grad():
        outputs = torch.export.load(tmp_path / "two.pt2").module()(
            torch.stack([x for x, _ in calls]), torch.stack([ids for _, ids in calls])
        )
    for k, i in enumerate((2, 0)):
        assert_same(outputs["y"][k], SMALL[i](*calls[k])["y"].detach())
    bare = export(small, tmp_path / "bare.pt2", to="pt2", weights="none")
    assert bare.initializers > 5 and "the probe" in bare.checked
    loaded = torch.export.load(tmp_path / "bare.pt2")
    assert all(w.is_meta for w in loaded.state_dict.values())
    assert set(loaded.state_dict) <= {w.name for w in Reader(small).manifest.weights}


@pytest.mark.extended
def test_programs_of_ragged_heads_and_states(heads: Path, steps: Path, tmp_path: Path) -> None:
    x = torch.randn(7, 4)
    export(heads, tmp_path / "heads.pt2", to="pt2")
    export(steps, tmp_path / "steps.pt2", to="pt2")
    with torch.no_grad():
        outs, z = torch.export.load(tmp_path / "heads.pt2").module()(x)
        for i, module in enumerate(HEADS):
            head, trunk = module(x)
            assert_same(outs[i], head)
            assert_same(z[i], trunk)
        model = torch.export.load(tmp_path / "steps.pt2").module()
        state = {"h": torch.zeros(3, 7, 6), "steps": torch.zeros(3, dtype=torch.int64)}
        modules, hidden = [seeded(Step, i) for i in range(N)], [torch.zeros(7, 6)] * N
        for _ in range(2):
            outputs, state = model(x, **state)
            for i, module in enumerate(modules):
                expected = module(x, hidden[i])
                hidden[i] = expected["h"]
                assert_same(outputs["y"][i], expected["y"])


@pytest.mark.extended
def test_a_program_that_answers_wrongly_is_not_kept(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widepack.backends.torch_export import exported_program
    from widepack.exporters import pt2_file

    before = exported_program

    def spoiled(*args: Any) -> Any:
        program = before(*args)
        program.state_dict["head.weight"] = program.state_dict["head.weight"] * 1.01
        return program

    monkeypatch.setattr(pt2_file, "exported_program", spoiled)
    with pytest.raises(
        VerificationError,
        match="written as a torch.export program, does not answer as the artifact's members "
        "do: probe: output y of member 0",
    ):
        export(small, tmp_path / "e.pt2", to="pt2")
    assert file_names(tmp_path) == set()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("trunk.weight", 'trunk.we"ght', "a weight called 'trunk.we\"ght'"),
        ("x", "x,*_", "an input called 'x,\\*_'"),
    ],
)
def test_names_that_would_be_code_are_refused(
    old: str, new: str, words: str, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from widepack.exporters import pt2_file
    from widepack.exporters.subject import ExportSubject

    def renamed(subject: ExportSubject, *_: Any) -> Any:
        if old in subject.values:
            subject.values[new] = subject.values.pop(old)
        else:
            subject.entry = replace(
                subject.entry, inputs=tuple(replace(i, name=new) for i in subject.entry.inputs)
            )
        return before(subject, *_)

    before = pt2_file.write
    monkeypatch.setattr(pt2_file, "write", renamed)
    with pytest.raises(LoweringError, match=f"a torch.export program cannot have {words}"):
        export(heads, tmp_path / "e.pt2", to="pt2")
    assert file_names(tmp_path) == set()
