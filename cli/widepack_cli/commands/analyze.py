"""`widepack analyze`: shows what a call of a model costs, as formulas and as numbers.

An artifact is read without torch; `analyze_model.py` derives the costs of a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import click

from widepack.system.devices import DEVICES, Device
from widepack_artifacts.costs import Costs, stored_costs
from widepack_artifacts.errors import plain
from widepack_artifacts.formulas import Number
from widepack_artifacts.reader import opened
from widepack_bench.measure.devices import HERE, measured_here

from ..shared.cost_document import document
from ..shared.cost_groups import WAYS, groups
from ..shared.cost_lines import device_lines, table, title, totals, uncounted
from ..shared.cost_page import page
from ..shared.cost_times import Roofline
from ..shared.failures import Refusal
from ..shared.options import emit, entry_named, entry_option, example, json_option, stdout_kept

NOT_COUNTED = 3
"""The exit code of `--strict` if an op has no formula."""
PLANNED = 8
"""The members that `--wide` plans for if `--at` gives none."""
_VALUE = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*([0-9]{1,18})\s*\Z", re.ASCII)


@click.command(
    epilog=example(
        "widepack analyze torch.nn.Linear --model-arg in_features=64 --model-arg out_features=8 "
        '--input "input=float32[B,64]"',
        'widepack analyze net.py:make --input "x=float32[B,3,32,32]" --at B=8,N=16',
        'widepack analyze llama/ --input "input_ids=int64[B,T]" '
        '--input "attention_mask=int64[B,T]:0..1" --at B=1,T=2048',
        "widepack analyze ens.wide --at B=32 --by op",
        "widepack analyze ens.wide --at B=32 --wide",
    )
)
@click.argument("subject", metavar="MODEL|ARTIFACT")
@entry_option
@click.option(
    "--model-arg",
    "model_args",
    metavar="K=V",
    multiple=True,
    help="An argument of the factory, such as width=64. V is read as JSON if possible. Repeatable.",
)
@click.option(
    "--input",
    "inputs",
    metavar="SPEC",
    multiple=True,
    help="An input of the model, in the form of `build --input`. Repeatable.",
)
@click.option(
    "--at",
    metavar="NAME=NUMBER,...",
    help="Sizes at which numbers are shown: every dim, N (members), w and a (bits of an element of weights "
    "and of other values).",
)
@click.option(
    "--by", type=click.Choice(WAYS), default="layer", show_default=True, help="What a line of the table is."
)
@click.option(
    "--wide",
    is_flag=True,
    help="Costs of the wide program, as widepack lowers it for N members, or of the artifact's, for a CPU. "
    "Default: of the model as it is written, where what no member changes counts once.",
)
@click.option(
    "--device",
    metavar="NAME",
    help=f"With --at: the least time on a device. {HERE} measures this machine's processor; data sheets: "
    f"{', '.join(DEVICES)}.",
)
@click.option(
    "--html",
    "html_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"With --at: write a page with a treemap and a roofline plot. Without --device: {HERE}.",
)
@click.option("--strict", is_flag=True, help=f"Exit with {NOT_COUNTED} if an op has no formula.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    subject: str,
    entry: str,
    model_args: tuple[str, ...],
    inputs: tuple[str, ...],
    at: str | None,
    by: str,
    wide: bool,
    device: str | None,
    html_file: Path | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Show what one call of a model costs: FLOP, bytes, kernels and peak memory.

    MODEL is a factory (package.module:factory, path/file.py:factory), a class (torch.nn.Linear), or a folder
    with the config.json of a Hugging Face model. Its weights need no memory. Every cost is a formula over the
    dims of the inputs and the number of members N; --at gives numbers. What all members share is counted
    once, everything else for each member.
    """
    given = _at(at)
    device = _checked_device(device, at, html_file)
    with stdout_kept(True):
        name, costs, members = _costs(subject, entry, model_args, inputs, wide, given or {})
    values = None if given is None else _values(costs, given, members)
    found = groups(costs, by)
    roofline = None
    if device is not None and values is not None:
        roofline = Roofline(costs, _device(device, costs, values), values)
    if as_json:
        emit({"subject": subject, "entry": name, **document(costs, found, by, values, roofline)})
    else:
        lines = [*title(costs, subject, name), "", *totals(costs, values), ""]
        lines += [] if roofline is None else [*device_lines(costs, roofline), ""]
        lines += [*table(costs, found, values, by, roofline), *uncounted(costs)]
        click.echo(plain("\n".join(lines)))
    if html_file is not None and values is not None and roofline is not None:
        layers = groups(costs, "layer")
        html_file.write_text(page(costs, layers, values, roofline, subject, name), encoding="utf-8")
        click.echo(f"wrote {html_file}", err=True)
    if strict and costs.lower_bound:
        ctx.exit(NOT_COUNTED)


