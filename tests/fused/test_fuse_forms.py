"""Tests copies of one model, copied members, stochastic passes, the packed form, and saved artifacts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fusing import Cnn, Mlp, draw, members
from torch import Tensor, nn

import widepack
from widepack import InputError, UsageError
from widepack.fused.fresh_copies import fresh_copies

close = torch.testing.assert_close


class Noisy(nn.Module):
    """Applies dropout to the output of a layer, and in attention."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(6, 8), nn.Dropout(p)
        self.attend = nn.MultiheadAttention(8, 2, dropout=p, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.first(x))
        return {"h": h, "drop": self.drop(h), "attend": self.attend(h, h, h, need_weights=False)[0]}


@pytest.mark.extended
def test_n_copies_have_fresh_weights() -> None:
    model: Any = Cnn().train()
    model.norm1.running_mean += 1.0
    model.conv1.weight.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(3)
    fused = widepack.fuse(model, draw(4, 3, 8, 8), n=4, validate=False)
    for name in ("conv1.weight", "conv2.bias", "head.weight"):
        value = fused.tensor_of(name)
        rows = [before[name], *value]
        assert all(not torch.equal(a, b) for i, a in enumerate(rows) for b in rows[:i])
        assert float(value.detach().abs().max()) <= 3 * float(before[name].abs().max())
    assert not fused.norm1.running_mean.any()
    assert not fused.conv1.weight.requires_grad
    assert fused.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_n_copies_begin_as_their_constructors_make_them() -> None:
    """A container initialises its children after they initialise themselves.

    Attention sets the bias of its out_proj to 0. A Transformer draws all matrices of its layers.
    """
    with torch.no_grad():
        trained = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        for p in trained.parameters():
            p.uniform_(1.0, 2.0)
    (encoder,) = fresh_copies(trained, 1)
    attention: Any = encoder.get_submodule("self_attn")
    assert not attention.out_proj.bias.any()
    assert not attention.in_proj_bias.any()
    assert len(attention.in_proj_weight.unique()) == 192
    assert bool((encoder.get_parameter("norm1.weight") == 1).all())
    assert bool(encoder.get_parameter("linear1.bias").any())

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor")
        model = nn.Transformer(64, 2, 1, 1, 128, batch_first=True)
    for copy in fresh_copies(model, 2):
        for name, p in copy.named_parameters():
            if p.dim() > 1:  # values of xavier_uniform_ reach its bound and not more
                bound = (6 / sum(p.shape)) ** 0.5
                assert 0.95 * bound < float(p.detach().abs().max()) <= bound, name
                torch.testing.assert_close(float(p.detach().std()), bound / 3**0.5, atol=0.0, rtol=0.05)


