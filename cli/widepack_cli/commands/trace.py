"""`widepack trace`: shows how each op of the member runs for all members.

For an artifact it reads the programs and the plan; `trace_model.py` traces a model before any build.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from widepack_artifacts.errors import plain
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.reader import Reader, opened
from widepack_artifacts.wide_program import WideProgram
from widepack_bench.text import columns, plural

from ..shared.failures import Refusal
from ..shared.options import (
    emit,
    entry_named,
    entry_option,
    example,
    json_option,
    model_options,
    readable,
    stdout_kept,
)
from ..shared.trace_rows import Step, becomes, derived, kinds, short, steps


@click.command(
    epilog=example(
        "widepack trace ens.wide",
        "widepack trace ens.wide --device cuda --pattern each",
        "widepack trace ens.wide --strategy sequential --source",
        'widepack trace --model net.py:make --input "x=float32[B,3,32,32]" -n 8',
        "widepack trace -m resblock -n 20",
    )
)
@click.argument("artifact", metavar="[ARTIFACT]", required=False, type=click.Path(path_type=Path))
@entry_option
@model_options
@click.option(
    "--input",
    "inputs",
    metavar="SPEC",
    multiple=True,
    help="With --model: an input, in the form of `build --input`. Repeatable.",
)
@click.option(
    "-m",
    "--block",
    metavar="[NAME]",
    is_flag=False,
    flag_value="",
    help="A reference block (mlp, resblock, ...) instead of --model. Without a name: list the blocks.",
)
@click.option(
    "-n",
    "--members",
    type=click.IntRange(min=1),
    help="With --model or -m: show kinds and strategies for N members.",
)
@click.option("--device", default="cpu", show_default=True, help="Show the plan for this kind of device.")
@click.option(
    "--pattern",
    type=click.Choice(["shared", "each"]),
    default="shared",
    show_default=True,
    help="Show the plan for this pattern of inputs.",
)
@click.option("--batch", type=click.IntRange(min=1), help="Show the plan for this batch size.")
@click.option(
    "--strategy", "only", multiple=True, help="Show only nodes that run with this strategy. Repeatable."
)
@click.option(
    "--source",
    is_flag=True,
    help="Show the line of your code that each node comes from (always shown with --model).",
)
@json_option
def command(
    artifact: Path | None,
    entry: str,
    model: str | None,
    model_args: tuple[str, ...],
    inputs: tuple[str, ...],
    block: str | None,
    members: int | None,
    device: str,
    pattern: str,
    batch: int | None,
    only: tuple[str, ...],
    source: bool,
    as_json: bool,
) -> None:
    """Show how each op of the member runs for all members of ARTIFACT, and why.

    Each line is a node of the member program: the kinds that it reads and makes (Shared, Stacked, Ragged),
    the strategy, the reason, and its ops in the wide program. Without an artifact, --model and --input show
    the member program with the shapes of every node, and with -n what would run for N members.
    """
    given = [
        name
        for name, value in (("ARTIFACT", artifact), ("--model", model), ("-m", block))
        if value is not None
    ]
    if len(given) != 1:
        raise click.UsageError(
            "give one of ARTIFACT, --model and -m" + (f", not {' and '.join(given)}" if given else "")
        )
    if artifact is None:
        _before(model, model_args, inputs, block, (entry, members, pattern, device, batch), only, as_json)
        return
    if inputs or model_args or members:
        raise click.UsageError(
            "--input, --model-arg and -n describe a model before a build; leave them out with ARTIFACT"
        )
    _artifact(artifact, entry, device, pattern, batch, only, source, as_json)


def _before(
    model: str | None,
    model_args: tuple[str, ...],
    inputs: tuple[str, ...],
    block: str | None,
    requested: tuple[str, int | None, str, str, int | None],
    only: tuple[str, ...],
    as_json: bool,
) -> None:
    """Traces a model or a reference block before any build."""
    from . import trace_model

    if block == "":
        click.echo("\n".join(columns([["block", "description", "inputs"], *trace_model.blocks()])))
        return
    entry, members, pattern, device, batch = requested
    if only and members is None:
        raise click.UsageError("--strategy: strategies depend on the number of members; give -n")
    if block is not None and (inputs or model_args):
        raise click.UsageError(
            "the inputs of a reference block are fixed; leave out --input and --model-arg, or -m"
        )
    with stdout_kept(True):
        if block is not None:
            name, make, inputs = trace_model.block(block)
        else:
            assert model is not None
            if not inputs:
                raise click.UsageError('--model needs its inputs: --input "x=float32[B,3,32,32]"')
            name, make = model, trace_model.factory(model, model_args)
        found = trace_model.trace(name, make, inputs, entry, members, pattern, device, batch)
    of = {s.node: s for s in found.steps}
    shown = [s for s in found.shapes if not only or (s.node in of and of[s.node].strategy in only)]
    if as_json:
        document = found.to_json() | {"members": members, "device": device, "pattern": pattern}
        emit(
            document
            | {"steps": [step for step, shape in zip(document["steps"], found.shapes) if shape in shown]}
        )
        return
    head = [
        "node",
        "op",
        "in",
        "out",
        *(["kinds", "strategy", "becomes", "why"] if members else []),
        "source",
    ]
    rows = []
    for s in shown:
        step = of.get(s.node)
        how = [kinds(step), step.strategy, becomes(step), step.why] if step else []
        rows.append([s.node, short(s.op), ", ".join(s.takes) or "()", s.out or "()", *how, s.source])
    click.echo(
        plain(
            "\n".join(
                [
                    trace_model.title(found, members, device, pattern),
                    "",
                    *(columns([head, *rows]) if rows else ["no node runs with this strategy"]),
                ]
            )
        )
    )
    if found.plan is not None:
        click.echo(plain("\n".join(["", *_regions(found.plan)])))


def _artifact(
    artifact: Path,
    entry: str,
    device: str,
    pattern: str,
    batch: int | None,
    only: tuple[str, ...],
    source: bool,
    as_json: bool,
) -> None:
    """Traces the files of an artifact."""

    def read(reader: Reader) -> tuple[str, WideProgram, list[Step]]:
        name = entry_named(reader.manifest.entries, entry, reader.manifest.entry)
        wide = find(reader.manifest, name, device, pattern, batch)
        return (
            name,
            wide,
            steps(
                reader.program(reader.manifest.entries[name].member[0]), reader.program(wide.file), wide.plan
            ),
        )

    with readable(artifact):
        reader, (entry, wide, found) = opened(artifact, read)
        shown = [s for s in found if not only or s.strategy in only]
        if as_json:
            emit(
                {
                    "path": str(artifact),
                    "entry": entry,
                    "device": device,
                    "pattern": pattern,
                    "batch": list(wide.batch),
                    "steps": [asdict(s) for s in shown],
                }
            )
            return
        head = ["node", "op", "kinds", "strategy", "becomes", "why", *(["source"] if source else [])]
        rows = [
            [s.node, short(s.op), kinds(s), s.strategy, becomes(s), s.why, *([s.source] if source else [])]
            for s in shown
        ]
        click.echo(
            plain(
                "\n".join(
                    [
                        _title(artifact, entry, wide, reader.manifest, len(found)),
                        "",
                        *(columns([head, *rows]) if rows else ["no node runs with this strategy"]),
                    ]
                )
            )
        )
        names = {s.node for s in found}
        choices = set(wide.plan.get("choices", {}))
        folded = choices - names - {n for made in derived(choices, names).values() for n in made}
        early = (
            [f"{plural(len(folded), 'node')} more, computed from weights only: they run once, at load"]
            if folded
            else []
        )
        click.echo(plain("\n".join(["", *_regions(wide.plan), *early])))


def _regions(plan: dict[str, Any]) -> list[str]:
    """Returns the reasons of the regions; equal reasons are joined."""
    why: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for region in plan.get("regions", []):
        why.setdefault((region["strategy"], region["because"]), []).append(region)
    return [
        f"{strategy}: {'region' if len(rows) == 1 else 'regions'} {', '.join(r['name'] for r in rows)}, "
        f"{plural(sum(len(r['nodes']) for r in rows), 'node')}: {because}"
        for (strategy, because), rows in why.items()
    ]


def find(manifest: Manifest, entry: str, device: str, pattern: str, batch: int | None) -> WideProgram:
    """Finds the wide program that a call on this machine would run.

    A plan that was measured on this machine comes before the predicted plan. Without a batch, it is
    the program of the smallest batches.

    Raises:
        Refusal: There is none; the message lists the programs of the artifact.
    """
    entry = entry_named(manifest.entries, entry, manifest.entry)
    kind = device.partition(":")[0]
    programs = [w for w in manifest.entries[entry].wide if w.part is None]
    found = [
        w
        for w in programs
        if (w.device, w.pattern) == (kind, pattern)
        and (batch is None or (w.batch[0] <= batch and (w.batch[1] is None or batch <= w.batch[1])))
    ]
    machines = {"", _here(device)} if any(w.plan.get("machine") for w in found) else {""}
    found = sorted(
        (w for w in found if w.plan.get("machine", "") in machines),
        key=lambda w: (not w.plan.get("machine"), w.batch[0]),
    )
    if found:
        return found[0]
    requested = f"{kind}, {pattern}" + ("" if batch is None else f", batch {batch}")
    raise Refusal(
        f"there is no wide program for {requested}; this artifact has "
        f"{'; '.join(f'{w.device}, {w.pattern}' for w in programs) or 'none'}"
    )


def _here(device: str) -> str:
    """Returns the name that plans use for this machine's device, or "" if it has no such device."""
    import torch

    from widepack.system.machine import name_of

    return "" if device.startswith("cuda") and not torch.cuda.is_available() else name_of(device)


def _title(artifact: Path, entry: str, wide: WideProgram, manifest: Manifest, count: int) -> str:
    most = "any" if wide.batch[1] is None else wide.batch[1]
    which = f"{wide.device}, {wide.pattern}, batch {wide.batch[0]} to {most}"
    plan = wide.plan
    how = (
        f"measured on {plan['machine']} with {plural(int(plan.get('threads', 1)), 'thread')}"
        if plan.get("machine")
        else "predicted"
    )
    which += f", {how}" + (f", to run on {plan['backend']}" if plan.get("backend") else "")
    named = "" if list(manifest.entries) == ["forward"] else f"entry {entry}, "
    return (
        f"{artifact}: {named}{plural(len(manifest.members), 'member')}, {which}: "
        f"{plural(count, 'node')} of the member program"
    )
