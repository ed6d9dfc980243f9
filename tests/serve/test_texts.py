"""Tests requests with texts, of which a tokenizer makes the inputs of the model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asgi import InProcess, Response
from infer import infer, json_request, read
from rpc_client import RpcClient, tensors, with_server
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import widepack
import widepack_serve
from widepack import Unavailable, UsageError

MEMBERS = 3
WORDS = {"[PAD]": 0, "[UNK]": 1, "a": 2, "good": 3, "bad": 4, "film": 5}
TEXTS = ["a good film", "bad", "a film a film", "good good"]
Started = Callable[..., InProcess]


class Net(nn.Module):
    """Pools over the words that the mask shows, weighted by their place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        weight = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weight = weight[..., None].float()
        y: Tensor = self.head((self.table(input_ids) * weight).sum(1) / weight.sum(1))
        return y


def member(i: int) -> Net:
    torch.manual_seed(i)
    return Net().eval()


def tokenizer(**options: Any) -> Any:
    rules = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    rules.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=rules, **{"pad_token": "[PAD]", "unk_token": "[UNK]", **options}
    )


def alone(texts: list[str]) -> Tensor:
    """Returns the answers of the members alone, each text by itself, without padding."""
    rows = [tokenizer()(t, return_tensors="pt")["input_ids"] for t in texts]
    with torch.no_grad():
        return torch.stack([torch.cat([member(i)(row) for row in rows]) for i in range(MEMBERS)])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with artifacts and tokenizers."""
    folder = tmp_path_factory.mktemp("texts")
    paths = []
    for i in range(MEMBERS):
        paths.append(folder / f"m{i}.pt")
        torch.save(member(i).state_dict(), paths[-1])
    ids, mask = "input_ids=int64[B,{}]:0..19", "attention_mask=int64[B,{}]:0..1"
    for name, specs in (
        ("masked", [ids.format("T"), mask.format("T")]),
        ("fixed", [ids.format("5"), mask.format("5")]),
        ("unmasked", [ids.format("T")]),
    ):
        widepack.build(paths, folder / f"{name}.wide", model=Net, inputs=specs, budget=0, pt2=False)
    tokenizer().save_pretrained(folder / "right")
    tokenizer(padding_side="left").save_pretrained(folder / "left")
    tokenizer(pad_token=None).save_pretrained(folder / "no-pads")
    return folder


@pytest.fixture
def start(built: Path) -> Iterator[Started]:
    started: list[InProcess] = []

    def served(name: str, folder: str = "right", **settings: Any) -> InProcess:
        app = widepack_serve.app(built / f"{name}.wide", tokenizer=str(built / folder), **settings)
        started.append(InProcess(app).start())
        return started[-1]

    yield served
    for one in started:
        one.close()


def ask(server: InProcess, model: str, texts: Any = TEXTS, **inputs: Any) -> Response:
    found = server.maybe(json_request(model, {"text": texts, **inputs}))
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["masked", "fixed"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_texts_get_the_answers_of_each_text_alone(name: str, side: str, start: Started) -> None:
    server, expected = start(name, side), alone(TEXTS)
    found = read(ask(server, name)).outputs["output"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    one = infer(server, f"{name}.m1", {"text": TEXTS})["output"]
    torch.testing.assert_close(one, expected[1], rtol=1e-4, atol=1e-5)
    numbers = torch.tensor([2, 0, 1, 2])
    routed = read(ask(server, name, member=numbers)).outputs["output"]
    torch.testing.assert_close(routed, expected[numbers, torch.arange(4)], rtol=1e-4, atol=1e-5)
    mean = infer(server, name, {"text": TEXTS}, "output.mean")["output.mean"]
    torch.testing.assert_close(mean, expected.mean(0), rtol=1e-4, atol=1e-5)


def test_large_requests_are_tokenized_on_a_thread(start: Started) -> None:
    server, texts = start("masked"), TEXTS * 3000
    found = read(ask(server, "masked", texts)).outputs["output"]
    torch.testing.assert_close(found, alone(TEXTS).repeat(1, 3000, 1), rtol=1e-4, atol=1e-5)


def test_texts_over_grpc(built: Path) -> None:
    async def calls(client: RpcClient) -> Any:
        return await client.infer("ens", ("text", TEXTS))

    model = widepack.load(built / "masked.wide")
    answer = with_server({"ens": model}, calls, tokenizer=str(built / "right"))
    (found,) = tensors(answer).values()
    torch.testing.assert_close(found, alone(TEXTS), rtol=1e-4, atol=1e-5)


def test_tokens_are_still_taken(start: Started) -> None:
    batch = tokenizer()(TEXTS, padding=True, return_tensors="pt")
    inputs = {n: batch[n] for n in ("input_ids", "attention_mask")}
    torch.testing.assert_close(infer(start("masked"), "masked", inputs)["output"], alone(TEXTS))


def test_texts_that_are_refused(start: Started) -> None:
    masked, fixed, unmasked = start("masked", max_values=64), start("fixed"), start("unmasked")
    no_pads = start("masked", "no-pads")
    ids = torch.zeros(4, 4, dtype=torch.int64)
    refused: list[tuple[InProcess, str, Any, dict[str, Any], int, str]] = [
        (
            unmasked,
            "unmasked",
            TEXTS,
            {},
            400,
            "no input attention_mask, so that padding would count as text",
        ),
        (no_pads, "masked", TEXTS, {}, 400, "the tokenizer has no token for padding"),
        (fixed, "fixed", ["a a a a a a"], {}, 400, "a text has 6 tokens, and the model was built for 5"),
        (masked, "masked", ["a " * 40, "a"], {}, 413, "rows of up to 40 tokens, and the limit of a request"),
        (masked, "masked", [], {}, 400, "input text has no texts"),
        (masked, "masked", [""], {}, 400, "T = 0"),
        (masked, "masked", TEXTS, {"input_ids": ids}, 400, "the request has text and input_ids"),
        (masked, "masked", ids, {}, 400, "input text is a list of texts"),
        (masked, "masked.each", TEXTS, {}, 400, "takes no texts, since each member has rows of its own"),
        (masked, "masked", TEXTS, {"x": ids}, 400, "has no input x"),
    ]
    for server, model, texts, more, status, words in refused:
        got = ask(server, model, texts, **more)
        assert got.status == status and words in got.error, (texts, got.body)
    same = ["a good film", "a bad film"]
    for server, name in ((unmasked, "unmasked"), (no_pads, "masked")):
        found = read(ask(server, name, same)).outputs["output"]
        torch.testing.assert_close(found, alone(same), rtol=1e-4, atol=1e-5)
    plain = InProcess(widepack_serve.app(server.app.state.service.catalog.find("masked").artifact.model))
    plain.start()
    assert "has no input text" in ask(plain, "ens").error
    plain.close()


def test_tokenizers_that_are_refused(
    built: Path, wide: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    code = tmp_path / "code"
    tokenizer().save_pretrained(code)
    config = json.loads((code / "tokenizer_config.json").read_text())
    config.update(tokenizer_class="Mine", auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"]})
    (code / "tokenizer_config.json").write_text(json.dumps(config))
    (code / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for folder, words in (
        (tmp_path / "none", "is not a folder"),
        (tmp_path / "empty", "has no tokenizer that can be read"),
    ):
        with pytest.raises(UsageError, match=words):
            widepack_serve.app(built / "masked.wide", tokenizer=str(folder))
    with contextlib.suppress(UsageError):
        widepack_serve.app(built / "masked.wide", tokenizer=str(code))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(UsageError, match="no model has an input input_ids"):
        widepack_serve.app(wide["plain"], tokenizer=str(built / "right"))
    monkeypatch.setattr("widepack_serve.catalog.texts.find_spec", lambda _: None)
    with pytest.raises(Unavailable, match=r"pip install 'widepack\[serve,hf\]'"):
        widepack_serve.app(built / "masked.wide", tokenizer=str(built / "right"))