def test_n_copies_of_a_module_that_is_used_twice() -> None:
    class Holder(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def reset_parameters(self) -> None:
            nn.init.constant_(self.layer.get_parameter("bias"), 3.0)

    layer = nn.Linear(4, 4)
    model = nn.Sequential(Holder(layer), Holder(layer))
    nn.init.uniform_(layer.bias)
    (copy,) = fresh_copies(model, 1)
    assert bool((copy.get_parameter("0.layer.bias") == 3).all())
    assert copy.get_submodule("0.layer") is copy.get_submodule("1.layer")


def test_an_initialisation_that_n_does_not_repeat_is_a_warning() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            nn.init.normal_(self.layer.weight, 0, 0.001)
            nn.init.zeros_(self.layer.bias)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y

    message = (
        r"n=2: the copies differ from what the constructor of Small makes: layer.bias is 0 "
        r"throughout, and random in the copies\. .*a factory instead of the module"
    )
    with pytest.warns(UserWarning, match=message) as told:
        widepack.fuse(Small(), draw(5, 4), n=2, validate=False)
    assert told[0].filename == __file__
    assert not widepack.fuse(
        Small, draw(5, 4), n=2, validate=False
    ).layer.bias.any()  # a factory runs the constructor

    tied = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    tied[1].weight = tied[0].weight
    with pytest.warns(
        UserWarning, match=r": 0.weight and 1.weight are one tensor, drawn in the copies as Linear does"
    ):
        fresh_copies(tied, 2)


def test_a_reset_that_fails_is_reported() -> None:
    class Asking(nn.Sequential):
        def reset_parameters(self, gain: float) -> None:
            raise AssertionError

    with pytest.raises(
        UsageError, match=r"n=2: Asking.reset_parameters\(\) failed \(TypeError: .*'gain'\). Give a factory"
    ):
        fresh_copies(Asking(nn.Linear(3, 3)), 2)


@pytest.mark.extended
def test_n_members_of_a_factory() -> None:
    fused = widepack.fuse(lambda: Mlp().eval(), draw(5, 4), n=3, validate=False)
    with torch.no_grad():
        close(fused(draw(2, 4)), torch.stack([m(draw(2, 4)) for m in fused]), rtol=1e-5, atol=1e-6)
    assert not torch.equal(fused.tensor_of("layers.0.weight")[0], fused.tensor_of("layers.0.weight")[1])


def test_a_member_is_copied_over_another() -> None:
    modules = members(Cnn, 4)
    fused = widepack.fuse(modules, draw(4, 3, 8, 8), validate=False)
    x = draw(2, 3, 8, 8, seed=1)
    with torch.no_grad():
        before = fused(x)
        weight = fused.conv1.weight
        assert fused.copy_(1, 3) is fused
        after = fused(x)
    assert fused.conv1.weight is weight
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])
    close(after[1], before[3])
    assert not torch.allclose(after[1], before[1])
    for name, value in fused.unfuse()[1].state_dict().items():
        assert torch.equal(value, modules[3].state_dict()[name])
    with pytest.raises(UsageError, match="there is no member 4; there are 4, counted from 0"):
        fused.copy_(0, 4)


