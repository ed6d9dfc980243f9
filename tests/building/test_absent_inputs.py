"""Tests that a build says which inputs of the model it was not given, and that an error leads to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from loaded import files_of, seeded
from torch import Tensor, nn

import widepack
from widepack_cli.main import cli

NET = '''
import torch
from torch import nn

class Net(nn.Module):
    """Reads tokens, as models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask=None, labels=None, scale: float = 1.0):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        h = self.table(input_ids) * mask[..., None]
        return self.head(h.sum(1) / mask.sum(1)[:, None]) * scale
'''
IDS = torch.tensor([[3, 4, 5, 0], [6, 7, 0, 0]])
MASK = (IDS > 0).long()
SPECS = ["--input", "input_ids=int64[B,T]:0..19", "--input", "attention_mask=int64[B,T]:0..1"]


def module() -> nn.Module:
    space: dict[str, type[nn.Module]] = {"__name__": "net"}  # type: ignore[dict-item]
    exec(NET, space)
    return space["Net"]()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET, encoding="utf-8")
    files_of(tmp_path, [seeded(module, i) for i in range(2)])
    return tmp_path


def built(*specs: str) -> tuple[str, str]:
    """Returns what a build writes to standard output and to standard error."""
    words = "build m0.pt m1.pt -o e.wide --model net.py:Net --budget 0 --force"
    done = CliRunner().invoke(cli, [*words.split(), *specs])
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def alone(i: int, *inputs: Tensor) -> Tensor:
    member = module()
    member.load_state_dict(torch.load(f"m{i}.pt"))
    answer: Tensor = member(*inputs)
    return answer.detach()


def test_a_build_names_the_inputs_that_are_left_out(folder: Path) -> None:
    out, err = built(*SPECS[:2], "--json")
    assert "the model also takes attention_mask, labels; they are not among the inputs" in err
    assert '"absent": [\n' in out
    shown = CliRunner().invoke(cli, ["inspect", "e.wide"])
    assert "without attention_mask, labels: None is part of the program" in shown.stdout
    ens = widepack.load("e.wide")
    with pytest.raises(widepack.InputError) as found:
        ens(input_ids=IDS, attention_mask=MASK)
    text = str(found.value)
    assert "build it again with input_ids and attention_mask." in text
    assert text.index("build it again") < text.index("To drop it, which may change the answers")
    dropped = ens(**ens.only({"input_ids": IDS, "attention_mask": MASK}))
    torch.testing.assert_close(dropped[0], alone(0, IDS))
    built(*SPECS)
    ens = widepack.load("e.wide")
    torch.testing.assert_close(ens(input_ids=IDS, attention_mask=MASK)[1], alone(1, IDS, MASK))
    assert not torch.allclose(alone(0, IDS), alone(0, IDS, MASK))


def test_a_build_with_all_inputs_names_none(folder: Path) -> None:
    Path("net.py").write_text(NET.replace(", labels=None", ""), encoding="utf-8")
    _, err = built(*SPECS)
    assert "also takes" not in err
    assert "without " not in CliRunner().invoke(cli, ["inspect", "e.wide"]).stdout
