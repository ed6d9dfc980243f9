"""`widepack trace`: how each op of the member runs for all members, from an artifact's programs and plan alone; of a model before any build in trace_model.py."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from widepack_artifacts.errors import plain
from widepack_artifacts.manifest import Manifest, WideProgram
from widepack_artifacts.program import Node, Program, refs
from widepack_artifacts.writer import Reader, opened
from widepack_bench.text import columns, plural

from ..shared.options import emit, entry_named, entry_option, example, json_option, model_options, readable, stdout_kept
from ..main import Refusal


@dataclass(frozen=True, slots=True)
class Step:
    """A node of the member program. kinds: of what it reads and of what it makes; becomes: the ops of the wide program that stand for it."""

    node: str
    op: str
    reads: tuple[str, ...]
    kind: str
    strategy: str
    why: str
    becomes: tuple[str, ...]
    out: str
    source: str


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
@click.option("--input", "inputs", metavar="SPEC", multiple=True, help="With --model: an input, as build --input takes it. Repeatable.")
@click.option(
    "-m",
    "--block",
    metavar="[NAME]",
    is_flag=False,
    flag_value="",
    help="A reference block (mlp, resblock, ...) in place of --model. Without a name: lists them.",
)
@click.option("-n", "--members", type=click.IntRange(min=1), help="With --model or -m: kinds and strategies for so many members.")
@click.option("--device", default="cpu", show_default=True, help="The plan for this kind of device.")
@click.option("--pattern", type=click.Choice(["shared", "each"]), default="shared", show_default=True, help="The plan for this pattern of inputs.")
@click.option("--batch", type=click.IntRange(min=1), help="The plan for this batch, where there are several.")
@click.option("--strategy", "only", multiple=True, help="Only nodes that run in this strategy. Repeatable.")
@click.option("--source", is_flag=True, help="Show the line of your code that each node comes from; of a model it always is.")
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
    """Say how each op of the member runs for all members of ARTIFACT, and why.

    A line a node of the member program: what it reads and makes (Shared, Stacked, Ragged), the strategy, the reason, and the ops that stand for it. Before any build,
    --model and --input show the member program with the shapes that go in and out of every node, and with -n what would run for so many members.
    """
    given = [name for name, value in (("ARTIFACT", artifact), ("--model", model), ("-m", block)) if value is not None]
    if len(given) != 1:
        raise click.UsageError("give one of ARTIFACT, --model and -m" + (f", not {' and '.join(given)}" if given else ""))
    if artifact is None:
        _before(model, model_args, inputs, block, (entry, members, pattern, device, batch), only, as_json)
        return
    if inputs or model_args or members:
        raise click.UsageError("--input, --model-arg and -n go with --model; an artifact has its own")
    _artifact(artifact, entry, device, pattern, batch, only, source, as_json)


def _before(
    model: str | None,
    model_args: tuple[str, ...],
    inputs: tuple[str, ...],
    block: str | None,
    asked: tuple[str, int | None, str, str, int | None],
    only: tuple[str, ...],
    as_json: bool,
) -> None:
    """A model, or a reference block, before any build."""
    from . import trace_model

    if block == "":
        click.echo("\n".join(columns([["block", "what it is", "inputs"], *trace_model.blocks()])))
        return
    entry, members, pattern, device, batch = asked
    if only and members is None:
        raise click.UsageError("--strategy chooses among strategies, which depend on how many members there are: give -n")
    if block is not None and (inputs or model_args):
        raise click.UsageError("-m names a block with inputs of its own; leave --input and --model-arg out")
    with stdout_kept(True):
        if block is not None:
            name, make, inputs = trace_model.block(block)
        else:
            assert model is not None
            if not inputs:
                raise click.UsageError('--model needs its inputs: --input "x=float32[B,3,32,32]"')
            name, make = model, trace_model.factory(model, model_args)
        found = trace_model.foresee(name, make, inputs, entry, members, pattern, device, batch)
    of = {s.node: s for s in found.steps}
    shown = [s for s in found.shapes if not only or (s.node in of and of[s.node].strategy in only)]
    if as_json:
        document = found.to_json() | {"members": members, "device": device, "pattern": pattern}
        emit(document | {"steps": [step for step, shape in zip(document["steps"], found.shapes) if shape in shown]})
        return
    head = ["node", "op", "in", "out", *(["kinds", "strategy", "becomes", "why"] if members else []), "source"]
    rows = []
    for s in shown:
        step = of.get(s.node)
        how = [kinds(step), step.strategy, becomes(step), step.why] if step else []
        rows.append([s.node, short(s.op), ", ".join(s.takes) or "()", s.out or "()", *how, s.source])
    click.echo(plain("\n".join([trace_model.title(found, members, device, pattern), "", *(columns([head, *rows]) if rows else ["no node runs so"])])))
    if found.plan is not None:
        click.echo(plain("\n".join(["", *_regions(found.plan)])))


def _artifact(artifact: Path, entry: str, device: str, pattern: str, batch: int | None, only: tuple[str, ...], source: bool, as_json: bool) -> None:
    """From the files of an artifact."""

    def read(reader: Reader) -> tuple[str, WideProgram, list[Step]]:
        name = entry_named(reader.manifest.entries, entry, reader.manifest.entry)
        wide = find(reader.manifest, name, device, pattern, batch)
        return name, wide, steps(reader.program(reader.manifest.entries[name].member[0]), reader.program(wide.file), wide.plan)

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
        rows = [[s.node, short(s.op), kinds(s), s.strategy, becomes(s), s.why, *([s.source] if source else [])] for s in shown]
        click.echo(
            plain(
                "\n".join(
                    [_title(artifact, entry, wide, reader.manifest, len(found)), "", *(columns([head, *rows]) if rows else ["no node runs so"])]
                )
            )
        )
        names = {s.node for s in found}
        choices = set(wide.plan.get("choices", {}))
        folded = choices - names - {n for made in _derived(choices, names).values() for n in made}
        early = [f"{plural(len(folded), 'node')} more, made of weights alone: run once, at load"] if folded else []
        click.echo(plain("\n".join(["", *_regions(wide.plan), *early])))


def _regions(plan: dict[str, Any]) -> list[str]:
    """Why the regions run as they do, equal reasons once."""
    why: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for region in plan.get("regions", []):
        why.setdefault((region["strategy"], region["because"]), []).append(region)
    return [
        f"{strategy}: {'region' if len(rows) == 1 else 'regions'} {', '.join(r['name'] for r in rows)}, "
        f"{plural(sum(len(r['nodes']) for r in rows), 'node')}: {because}"
        for (strategy, because), rows in why.items()
    ]


def find(manifest: Manifest, entry: str, device: str, pattern: str, batch: int | None) -> WideProgram:
    """The wide program of the artifact that a call here would run: measured on this machine, else by rules of thumb. Raises: Refusal naming those that there are."""
    entry = entry_named(manifest.entries, entry, manifest.entry)
    kind = device.partition(":")[0]
    there = manifest.entries[entry].wide
    found = [
        w
        for w in there
        if (w.device, w.pattern) == (kind, pattern) and (batch is None or (w.batch[0] <= batch and (w.batch[1] is None or batch <= w.batch[1])))
    ]
    machines = {"", _here(device)} if any(w.plan.get("machine") for w in found) else {""}
    found = sorted((w for w in found if w.plan.get("machine", "") in machines), key=lambda w: not w.plan.get("machine"))
    if found:
        return found[0]
    wanted = f"{kind}, {pattern}" + ("" if batch is None else f", batch {batch}")
    raise Refusal(f"there is no wide program for {wanted}; this artifact has {'; '.join(f'{w.device}, {w.pattern}' for w in there) or 'none'}")


def _here(device: str) -> str:
    """What plans call this machine's device; empty where it has none of the kind."""
    import torch

    from widepack.system.machine import name_of

    return "" if device.startswith("cuda") and not torch.cuda.is_available() else name_of(device)


