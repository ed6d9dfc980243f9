"""Reads which outputs a client requests: leaves of the answer, and figures such as `logits.mean`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from widepack.errors import UsageError
from widepack.inference.reduced_answer import MIXTURE, Reduction
from widepack.reduction.figures import FIGURES, requested

from ..errors import RequestError
from ..protocol.shown import shown
from .layout import EntryLayout

_FIGURE = re.compile(r"(?P<leaf>.+)\.(?P<figure>[a-z_]+(?:\([^()]*\))?)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WantedOutput:
    """One output of a call.

    Attributes:
        name: Its name on the wire.
        leaf: The number of the output in the manifest.
        figure: The figure of the members' answers; "" for the answers themselves.
        of: What the figure is computed of, as `ens.reduce` takes it.
        dim: The dim of the classes in a member's answer.
        calibrated: Whether the recorded calibration is applied.
    """

    name: str
    leaf: int
    figure: str = ""
    of: str | None = None
    dim: int = -1
    calibrated: bool = False


Wanted = tuple[WantedOutput, ...]
"""The outputs of a call, in the order of the answer."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the server was started with.

    Attributes:
        outputs: The outputs of a model of all members; empty for the answers themselves.
        of: What figures are computed of.
        dim: The dim of the classes.
        calibrated: Whether figures are calibrated.
    """

    outputs: tuple[str, ...] = ()
    of: str | None = None
    dim: int = -1
    calibrated: bool = False


def answers(layout: EntryLayout) -> Wanted:
    """Returns the answers themselves, and the states."""
    return tuple(WantedOutput(o.name, k) for k, o in enumerate(layout.outputs))


def wanted_output(
    layout: EntryLayout, name: str, options: Mapping[str, Any], defaults: Defaults, *, figures: bool
) -> WantedOutput:
    """Reads the name of an output.

    Args:
        layout: The entry.
        name: The name on the wire.
        options: `of`, `dim` and `calibrated` of a figure, as the client gives them.
        defaults: Those that the client does not give.
        figures: Whether the model has figures: all members answer.

    Raises:
        RequestError: There is no such output, or it has no such figure.
    """
    leaves = {o.name: k for k, o in enumerate(layout.outputs)}
    if name in leaves:
        if options:
            raise RequestError(
                f"output {name}: the parameters of, dim and calibrated are of a figure, such as {name}.mean"
            )
        return WantedOutput(name, leaves[name])
    found = _FIGURE.fullmatch(name)
    if found is None or found["leaf"] not in leaves:
        raise RequestError(
            f"there is no output {name[:80]!r}; the outputs are {', '.join(leaves)}{_hint(layout, figures)}"
        )
    if not figures:
        raise RequestError(
            f"output {name[:80]}: figures are of the answers of all members, and this model answers with "
            "one; request them from the model of the ensemble"
        )
    leaf = layout.outputs[leaves[found["leaf"]]]
    if leaf.state:
        raise RequestError(f"output {name[:80]}: a state has no figures")
    if leaf.ragged:
        raise RequestError(f"output {name[:80]}: the members' answers have different shapes, and no figures")
    if not leaf.datatype.dtype.is_floating_point:
        raise RequestError(
            f"output {name[:80]}: {leaf.name} is {leaf.datatype.name}, and figures are of floating numbers; "
            f"request {leaf.name}, and count the members' answers"
        )
    of, dim = options.get("of", defaults.of), options.get("dim", defaults.dim)
    if of is not None and not isinstance(of, str):
        raise RequestError(
            f"output {name[:80]}: of is {shown(of, quoted=False)}; it is softmax, sigmoid or probabilities"
        )
    if type(dim) is not int or not -len(leaf.sizes) <= dim < max(len(leaf.sizes), 1):
        raise RequestError(
            f"output {name[:80]}: dim is {shown(dim, quoted=False)}; {leaf.name} has {len(leaf.sizes)} dims"
        )
    figure = found["figure"]
    calibrated = options.get("calibrated", defaults.calibrated)
    if not isinstance(calibrated, bool):
        raise RequestError(
            f"output {name[:80]}: calibrated is {shown(calibrated, quoted=False)}; it is true or false"
        )
    if figure == MIXTURE:
        raise RequestError(f"output {name[:80]}: mixture is two tensors; request mean and var")
    try:
        requested([figure], of, weighted=False)
        if calibrated:
            described = layout.entry.entry.outputs[leaves[found["leaf"]]]
            Reduction([figure], of, dim=dim).calibrate(layout.entry.calibration, [described])
    except UsageError as e:
        raise RequestError(f"output {name[:80]}: {e}") from None
    kind = FIGURES[figure.partition("(")[0]].needs
    by_class = of == "softmax" or (of != "sigmoid" and kind in ("votes", "probabilities"))
    if by_class and leaf.rows is not None and dim % len(leaf.sizes) == leaf.rows.dim:
        raise RequestError(
            f"output {name[:80]}: dim {dim} of the members' answers is the batch: {figure} needs a "
            "dim of classes. For labels give of=sigmoid; for classes in another dim give dim"
        )
    return WantedOutput(name, leaves[found["leaf"]], figure.replace(" ", ""), of, dim, calibrated)


def _hint(layout: EntryLayout, figures: bool) -> str:
    if not figures:
        return ""
    first = next((o.name for o in layout.outputs if not o.state and not o.ragged), None)
    return "" if first is None else f", and figures such as {first}.mean"


def rows_dim(layout: EntryLayout, one: WantedOutput, stacked: bool) -> int:
    """Returns in which dim of an output the rows are.

    stacked: whether the answers have a member axis in front.
    """
    described = layout.outputs[one.leaf]
    assert described.rows is not None
    dim = described.rows.dim
    if not one.figure:
        return dim + stacked
    name = one.figure.partition("(")[0]
    if not FIGURES[name].classes and one.of != "sigmoid" and one.dim % len(described.sizes) < dim:
        return dim - 1
    return dim


def described_output(layout: EntryLayout, one: WantedOutput, members: int | None) -> tuple[str, list[int]]:
    """Returns the datatype and the sizes of an output for the metadata of a model.

    members: N if the answers have a member axis, else None.
    """
    leaf = layout.outputs[one.leaf]
    sizes = list(leaf.sizes)
    if not one.figure:
        return leaf.datatype.name, [*([members] if members is not None else []), *sizes]
    name = one.figure.partition("(")[0]
    if not FIGURES[name].classes and one.of != "sigmoid" and sizes:
        del sizes[one.dim % len(sizes)]
    if name in ("vote", "votes"):
        return "INT64", sizes
    return ("FP64" if leaf.datatype.name == "FP64" else "FP32"), sizes
