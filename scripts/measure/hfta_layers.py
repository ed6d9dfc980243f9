"""Makes the layers of HFTA's operator tests, and runs them through widepack in three ways.

| way | what is compared with each member alone |
|---|---|
| `fuse` | answers, gradients of inputs and weights, statistics, of `widepack.fuse(layers, sample)` |
| `fuse, no gradients` | answers under `torch.no_grad()`, as in HFTA's tests; also with one input for all |
| `wide layer` | what `fuse` compares, of `Wide*.from_modules(layers)` |

Each member has its own weights, statistics and inputs. Inputs are drawn from a normal distribution. A batch
norm runs ten steps, whose answers and last statistics are compared. The running variances that it begins with
are positive: with HFTA's, some of which are below zero, a batch norm answers NaN.

Inputs of more than `MOST` numbers for each member have fewer channels or rows. A random combination of the
values of a grid is a case too (`mixed`), because one value at a time leaves much out: no padding mode pads.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from database_cases import Case
from database_check import FusedMembers
from hfta_grids import LAYERS, Options, cases, text
from torch import Tensor, nn

import widepack
from widepack import primitives

WAYS = ("fuse", "fuse, no gradients", "wide layer")
MIXED = 4  # cases of random combinations, for each family
MOST = 2**18
CHANNELS = ("features", "channels", "in_channels")
FIXED = ("device", "steps")  # options that a mixed case does not change


class Steps(nn.Module):
    """A layer that is called once for each input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.layer(x) for x in inputs)


class Wide:
    """A fused module or a wide layer, with the calls that `FusedMembers` makes. It may have several steps."""

    def __init__(self, model: nn.Module, steps: bool) -> None:
        self.model, self.steps = model, steps
        self.prefix = "layer." if steps else ""
        self.call_each: Any = model.each if isinstance(model, widepack.Fused) else model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.model, args, kwargs)

    def each(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.call_each, args, kwargs)

    def _run(self, call: Any, args: Any, kwargs: Any) -> Any:
        return tuple(call(x) for x in args) if self.steps else call(*args, **kwargs)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((self.prefix + n, p) for n, p in self.model.named_parameters())

    def tensor_of(self, name: str) -> Tensor:
        name = name.removeprefix(self.prefix)
        return (
            self.model.tensor_of(name)
            if isinstance(self.model, widepack.Fused)
            else self.model.get_buffer(name)
        )


def through(way: str, case: Case) -> FusedMembers:
    """Returns what runs the members of a case in a way."""
    steps = isinstance(case.members[0], Steps)
    layers: list[Any] = [copy.deepcopy(m.layer if isinstance(m, Steps) else m) for m in case.members]
    args, kwargs = case.inputs[0]
    if way == "wide layer":
        wide_class = getattr(primitives, f"Wide{type(layers[0]).__name__}")
        return FusedMembers(case, Wide(wide_class.from_modules(layers), steps))
    sample = args[:1] if steps else args
    return FusedMembers(case, Wide(widepack.fuse(layers, sample, sample_kwargs=kwargs), steps))


# ---------------------------------------------------------------- the cases


def layer_cases(family: str) -> Iterator[tuple[str, Options]]:
    """Yields the name and the options of each case of a family: HFTA's, then the mixed ones."""
    grid = LAYERS[family]
    for name, options in cases(grid):
        changed = name.partition("[")[0]
        yield f"{family}/{name}", smaller(family, options, changed)
    chance = random.Random(family)
    found = 0
    while found < MIXED:
        drawn = {k: chance.choice((grid.defaults[k], *v)) for k, v in grid.values.items() if k not in FIXED}
        options = smaller(family, {**grid.defaults, **drawn}, "")
        if runs(family, options):
            found += 1
            words = ", ".join(f"{k} = {text(options[k])}" for k in drawn if options[k] != grid.defaults[k])
            yield f"{family}/mixed {found}: {words}", options


def runs(family: str, options: Options) -> bool:
    """Returns whether torch's own layer takes the options."""
    try:
        case = make_case("", family, {**options, "members": 1, "batch": 2, "steps": 1}, WAYS[1])
        with torch.no_grad():
            case.members[0](*case.inputs[0][0], **case.inputs[0][1])
    except (RuntimeError, ValueError, AssertionError):
        return False
    return True


def smaller(family: str, options: Options, changed: str) -> Options:
    """Returns options whose inputs have at most `MOST` numbers. changed: the option that stays."""
    options = dict(options)
    while numbers(family, options) > MOST:
        if changed != "batch" and options["batch"] > 2:
            options["batch"] //= 2
            continue
        channels = [k for k in CHANNELS if k in options and k != changed and options[k] > 1]
        if not channels:
            return options
        options[channels[0]] //= 2
    return options


def numbers(family: str, options: Options) -> int:
    """Returns how many numbers the inputs of one member have, over all steps."""
    if family == "Dropout2d":
        return 0  # HFTA's own sizes are needed for its statistics
    steps: int = options.get("steps", 1)
    return steps * sum(math.prod(s) for s in shapes(family, options))