def steps(member: Program, wide: Program, plan: dict[str, Any]) -> list[Step]:
    """Every node of the member program with what became of it."""
    made: dict[str, list[str]] = {}
    for node in wide.nodes:
        for owner in {n.member for n in node.body.nodes} if node.body else {node.member}:
            made.setdefault(owner, []).append(node.op)
    of_slot = {s.source: s.kind for s in (*wide.weights, *wide.inputs)}
    found: dict[str, str] = {s.name: of_slot.get(s.source, s.kind) for s in (*member.weights, *member.inputs)}
    chosen: dict[str, tuple[str, str]] = {n: (c[0], c[1]) for n, c in plan.get("choices", {}).items()}
    derived = _derived(dict.fromkeys([*chosen, *made]), {n.name for n in member.nodes})
    planned: set[str] = set()
    for region in plan.get("regions", []):
        planned.update(region["nodes"])
        if region["strategy"] == "loop":
            chosen.update((n, ("loop", f"region {region['name']}")) for n in region["nodes"])
    result = []
    for node in member.nodes:
        reads = tuple(found[r] for r in dict.fromkeys(refs((node.args, node.kwargs))))
        own = [node.name, *derived.get(node.name, ())]  # the node, and what simplification made of it under names of its own
        strategy, why = _joined([chosen[n] for n in own if n in chosen]) or _unchosen(node, reads, node.name in planned, any(n in made for n in own))
        found[node.name] = _kind(strategy, reads, node)
        becomes = tuple(op for n in own for op in made.get(n, ()))
        result.append(Step(node.name, node.op, reads, found[node.name], strategy, why, becomes, node.out, node.source))
    return result


