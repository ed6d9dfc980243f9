"""Tests inputs that the model does not use: the refusal, and `only`, which drops them."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fusing import members
from loaded import saved
from small_builds import QUICK
from split_models import Cell
from support import Artifacts
from torch import Tensor, nn

import cases
import widepack
from widepack import InputError
from widepack.inference.model import WideModel


class Texts(nn.Module):
    """Has a table of tokens, an optional input, and a number that is part of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.types, self.fc = nn.Embedding(20, 4), nn.Embedding(2, 4), nn.Linear(4, 3)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        y = self.table(input_ids)
        if token_type_ids is not None:
            y = y + self.types(token_type_ids)
        weights = attention_mask.to(y.dtype).unsqueeze(-1)
        pooled = (y * weights).sum(1) / weights.sum(1).clamp(min=1)
        found: Tensor = self.fc(pooled) * scale
        return found

    def encode(self, input_ids: Tensor) -> Tensor:
        z: Tensor = self.table(input_ids).relu()
        return z


class BatchEncoding(UserDict):  # type: ignore[type-arg]
    """A mapping that is no dict, as a tokenizer of transformers returns."""


IDS = torch.randint(0, 20, (4, 6))
MASK = (torch.arange(6) < torch.tensor([[6], [3], [1], [5]])).long()
USED: dict[str, Any] = {"input_ids": IDS, "attention_mask": MASK}
SPECS = ["input_ids=int64[B,T]:0..19", "attention_mask=int64[B,T]:0..1"]


def encoded(**more: Any) -> BatchEncoding:
    """Returns a tokenizer's whole answer."""
    return BatchEncoding({**USED, "token_type_ids": torch.zeros_like(IDS), **more})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    specs = [*(f"forward:{s}" for s in SPECS), "encode:input_ids=int64[B,T]:0..19"]
    return saved(Texts, tmp_path_factory.mktemp("texts"), *specs, members=3, entries=["forward", "encode"])


def test_only_keeps_the_inputs_that_the_model_uses(texts: WideModel) -> None:
    offsets = [[(0, 1)] * 6] * 4
    for given in (encoded(), dict(encoded()), encoded(offset_mapping=offsets, special=MASK.numpy())):
        found = texts.only(given)
        assert type(found) is dict and list(found) == list(USED)
        assert found["input_ids"] is IDS and found["attention_mask"] is MASK
    assert list(texts.encode.only(encoded())) == ["input_ids"]
    assert list(texts[1].only(encoded())) == list(USED)
    assert texts.only({}) == {} and list(texts.only({"attention_mask": 1})) == ["attention_mask"]
    # what is part of the program is kept where it is no tensor, so that the call still checks it
    assert texts.only({"scale": 2.0, "token_type_ids": None}) == {"scale": 2.0, "token_type_ids": None}
    assert texts.only({"scale": np.float32(1.0)}) == {"scale": 1.0}
    assert texts.only({"scale": np.ones(3), "token_type_ids": widepack.each(IDS)}) == {}


def test_every_form_of_call_takes_what_only_returns(texts: WideModel) -> None:
    given: Any = encoded()
    whole = texts(**USED)
    ids = [2, 0, 0, 1]
    assert torch.equal(texts(**texts.only(given)), whole)
    assert torch.equal(texts.route(**texts.only(given), member=ids), texts.route(**USED, member=ids))
    assert torch.equal(texts.mean(**texts.only(given)), texts.mean(*USED.values()))
    reduced = texts.reduce("vote", **texts.only(given), of="softmax")
    assert torch.equal(reduced["vote"], texts.vote(**USED, of="softmax"))
    stacked = {k: torch.stack([v] * 3) for k, v in given.items()}
    assert torch.equal(texts.each(**texts.only(stacked)), texts.each(**{k: stacked[k] for k in USED}))
    assert torch.equal(texts[1](**texts[1].only(given)), texts[1](**USED))
    assert torch.equal(texts.encode(**texts.encode.only(given)), texts.encode(IDS))
    arrays = {k: v.numpy() for k, v in given.items()}
    assert torch.equal(texts(**texts.only(arrays)), whole)


REFUSALS: dict[str, tuple[Any, str]] = {
    "call": (lambda m, t: m(**t), r"ens(**ens.only(inputs))"),
    "each": (lambda m, t: m.each(**t), r"ens.each(**ens.only(inputs))"),
    "route": (lambda m, t: m.route(**t, member=0), r"ens.route(**ens.only(inputs), member=...)"),
    "reduce": (
        lambda m, t: m.reduce("mean", "std", **t),
        "ens.reduce('mean', 'std', **ens.only(inputs))",
    ),
    "mean": (lambda m, t: m.mean(**t), "ens.reduce('mean', **ens.only(inputs))"),
    "member": (lambda m, t: m[0](**t), "member(**member.only(inputs))"),
}


@pytest.mark.parametrize("form", REFUSALS)
def test_a_refusal_names_the_inputs_and_the_call_to_make(form: str, texts: WideModel) -> None:
    call, way = REFUSALS[form]
    with pytest.raises(InputError) as caught:
        call(texts, encoded())
    assert str(caught.value) == (
        "the model was built without 'token_type_ids': its default (None) is part of its program; its inputs "
        "are input_ids, attention_mask. To use it, build it again with input_ids, attention_mask and "
        f"token_type_ids. To drop it, which may change the answers, call {way}"
    )


