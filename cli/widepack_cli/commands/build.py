"""`widepack build`: checkpoints in, an artifact out."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from widepack_bench.text import duration, plural, size

from ..shared.options import emit, example, json_option, model_options, stdout_kept
from ..main import Refusal
from ..shared.progress_bar import Progress

if TYPE_CHECKING:
    from widepack import BuildReport
    from widepack.building.build import EntryReport

EPILOG = example(
    'widepack build ckpts/*.pt -o ens.wide --model net.py:make --input "x=float32[B,3,32,32]"',
    'widepack build runs/*/best.pt -o ens.wide --model pkg.net:Net --model-arg width=64 --input "ids=int64[B,T]:0..30521" --input T=2..512',
    'widepack build runs/checkpoint-* -o ens.wide --model hf --input "input_ids=int64[B,T]:0..30521"',
    "widepack build m.pt -n 32 --dropout on -o passes.wide --model net.py:make --input 'x=float32[B,64]'",
    "widepack build ckpts/*.pt --dry-run        with model and input in ckpts/widepack.toml",
)


@click.command(epilog=EPILOG)
@click.argument("checkpoints", metavar="CKPT...", nargs=-1, required=True)
@click.option("-o", "--out", metavar="ARTIFACT", help="The folder to write, such as ens.wide; folders above it are made. Needed unless --dry-run.")
@model_options
@click.option("--key", help="Where the state dict is inside a checkpoint that holds more, such as ema.model, or model_ema.module.")
@click.option("--dtype", metavar="D", help="Convert all floating weights, and the model: float32, float64, bfloat16 or float16.")
@click.option(
    "--trust-pickle", is_flag=True, help="Unpickle whatever the checkpoints hold. This runs the code that they name: only for files that you made."
)
@click.option("--skip-bad", is_flag=True, help="Build without the checkpoints that cannot be read or are of another model, and list them.")
@click.option(
    "--input",
    "inputs",
    metavar="SPEC",
    multiple=True,
    help='An input, such as "x=float32[B,3,32,32]"; or a bound, T=2..512; of one entry, encode:x=... Repeatable.',
)
@click.option(
    "--sample",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A .pt file with example inputs: a tensor, a tuple of them, or a dict of keyword inputs.",
)
@click.option(
    "--entry", "entries", metavar="NAME", multiple=True, help="A method of the model to build, instead of forward. Repeatable: one set of weights."
)
@click.option(
    "--state",
    "states",
    metavar="NAME",
    multiple=True,
    help="What calls carry: a buffer that the model changes, such as cache; an input with the output that is its new value, h=h_new. Repeatable.",
)
@click.option(
    "--names",
    metavar="A,B,...|FILE",
    help="The members' names, or a file with one a line. Without it: the shortest distinguishing parts of the paths.",
)
@click.option(
    "--strategy",
    "strategies",
    metavar="NAME",
    multiple=True,
    help="auto, wide, loop, or a strategy that ops shall prefer (widepack primitives). Repeatable.",
)
@click.option(
    "--tune", is_flag=True, help="Measure the plans on this machine afterwards, and publish the fastest in the artifact (widepack tune --write)."
)
@click.option(
    "--share",
    type=click.Choice(["auto", "none"]),
    default="auto",
    show_default=True,
    help="Whether weights that are equal in all members are kept once.",
)
@click.option(
    "-n",
    "passes",
    metavar="N",
    type=click.IntRange(min=1),
    help="With --dropout on: this many stochastic passes of one checkpoint; its weights are kept once.",
)
@click.option(
    "--dropout",
    type=click.Choice(["on", "off"]),
    default="off",
    show_default=True,
    help="Whether dropout stays on: a draw for each member at every call.",
)
@click.option("--no-pt2", is_flag=True, help="Leave out the torch.export programs, which others read.")
@click.option("--max-shard-size", metavar="SIZE", default="5GB", show_default=True, help="Of a weights file; a weight is never divided.")
@click.option("--dry-run", is_flag=True, help="Do everything but writing, and say what would be written.")
@click.option("--force", is_flag=True, help="Replace an artifact that is there.")
@json_option
def command(
    checkpoints: tuple[str, ...],
    out: str | None,
    model: str | None,
    model_args: tuple[str, ...],
    key: str | None,
    dtype: str | None,
    trust_pickle: bool,
    skip_bad: bool,
    inputs: tuple[str, ...],
    sample: Path | None,
    entries: tuple[str, ...],
    states: tuple[str, ...],
    names: str | None,
    strategies: tuple[str, ...],
    tune: bool,
    share: str,
    passes: int | None,
    dropout: str,
    no_pt2: bool,
    max_shard_size: str,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Turn the checkpoints CKPT... of one architecture into one artifact that runs them all.

    Reads files of torch.save, safetensors and torch.export by their content, indexes of shards, and folders; programs of torch.export need no --model, and
    --model hf makes the members of Hugging Face folders. Options that are not given are taken from a widepack.toml beside the checkpoints (model,
    model_arg, input, key, entry, state). Nothing is written before the answers are proved to be the members' own.
    """
    if out is None and not dry_run:
        raise click.UsageError("Missing option '-o': where shall the artifact go? (or give --dry-run)")
    paths = expand(checkpoints)
    settings = beside(paths)
    if model:  # the arguments beside the checkpoints are those of the model that is named there
        settings = {k: settings.get(k) for k in ("input", "key", "entry", "state")}
    named = list(entries) or settings.get("entry")
    args, kwargs = read_sample(sample, named or ()) if sample else (None, None)
    from widepack.building.build import build
    from widepack.spec.input_spec import parse_model_args

    with stdout_kept(as_json), Progress() as progress:
        report = build(
            paths,
            out if out is not None else "ens.wide",
            model=model or settings.get("model"),
            model_args={**settings.get("model_arg", {}), **parse_model_args(model_args)} or None,
            inputs=list(inputs) or settings.get("input"),
            sample=args,
            sample_kwargs=kwargs,
            entries=named,
            state=list(states) or settings.get("state") or (),
            names=names,
            key=key or settings.get("key"),
            dtype=dtype,
            trust_pickle=trust_pickle,
            skip_bad=skip_bad,
            strategy=strategies[0] if len(strategies) == 1 else strategies or "auto",
            share=share,
            pt2=not no_pt2,
            max_shard_size=max_shard_size,
            force=force,
            progress=progress,
            dry_run=dry_run,
            tune=tune,
            n=passes,
            dropout=dropout,
        )
    if as_json:
        emit(report.to_json())
    else:
        click.echo("\n".join(lines(report, dry_run)))