_MADE = re.compile(r"(_(rows|at|part|order|drop|one|dense)\d*)+$")
_MOVES = ("shape", "dim", "once", "part")  # strategies of what only moves values about


def _derived(names: Iterable[str], members: Collection[str]) -> dict[str, list[str]]:
    """The names that simplification made of a member's nodes: `linear_1` -> `linear_1_rows`, `linear_1_at0`."""
    found: dict[str, list[str]] = {}
    for name in names:
        ending = _MADE.search(name)
        while name not in members and ending and (base := name[: ending.start()]):
            if base in members:
                found.setdefault(base, []).append(name)
                break
            ending = _MADE.search(base)
    return found


def _joined(choices: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """The choices for a node's parts as one: those that compute, where there are such."""
    computing = [c for c in choices if c[0] not in _MOVES] or list(choices)
    if not computing:
        return None
    unique = list(dict.fromkeys(computing))
    return ", ".join(dict.fromkeys(c[0] for c in unique)), "; ".join(dict.fromkeys(c[1] for c in unique))


def _unchosen(node: Node, reads: tuple[str, ...], planned: bool, made: bool) -> tuple[str, str]:
    """What became of a node that the plan gives no strategy."""
    if planned and node.op == "operator.getitem":
        return "part", "one of the results of what it reads"
    if made:
        return "once", "nothing it reads differs by member" if set(reads) <= {"shared"} else "a size: equal for all members"
    return "-", "simplified away"


def _kind(strategy: str, reads: Iterable[str], node: Node) -> str:
    """What a node makes: Shared where it ran once, else as its widest argument."""
    kinds = set(reads)
    if strategy == "once" or kinds <= {"shared"}:
        return "shared"
    return "ragged" if "ragged" in kinds else "stacked"


def kinds(step: Step) -> str:
    """`Shared Stacked -> Stacked`."""
    return f"{' '.join(k.capitalize() for k in dict.fromkeys(step.reads)) or '()'} -> {step.kind.capitalize()}"


def becomes(step: Step) -> str:
    """The wide ops in short, equal ones counted."""
    counts: dict[str, int] = {}
    for op in step.becomes:
        counts[short(op)] = counts.get(short(op), 0) + 1
    return ", ".join(op if count == 1 else f"{count} x {op}" for op, count in counts.items()) or "-"


def short(op: str) -> str:
    """`aten.linear.default` -> `linear`, `aten.max.dim` -> `max.dim`."""
    return op.removeprefix("aten.").removesuffix(".default").removeprefix("operator.")


def _title(artifact: Path, entry: str, wide: WideProgram, manifest: Manifest, count: int) -> str:
    most = "any" if wide.batch[1] is None else wide.batch[1]
    which = f"{wide.device}, {wide.pattern}, batch {wide.batch[0]} to {most}"
    plan = wide.plan
    how = f"measured on {plan['machine']} with {plural(int(plan.get('threads', 1)), 'thread')}" if plan.get("machine") else "by rules of thumb"
    which += f", {how}" + (f", to run on {plan['backend']}" if plan.get("backend") else "")
    named = "" if list(manifest.entries) == ["forward"] else f"entry {entry}, "
    return f"{artifact}: {named}{plural(len(manifest.members), 'member')}, {which}: {plural(count, 'node')} of the member program"
