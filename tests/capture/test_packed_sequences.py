"""Packed sequences whose lengths are an input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asgi import InProcess
from infer import json_request
from safetensors.torch import save_file
from small_builds import agree, built, loaded, member
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import widepack
import widepack_serve

X = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(3))
SORTED, UNSORTED = torch.tensor([5, 4, 2, 1]), torch.tensor([2, 5, 1, 4])


class Packed(nn.Module):
    def __init__(self, kind: Any, ordered: bool, total: int | None, **options: Any) -> None:
        super().__init__()
        self.layer, self.ordered, self.total = kind(3, 4, batch_first=True, **options), ordered, total

    def forward(self, x: Tensor, lengths: Tensor, hx: Any = None) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.ordered)
        y, last = self.layer(packed, hx)
        padded, sizes = pad_packed_sequence(y, batch_first=True, total_length=self.total)
        return padded * 2, sizes, last


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("kind", "ordered", "total", "states", "options"),
    [
        (nn.LSTM, False, None, 2, {"bidirectional": True}),
        (nn.LSTM, True, 7, 0, {"num_layers": 2}),
        (nn.GRU, True, None, 1, {"bidirectional": True}),
        (nn.RNN, False, 5, 0, {}),
    ],
)
def test_lengths_are_an_input(
    tmp_path: Path, kind: type[nn.RNNBase], ordered: bool, total: int | None, states: int, options: Any
) -> None:
    def make() -> nn.Module:
        return Packed(kind, ordered, total, **options)

    h = torch.randn(2, 4, 4)
    hx = [] if not states else [h] if states == 1 else [(h, -h)]
    axes = {"x": {0: "B"}, "lengths": {0: "B"}, "hx": {1: "B"}}
    dynamic = {k: v for k, v in axes.items() if hx or k != "hx"}
    sample = (X, SORTED if ordered else UNSORTED, *hx)
    ens = loaded(make, tmp_path, sample=sample, dynamic=dynamic, budget=0)
    first = [v[:, :2] if isinstance(v, Tensor) else tuple(t[:, :2] for t in v) for v in hx]
    shorter = (X[:2], torch.tensor([4, 3] if ordered else [3, 4]), *first)
    for call in (sample, shorter):
        agree(ens, make, *call, atol=1e-6, rtol=1e-5)


BAD = {
    "not in order": ([4, 5, 2, 1], "needs them in descending order"),
    "zero": ([5, 4, 2, 0], "lengths contains 0; 1 to 5 are possible"),
    "negative": ([5, 4, 2, -3], "lengths contains -3; 1 to 5 are possible"),
    "longer than the steps": ([6, 4, 2, 1], "lengths contains 6; 1 to 5 are possible"),
}


def made(folder: Path, make: Any, sample: tuple[Any, ...]) -> tuple[list[nn.Module], Path]:
    """Returns two members and their artifact."""
    path = built(make, folder, sample=sample, budget=0)
    return [member(make, i) for i in range(2)], path


@pytest.fixture(scope="module")
def ordered(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[nn.Module], Path]:
    return made(tmp_path_factory.mktemp("ordered"), lambda: Last(True), (X, SORTED))


class Last(nn.Module):
    def __init__(self, ordered: bool) -> None:
        super().__init__()
        self.layer, self.ordered = nn.GRU(3, 4, batch_first=True), ordered

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.ordered)
        last: Tensor = self.layer(packed)[1][-1]
        return last


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", BAD)
def test_lengths_that_torch_refuses_are_refused(ordered: tuple[list[nn.Module], Path], name: str) -> None:
    members, path = ordered
    lengths, message = BAD[name]
    with pytest.raises(RuntimeError):
        members[0](X, torch.tensor(lengths))
    ens = widepack.load(path)
    with pytest.raises(widepack.InputError, match=message):
        ens(X, torch.tensor(lengths))
    with pytest.raises(widepack.InputError, match=message):
        ens.each(torch.stack([X, X]), torch.stack([SORTED, torch.tensor(lengths)]))
    ids = torch.tensor([1, 1, 0, 0])
    with pytest.raises(widepack.InputError, match=r"lengths (is|contains) "):
        ens.route(X, torch.tensor(lengths), member=ids)
    rows = {"x": X, "lengths": torch.tensor(lengths)}
    save_file(rows, path.parent / "rows.safetensors")
    with pytest.raises(widepack.WidepackError, match=message):
        widepack.predict(path, path.parent / "rows.safetensors", path.parent / "y.safetensors")
    assert not (path.parent / "y.safetensors").exists()


def test_a_server_answers_400_to_lengths_that_torch_refuses(ordered: tuple[list[nn.Module], Path]) -> None:
    app = InProcess(widepack_serve.app({"packed": ordered[1]})).start()
    try:
        for lengths, message in BAD.values():
            request = json_request("packed", {"x": X, "lengths": torch.tensor(lengths)})
            answer = app(request.method, request.path, request.body)
            assert answer.status == 400 and message in answer.error
    finally:
        app.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["compile", "aot", "onnxruntime"])
@pytest.mark.parametrize("in_order", [True, False])
def test_compiled_programs_refuse_the_lengths_too(tmp_path: Path, backend: str, in_order: bool) -> None:
    for package in ("onnxruntime", "onnx", "onnxscript") if backend == "onnxruntime" else ():
        pytest.importorskip(package, reason=f"backend onnxruntime needs {package}: the extra onnx")
    members, path = made(tmp_path, lambda: Last(in_order), (X, SORTED))
    ens = widepack.load(path, backend=backend, compile="now")
    given = SORTED if in_order else UNSORTED
    torch.testing.assert_close(ens(X, given)[1], members[1](X, given).detach(), atol=1e-6, rtol=1e-5)
    for lengths, message in list(BAD.values())[0 if in_order else 1 :]:
        with pytest.raises(widepack.InputError, match=message):
            ens(X, torch.tensor(lengths))


class Total(Last):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=self.ordered)
        y: Tensor = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=4)[0]
        return y


@pytest.mark.extended
def test_a_total_length_below_the_steps_refuses_longer_lengths(tmp_path: Path) -> None:
    lengths = torch.tensor([2, 4, 1, 3])
    members, path = made(tmp_path, lambda: Total(False), (X, lengths))
    ens = widepack.load(path)
    torch.testing.assert_close(ens(X, lengths)[1], members[1](X, lengths).detach(), atol=1e-6, rtol=1e-5)
    with pytest.raises(ValueError, match="total_length=4"):
        members[0](X, UNSORTED)
    with pytest.raises(widepack.InputError, match="lengths contains 5; 1 to 4 are possible"):
        ens(X, UNSORTED)
    why = r"sort.*computes along the rows; pack_padded_sequence with enforce_sorted=False sorts the batch"
    with pytest.raises(widepack.UsageError, match=f"(?s)cannot be routed.*{why}"):
        ens.route(X, lengths, member=torch.tensor([0, 1, 1, 0]))


class Fields(Last):
    """Uses the fields of a packed sequence. form: how."""

    def __init__(self, form: str) -> None:
        super().__init__(False)
        self.form, self.of_rows = form, nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = self.layer(packed)
        if self.form == "mean":
            return y.data.mean(0) + packed[0].sum() / packed.batch_sizes.sum() + packed.batch_sizes[0]
        if self.form == "unpacked":
            data, sizes, *_ = y
            return data.sum(0) * sizes.float().mean()
        if self.form == "returned":
            return y
        if self.form == "replaced":
            y = y._replace(data=self.of_rows(y.data).relu())
        else:
            orders = y.sorted_indices, y.unsorted_indices
            y = PackedSequence(self.of_rows(y.data).relu(), y.batch_sizes, *orders)
        return pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("form", ["mean", "unpacked", "returned", "replaced", "made"])
def test_fields_of_packed_sequences(tmp_path: Path, form: str) -> None:
    members, path = made(tmp_path, lambda: Fields(form), (X, UNSORTED))
    ens = widepack.load(path)
    for lengths in (UNSORTED, torch.tensor([2, 3, 3, 1])):
        got, want = ens(X, lengths), members[1](X, lengths)
        plain = isinstance(want, Tensor)
        pairs = [(got, want)] if plain else [(got[k], getattr(want, k)) for k in want._fields]
        for y, t in pairs:
            torch.testing.assert_close(y[1], t.detach(), atol=1e-6, rtol=1e-5)


class Steps(Last):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        total = x.new_zeros(())
        for size in packed.batch_sizes:
            total = total + size
        return total


def test_a_loop_over_batch_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(widepack.CaptureError, match="a number of times that depends on the values"):
        made(tmp_path, lambda: Steps(False), (X, UNSORTED))


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4)

    def forward(self, packed: Any) -> Tensor:
        last: Tensor = self.layer(packed)[1][-1]
        return last


def test_a_packed_sequence_as_an_input_is_refused(tmp_path: Path) -> None:
    packed = pack_padded_sequence(X, SORTED, batch_first=True)
    with pytest.raises(widepack.CaptureError, match="input packed has a PackedSequence"):
        made(tmp_path, Given, (packed,))
    with pytest.raises(widepack.CaptureError, match="input packed has a PackedSequence"):
        widepack.fuse([Given(), Given()], packed)