def make_case(key: str, family: str, options: Options, way: str, ulps: float = 0.0) -> Case:
    """Makes the members and inputs of a case.

    Args:
        key: The name of the case.
        family: The family, for example `Conv2d`.
        options: The options of the case.
        way: One of `WAYS`.
        ulps: The error of a weight's gradient that is accepted beyond the bound (`database_cases.Case`).

    Returns:
        The case, as `database_check.outcome_of` takes it.
    """
    members: list[nn.Module] = []
    inputs = []
    steps = options.get("steps", 1)
    for i in range(options["members"]):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2000 + i)
            layer = make_layer(family, options).to(options["dtype"])
            _distinct(layer)
            layer.train(options.get("training", True))
            members.append(Steps(layer) if steps > 1 else layer)
            drawn = [tuple(draw(s, family, options) for s in shapes(family, options)) for _ in range(steps)]
            args = tuple(x for row in drawn for x in row)
            inputs.append((args, call_options(family, options)))
    return Case(key, members, inputs, gradients=way != "fuse, no gradients", ulps=ulps)


def _distinct(layer: nn.Module) -> None:
    """Gives a layer's weights, biases and statistics random values. Counts of batches are one number."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in layer.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn_like(buffer))
            elif name.endswith("running_var"):
                buffer.copy_(0.1 + torch.randn_like(buffer).abs())
            elif name.endswith("num_batches_tracked"):
                buffer.fill_(417)


def make_layer(family: str, options: Options) -> nn.Module:
    """Returns a module of torch with the options of a case."""
    o = options
    if family.startswith("Conv"):
        return make_conv(family, o)
    makes: dict[str, Callable[[], nn.Module]] = {
        "Linear": lambda: nn.Linear(o["in_features"], o["out_features"], bias=o["bias"]),
        "BatchNorm1d": partial(_batch_norm, nn.BatchNorm1d, o),
        "BatchNorm2d": partial(_batch_norm, nn.BatchNorm2d, o),
        "LayerNorm": lambda: nn.LayerNorm(o["shape"], elementwise_affine=o["affine"]),
        "Embedding": lambda: nn.Embedding(o["rows"], o["embedding_dim"], padding_idx=o["padding_idx"]),
        "MaxPool2d": lambda: nn.MaxPool2d(
            o["kernel_size"],
            stride=o["stride"],
            padding=o["padding"],
            dilation=o["dilation"],
            return_indices=o["return_indices"],
            ceil_mode=o["ceil_mode"],
        ),
        "AdaptiveAvgPool2d": lambda: nn.AdaptiveAvgPool2d(o["output_size"]),
        "Dropout2d": lambda: nn.Dropout2d(o["p"]),
        "MultiheadAttention": lambda: nn.MultiheadAttention(o["embed_dim"], o["num_heads"], bias=o["bias"]),
    }
    return makes[family.partition(",")[0]]()


def make_conv(family: str, options: Options) -> nn.Module:
    """Returns a convolution. An output padding or an output size needs a stride."""
    names = ("stride", "padding", "dilation", "groups", "bias", "padding_mode", "output_padding")
    given = {k: options[k] for k in names if k in options}
    if options.get("output_padding"):
        given["stride"] = given["dilation"] = options["output_padding"] + 1
    if options.get("output_size"):
        given["stride"] = 2
    made: nn.Module = getattr(nn, family)(
        options["in_channels"], options["out_channels"], options["kernel_size"], **given
    )
    return made


def _batch_norm(norm: type[nn.Module], o: Options) -> nn.Module:
    return norm(
        o["features"],
        momentum=o["momentum"],
        affine=o["affine"],
        track_running_stats=o["track_running_stats"],
    )


def shapes(family: str, options: Options) -> list[tuple[int, ...]]:
    """Returns the shapes of one member's inputs."""
    o, batch = options, options["batch"]
    channels = next((o[k] for k in CHANNELS if k in o), 0)
    if family.startswith("MultiheadAttention"):
        return [(o["length"], batch, o["embed_dim"])] * 3
    if family == "Linear":
        return [(batch, o["length"], o["in_features"])]
    if "shape" in o:
        return [(batch, *o["shape"])]
    if "side" in o:
        return [(batch, channels, o["side"], o["side"])]
    return [(batch, channels, o["length"]) if o["length"] else (batch, channels)]


def draw(shape: tuple[int, ...], family: str, options: Options) -> Tensor:
    """Returns an input of a shape."""
    if family == "Embedding":
        return torch.randint(options["rows"], shape, dtype=options["indices"])
    return torch.randn(shape, dtype=options["dtype"])


def call_options(family: str, options: Options) -> dict[str, Any]:
    """Returns the keyword arguments of a call."""
    if options.get("output_size") and family == "ConvTranspose2d":
        return {"output_size": list(options["output_size"])}
    if not family.startswith("MultiheadAttention"):
        return {}
    length = options["length"]
    mask = torch.full((length, length), float("-inf"), dtype=options["dtype"]).triu(1)
    return {"need_weights": options["need_weights"], **({"attn_mask": mask} if options["causal"] else {})}