def _costs(
    subject: str,
    entry: str,
    model_args: tuple[str, ...],
    inputs: tuple[str, ...],
    wide: bool,
    given: Mapping[str, int],
) -> tuple[str, Costs, int]:
    """Returns the entry, its costs, and the number of members.

    wide: the costs are those of the wide program. given: the numbers of `--at`.
    """
    if not (Path(subject) / "manifest.json").is_file():
        from . import analyze_model

        if subject.endswith(".wide") and not Path(subject).exists():
            raise Refusal(f"{subject}: it does not exist; give an artifact, or a factory with --input")
        if not inputs:
            raise click.UsageError(
                f'{subject}: a model needs its inputs: --input "x=float32[B,3,32,32]"; an artifact is a '
                "folder with a manifest.json"
            )
        planned = given.get("N", PLANNED) if wide else 0
        return entry or "forward", analyze_model.of_model(subject, model_args, inputs, entry, planned), 1
    if inputs or model_args:
        raise click.UsageError("--input and --model-arg describe a model; leave them out with an artifact")
    reader, stored = opened(subject, stored_costs)
    manifest = reader.manifest
    name = entry_named(manifest.entries, entry, manifest.entry)
    if wide:
        from . import analyze_model

        stored = {name: analyze_model.of_wide_artifact(reader, name, given)}
    elif name not in stored:
        from . import analyze_model

        stored = {name: analyze_model.of_artifact(reader, name)}
    return name, stored[name], len(manifest.members)


def _checked_device(name: str | None, at: str | None, html_file: Path | None) -> str | None:
    """Returns the device of `--device`, and `here` for a page without one. Raises: Refusal, UsageError."""
    given = "--device" if name is not None else "--html" if html_file is not None else ""
    if given and at is None:
        raise click.UsageError(f"{given} gives times at sizes: give --at too")
    if name is not None and name not in (HERE, *DEVICES):
        raise Refusal(f"--device {name!r} is not known; known: {', '.join((HERE, *DEVICES))}")
    return name or (HERE if html_file is not None else None)


def _device(name: str, costs: Costs, values: Mapping[str, Number]) -> Device:
    """Returns a device that has a rate for the model's dtype. Raises: Refusal."""
    if name == HERE:
        numbers = costs.at(values)
        return measured_here(costs.dtype, int(numbers["weights"] + numbers["peak"]))
    found = DEVICES[name]
    if costs.dtype not in found.flops:
        raise Refusal(
            f"--device {name}: its data sheet has no rate for {costs.dtype}, the dtype of this model; it has "
            f"{', '.join(found.flops)}"
        )
    return found


def _at(text: str | None) -> dict[str, int] | None:
    """Returns the numbers of `--at`. Raises: Refusal."""
    if text is None:
        return None
    given: dict[str, int] = {}
    for part in text.split(","):
        found = _VALUE.match(part)
        if found is None or int(found[2]) < 1:
            raise Refusal(f"--at {part!r}: write NAME=NUMBER, for example B=8,N=16,w=16")
        if found[1] in given:
            raise Refusal(f"--at gives {found[1]} twice: {given[found[1]]} and {found[2]}")
        given[found[1]] = int(found[2])
    return given


def _values(costs: Costs, given: Mapping[str, int], members: int) -> dict[str, Number]:
    """Returns the values of all names in formulas. members: if none are given. Raises: OutsideDomain."""
    special = {n for n in (costs.members, "w", "a") if n not in costs.dims}
    return costs.values(
        {name: n for name, n in given.items() if name not in special},
        members=given.get(costs.members, members),
        weight_bits=given.get("w") if "w" in special else None,
        activation_bits=given.get("a") if "a" in special else None,
    )