def expand(checkpoints: tuple[str, ...]) -> list[str]:
    """The checkpoints, with patterns that no shell has expanded. Raises: Refusal for a pattern that matches nothing."""
    paths: list[str] = []
    for path in checkpoints:
        if not glob.has_magic(path) or os.path.lexists(path):
            paths.append(path)
            continue
        found = sorted(glob.glob(path))
        if not found:
            raise Refusal(f"no checkpoint matches {path}")
        paths += found
    return paths


def beside(paths: list[str]) -> dict[str, Any]:
    """What widepack.toml says in the folder that all checkpoints are in; a model file named there is meant from that folder."""
    folder = Path(os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths]))
    if not (folder / "widepack.toml").is_file():
        return {}
    from widepack.spec.input_spec import read_toml

    found = read_toml(folder)
    file, colon, name = str(found.get("model", "")).rpartition(":")
    if colon and file.endswith(".py") and not os.path.isabs(file):
        found["model"] = f"{os.path.relpath(folder / file)}:{name}"
    click.echo(f"taken from {os.path.relpath(folder / 'widepack.toml')} where no option says otherwise: {', '.join(found) or 'nothing'}", err=True)
    return found


def read_sample(path: Path, entries: Sequence[str] = ()) -> tuple[Any, Any]:
    """Example inputs from a file, read as data only: (positional, keyword), by entry where the file has a key for each. Raises: Refusal in words."""
    import torch

    if not path.is_file():
        raise Refusal(f"--sample {path}: there is no such file")
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever torch says about a file that is none
        raise Refusal(
            f"--sample {path} cannot be read as tensors saved with torch.save ({type(error).__name__}); "
            "save a tensor, a tuple of them or a dict of keyword inputs"
        ) from error
    if isinstance(value, Mapping) and entries and set(value) == set(entries):
        parts = {name: _sample(part, path) for name, part in value.items()}
        return {n: args for n, (args, _) in parts.items()}, {n: kwargs or {} for n, (_, kwargs) in parts.items()}
    return _sample(value, path)


def _sample(value: Any, path: Path) -> tuple[tuple[Any, ...] | None, dict[str, Any] | None]:
    """The positional and keyword inputs of one call."""
    import torch

    if isinstance(value, torch.Tensor):
        return (value,), None
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return (), dict(value)
    if isinstance(value, (tuple, list)):
        return tuple(value), None
    raise Refusal(f"--sample {path} holds a {type(value).__name__}; it must hold a tensor, a tuple of inputs or a dict of keyword inputs")


def lines(report: BuildReport, dry_run: bool) -> list[str]:
    """What was built, or would be."""
    weights = ", ".join(f"{size(count)} {kind}" for kind, count in report.weights.items() if count)
    text = [
        f"{plural(len(report.members), 'member')}: {some(report.members)}",
        f"weights      {weights or 'none'}; {size(report.bytes_disk)} on disk, {size(report.bytes_memory)} in memory",
    ]
    for name, entry in report.entries.items():
        text += [*([f"entry {name}"] if list(report.entries) != ["forward"] else []), *_entry(entry)]
    text += [f"left out     {b['path']}: {b['why']}" for b in report.left_out]
    text += damaged(report.not_finite)
    text.append(f"time         {', '.join(f'{stage} {duration(1000 * s)}' for stage, s in report.seconds.items())}")
    return [*text, "dry run: nothing was written"] if dry_run else [*text, f"wrote {report.path}"]


def damaged(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The members whose answers are NaN or inf where the others' are finite."""
    return [
        f"{'not finite':<13}member {r['member']}: {r['numbers']:,} of {r['of']:,} numbers of output {r['output']} of {r['entry']} are NaN or inf, and all other members' "
        "answers are finite: look at its weights"
        for r in rows
    ]


def some(names: Sequence[str], at_most: int = 20) -> str:
    """The names, the middle of a long list left out."""
    return ", ".join(names) if len(names) <= at_most else f"{', '.join(names[: at_most // 2])}, ..., {', '.join(names[-3:])}"


def _entry(entry: EntryReport) -> list[str]:
    """How one entry runs."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in entry.kinds.items() if count)
    used = ", ".join(f"{name} {count}" for name, count in sorted(entry.strategies.items(), key=lambda item: -item[1]))
    return [
        f"nodes        {kinds}",
        f"strategies   {used}",
        f"wide share   {entry.wide_share:.0%} of the nodes that read a stacked weight",
        *([f"kernels      {entry.kernels_wide} for all members, {entry.kernels_member} for one"] if entry.kernels_wide else []),
    ]