def test_refusals_of_several_inputs(texts: WideModel) -> None:
    with pytest.raises(InputError) as caught:
        texts(**encoded(special=MASK, overflow=[1], scale=torch.ones(4)))
    assert str(caught.value).startswith(
        "the model has no input 'special', 'overflow', and the model was built without 'token_type_ids', "
        "'scale': their defaults (None, 1.0) are part of its program; its inputs are input_ids, "
        "attention_mask. To use them, build it again with input_ids, attention_mask, token_type_ids and "
        "scale. To drop them, which may change the answers, call ens(**ens.only(inputs))"
    )
    with pytest.raises(InputError, match=r"no input 'token_type_ids'.*ens.encode\(\*\*ens.encode.only\("):
        texts.encode(input_ids=IDS, token_type_ids=IDS)
    with pytest.raises(InputError, match="built without 'token_type_ids': its default"):
        texts(IDS, MASK, IDS)
    with pytest.raises(InputError, match=r"scale is 2\.0; the model was built with 1\.0 there"):
        texts(**texts.only({**USED, "scale": 2.0}))
    with pytest.raises(InputError, match="input attention_mask is missing"):
        texts(**texts.only({"input_ids": IDS, "atention_mask": MASK}))  # a name that is misspelled


@pytest.mark.parametrize("form", REFUSALS)
def test_a_dict_by_position_is_refused_with_the_call_to_make(form: str, texts: WideModel) -> None:
    def call(given: Any) -> None:
        if form == "route":
            texts.route(given, member=0)
        elif form == "reduce":
            texts.reduce(given, "mean", "std")
        else:
            forms: dict[str, Any] = {
                "call": texts,
                "each": texts.each,
                "mean": texts.mean,
                "member": texts[0],
            }
            forms[form](given)

    way = REFUSALS[form][1]
    with pytest.raises(InputError) as caught:
        call(encoded())
    assert str(caught.value) == (
        "input input_ids is a BatchEncoding with the keys input_ids, attention_mask, token_type_ids; the "
        f"model takes a tensor int64[B,T]; give the values of a dict by name: {way}"
    )
    with pytest.raises(InputError) as caught:
        call(USED)
    plain = way.replace("**ens.only(inputs)", "**inputs").replace("**member.only(inputs)", "**inputs")
    assert str(caught.value).endswith(f"by name: {plain}")
    with pytest.raises(InputError, match="the inputs of the model are input_ids, attention_mask$"):
        call({"ids": IDS})


def test_texts_that_a_tokenizer_left_as_lists(texts: WideModel) -> None:
    with pytest.raises(InputError, match=r"input_ids is a list of 4; .*return_tensors='pt', padding=True"):
        texts(**{k: v.tolist() for k, v in USED.items()})


def test_what_only_does_not_take(texts: WideModel) -> None:
    for wrong, words in [(IDS, "got a Tensor"), ([IDS], "got a list of 1"), (None, "got None")]:
        with pytest.raises(InputError, match=f"only takes a dict of inputs by name.*; {words}"):
            texts.only(wrong)  # type: ignore[arg-type]


class OfDict(nn.Module):
    """Takes all inputs as one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Texts()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        y: Tensor = self.inner(batch["input_ids"], batch["attention_mask"])
        return y


def test_an_input_that_is_a_dict(tmp_path: Path) -> None:
    torch.save(OfDict().state_dict(), tmp_path / "m.pt")
    widepack.build([tmp_path / "m.pt"], tmp_path / "e.wide", model=OfDict, sample=(USED,), **QUICK)
    ens = widepack.load(tmp_path / "e.wide")
    words = r"leave 'token_type_ids' out, or drop them with ens\.only\(\{'batch': batch\}\)$"
    with pytest.raises(InputError, match=words):
        ens(encoded())
    assert torch.equal(ens(**ens.only({"batch": encoded(), "other": 1})), ens(USED))


def test_states_are_given_beside_the_inputs(tmp_path: Path) -> None:
    ens = saved(Cell, tmp_path, "x=float32[B,4]", "h=float32[B,3]", members=2, state=["h=1"])
    given, state = {"x": torch.randn(3, 4), "more": 1}, ens.state(B=3)
    y, _ = ens(**ens.only(given), state=state)
    assert torch.equal(y, ens(given["x"], state=state)[0])
    with pytest.raises(InputError, match=r"h is a state, not an input; give it as state=\{'h': \.\.\.\}"):
        ens(given["x"], h=state["h"])


def test_a_fused_module_has_only_too() -> None:
    fused = widepack.fuse(members(Texts), (IDS, MASK)).eval()
    assert torch.equal(fused(**fused.only(encoded())), fused(IDS, MASK))
    with pytest.raises(InputError, match=r"fuse the modules again with .* fused\(\*\*fused\.only\(inputs"):
        fused(**encoded())


def test_a_model_of_transformers(artifacts: Artifacts) -> None:
    from transformers import BatchEncoding as Encoded

    ens = widepack.load(artifacts("bert"))
    _, used = cases.load("bert").sample(3, 0)
    given = Encoded({**used, "token_type_ids": torch.zeros_like(used["input_ids"])})
    assert list(ens.only(given)) == ["input_ids", "attention_mask"]
    own = cases.load("bert").member(1)
    with torch.no_grad():
        right = own(**given).logits  # types of 0 are what the model takes without them
    torch.testing.assert_close(ens(**ens.only(given)).logits[1], right, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match=r"'token_type_ids': .*its inputs are input_ids, attention_mask\. "):
        ens(**given)
    with pytest.raises(
        InputError, match=r"give the values of a dict by name: ens\(\*\*ens\.only\(inputs\)\)"
    ):
        ens(given)