class Dropped(nn.Module):
    """Applies several dropouts to one value, and answers with the value too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(6, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.relu(self.first(x)) + 1
        return {
            "one": nn.functional.dropout(h, 0.5, self.training),
            "two": torch.dropout(h, 0.75, self.training),
            "three": self.drop(h),
            "h": h,
        }


def test_each_dropout_reads_the_value_before_it() -> None:
    model: Any = Dropped().eval()
    x = draw(16, 5, 6)
    fused = widepack.fuse(model, x, n=32, dropout="on")
    with torch.no_grad():
        y, plain = fused(x), model(x)
    close(y["h"], plain["h"].expand_as(y["h"]))
    for name, factor in (("one", 2), ("two", 4), ("three", 2)):
        kept = y[name] != 0
        close(y[name][kept], factor * y["h"][kept])
        assert abs(float(kept.float().mean()) - 1 / factor) < 0.03, name


def test_stochastic_passes_of_one_checkpoint() -> None:
    """Weights and values before the first dropout exist once; each pass draws separately."""
    torch.manual_seed(0)
    model: Any = Noisy().eval()
    x = draw(16, 5, 6)
    fused = widepack.fuse(model, x, n=64, dropout="on")
    assert fused.first.weight.shape == (8, 6)
    with torch.no_grad():
        y, plain = fused(x), model(x)
        again = fused(x)
    assert all(v.shape == (64, *plain[k].shape) for k, v in y.items())
    close(y["h"], plain["h"].expand_as(y["h"]))
    kept = y["drop"] != 0
    close(y["drop"][kept], 2 * y["h"][kept])
    share = kept[:, plain["h"] > 0].float()
    assert 0.47 < float(share.mean()) < 0.53
    for name in ("drop", "attend"):
        assert all(not torch.equal(y[name][i], y[name][j]) for i in range(8) for j in range(i))
        assert not torch.equal(y[name], again[name])
    close(y["drop"].mean(0), plain["h"], atol=0.6, rtol=0.6)
    # the masks of two passes are independent: one value in four is in both
    both = (share[0::2] * share[1::2]).mean()
    assert 0.23 < float(both) < 0.27
    assert torch.equal(fused.unfuse()[63].get_parameter("attend.in_proj_weight"), model.attend.in_proj_weight)


@pytest.mark.slow
def test_stochastic_passes_of_a_recurrent_network() -> None:
    """torch does not apply the dropout between the layers of a GRU in eval mode."""
    model = nn.GRU(3, 4, num_layers=2, dropout=0.5, batch_first=True).eval()
    x = draw(2, 5, 3)
    fused = widepack.fuse(model, x, n=8, dropout="on")
    with torch.no_grad():
        y = fused(x)[0]
    assert all(not torch.equal(y[i], y[j]) for i in range(8) for j in range(i))


def test_stochastic_passes_of_several_members_and_their_gradients() -> None:
    modules = members(lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)))
    fused = widepack.fuse(modules, draw(5, 4), dropout="on")
    x = draw(7, 4)
    y = fused(x)
    assert y.shape == (3, 7, 3)
    (y * 1.0).sum().backward()
    assert fused.get_parameter("0.weight").grad is not None
    with torch.no_grad():
        mean = torch.stack([fused(x) for _ in range(400)]).mean(0)
        close(mean, torch.stack([m(x) for m in modules]), atol=0.15, rtol=0.1)


def test_invalid_dropout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="dropout is on, but Mlp draws nothing in eval mode: it has no dropout"
    ):
        widepack.fuse(Mlp().eval(), draw(4, 4), n=3, dropout="on")
    with pytest.raises(UsageError, match="dropout is True; it is"):
        widepack.fuse(members(Mlp), draw(4, 4), dropout=True)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    fused = widepack.fuse(model, draw(4, 4), n=3, dropout="on")
    with pytest.raises(
        UsageError,
        match=r"1.running_mean, 1.running_var, 1.num_batches_tracked would change in this mode, "
        r"and is one buffer for all 3 passes",
    ):
        fused.train()(draw(4, 4))

    class InTrainModeAlone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return nn.functional.dropout(y) if self.training else y

    modules = [InTrainModeAlone().train() for _ in range(2)]
    with pytest.raises(
        UsageError, match="dropout is on, but the program of InTrainModeAlone draws no random numbers"
    ):
        widepack.fuse(modules, draw(4, 4), dropout="on", validate=False).save(tmp_path / "a.wide")
    assert not (tmp_path / "a.wide").exists()


def test_the_packed_form() -> None:
    modules = members(Cnn)
    body = [nn.Sequential(m.conv1, m.norm1, nn.ReLU(), m.conv2) for m in modules]
    for m in body:
        m.eval()
    fused = widepack.fuse(body, draw(4, 3, 8, 8), packed=True, validate=False)
    xs = draw(3, 5, 3, 8, 8, seed=1)
    packed = widepack.pack(list(xs))
    assert packed.shape == (5, 9, 8, 8)
    assert torch.equal(packed, widepack.pack(xs))
    with torch.no_grad():
        y = fused(packed)
        assert y.shape == (5, 24, 3, 3)
        for part, m, x in zip(widepack.unpack(y, 3), body, xs):
            close(part, m(x), rtol=1e-5, atol=1e-6)
        close(fused(xs[0]), widepack.pack([m(xs[0]) for m in body]), rtol=1e-5, atol=1e-6)
    fused.train()(packed).sum().backward()
    with pytest.raises(
        InputError,
        match=r"input input has 6 channels at axis 1, \[5, 6, 8, 8\]. A packed call takes 3 "
        r"members' 3 side by side, 3\*3, or 3 for all of them",
    ):
        fused(packed[:, :6])
    with pytest.raises(
        InputError,
        match=r"unpack takes \[B, N\*C, ...\] with a multiple of 4 channels at axis 1; got \[5, 9, 8, 8\]",
    ):
        widepack.unpack(packed, 4)
    with pytest.raises(InputError, match=r"pack takes N tensors of one shape; got \[2\], \[3\]"):
        widepack.pack([torch.ones(2), torch.ones(3)])


def test_a_fused_module_is_saved_as_an_artifact(tmp_path: Path) -> None:
    modules: list[Any] = members(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))
    fused = widepack.fuse(modules, draw(5, 4), validate=False).train()
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.5)
    fused(draw(5, 4)).square().sum().backward()
    optimizer.step()
    report = fused.save(tmp_path / "a.wide", names=["a", "b", "c"], pt2=False)
    assert report.members == ("a", "b", "c")
    ens = widepack.load(tmp_path / "a.wide")
    assert torch.equal(ens.state_dict("b")["0.weight"], fused.tensor_of("0.weight")[1])
    x = draw(7, 4, seed=2)
    with torch.no_grad():
        close(ens(x), fused.eval()(x), rtol=1e-5, atol=1e-6)
    assert fused.training is False
    (mine,) = [r for r in fused.current_entry().runners if not r.gradients]
    theirs = ens.entry("forward").programs.for_sizes("shared", {"B": 7}).program
    assert [(n.op, n.args) for n in mine.program.nodes] == [
        (n.op, n.args) for n in theirs.nodes
    ]  # eval mode runs the program that load runs


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("passes", [True, False])
def test_dropout_that_is_on_is_saved_on(tmp_path: Path, passes: bool) -> None:
    """Passes of one model store its weights once. Members with different weights each draw."""
    modules: list[Any] = members(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)),
        1 if passes else 3,
    )
    fused = widepack.fuse(
        modules[0] if passes else modules, draw(5, 4), n=3 if passes else None, dropout="on", validate=False
    )
    with torch.no_grad():
        fused.get_parameter("0.bias").add_(1.0)  # save writes the current weights
    report = fused.save(tmp_path / "a.wide", names=["a", "b", "c"])
    assert report.members == ("a", "b", "c")
    assert (report.weights["stacked"] == 0) is passes
    assert report.verification["draws"].startswith("at rest")
    ens = widepack.load(tmp_path / "a.wide")
    assert torch.equal(ens.state_dict("b")["0.bias"], fused.unfuse()[1].state_dict()["0.bias"])
    x = draw(64, 4, seed=2)
    with torch.no_grad():
        assert not torch.equal(ens(x), ens(x))
        if passes:
            assert not torch.equal(ens(x)[0], ens(x)[1])
        torch.manual_seed(0)
        theirs, mine = (torch.stack([f(x) for _ in range(400)]) for f in (ens, fused.eval()))
        off = theirs.mean(0) - torch.stack(
            [m(x) for m in fused.unfuse()]
        )  # a linear layer follows, so the mean of all passes is the answer without dropout
        assert float((off / (theirs.std(0) / 20 + 1e-6)).abs().max()) < 6  # standard errors
        close(theirs.std(0).mean((1, 2)), mine.std(0).mean((1, 2)), atol=0.0, rtol=0.05)


def test_calls_in_inference_mode_and_answers_outside_of_it() -> None:
    modules = members(Mlp)
    with torch.inference_mode():
        fused = widepack.fuse(modules, draw(5, 4), validate=False)
        y = fused(draw(5, 4))
    assert not y.requires_grad
    with torch.no_grad():
        teacher = fused(draw(5, 4))
    student = torch.ones(3, requires_grad=True)
    (teacher * student).sum().backward()  # autograd refuses inference tensors here
    with torch.inference_mode():
        fused.train()(draw(5, 4))
    fused(draw(5, 4)).sum().backward()
    assert fused.get_parameter("layers.0.weight").grad is not None


def test_a_parameter_may_have_a_name_of_torchs_graph_modules() -> None:
    class Coded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.graph = nn.Parameter(torch.randn(4)), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.graph(x * self.code)
            return y

    modules = members(Coded)
    fused = widepack.fuse(modules, draw(5, 4))
    torch.testing.assert_close(
        fused(draw(2, 4)), torch.stack([m(draw(2, 4)) for m in modules]), rtol=1e-5, atol=1e-6
    )


def test_parts_of_containers_by_place_and_key() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.heads = (
                nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
                nn.ModuleDict({"a": nn.Linear(4, 3)}),
            )
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            y: Tensor = self.heads["a"](x) * self.scales[0]
            return y

    fused = widepack.fuse(members(Holder), draw(5, 4), validate=False)
    assert fused.layers[-1].weight is fused.get_parameter("layers.1.weight")
    assert fused.heads["a"].weight is fused.get_parameter("heads.a.weight")
    assert fused.scales[0] is fused.get_parameter("scales.0")
    assert len(list(fused.layers)) == 2
    with pytest.raises(IndexError):
        fused.layers[2]
