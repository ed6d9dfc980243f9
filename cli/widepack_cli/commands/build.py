"""`widepack build`: turns checkpoints into an artifact."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..shared.build_report import absent_lines, build_lines
from ..shared.failures import Refusal
from ..shared.member_paths import in_order, members_of
from ..shared.option_groups import GroupedCommand
from ..shared.options import (
    emit,
    example,
    ignore_option,
    json_option,
    model_options,
    sort_option,
    stdout_kept,
)
from ..shared.progress_bar import Progress
from ..shared.report_lines import unused_lines
from ..shared.threads import use_free_cores

if TYPE_CHECKING:
    from widepack import BuildReport

EPILOG = example(
    'widepack build ckpts/*.pt -o ens.wide --model net.py:make --input "x=float32[B,3,32,32]"',
    "widepack build runs/*/best.pt -o ens.wide --model pkg.net:Net --model-arg "
    'width=64 --input "ids=int64[B,T]:0..30521" --input T=2..512',
    'widepack build runs/checkpoint-* -o ens.wide --model hf --input "input_ids=int64[B,T]:0..30521" '
    '--input "attention_mask=int64[B,T]:0..1"',
    "widepack build --base bert/ --adapter 'lora/*' -o fleet.wide --model hf --input "
    '"input_ids=int64[B,T]:0..30521" --input "attention_mask=int64[B,T]:0..1"',
    "widepack build m.pt -n 32 --dropout on -o passes.wide --model net.py:make --input 'x=float32[B,64]'",
    "widepack build ckpts/*.pt --dry-run                # with model and input in ./widepack.toml",
)


TOML = "widepack.toml"
_INPUT = re.compile(r"([A-Za-z_][A-Za-z0-9_.]*)=")


GROUPS = {
    "Artifact": ("out", "force", "dry_run", "verbose", "as_json"),
    "Model": ("model", "model_args", "config", "entries", "states", "dropout", "passes"),
    "Checkpoints": ("key", "dtype", "trust_pickle", "ignore", "skip_bad", "sort", "names"),
    "Fine-tunes of one base": ("base", "adapters", "unmerge", "tolerance"),
    "Inputs": ("inputs", "sample", "features"),
    "Plans": ("strategies", "budget", "tune"),
    "Files": ("share", "no_pt2", "max_shard_size", "shards"),
}


@click.command(cls=GroupedCommand, groups=GROUPS, epilog=EPILOG)
@click.argument("checkpoints", metavar="[CKPT...]", nargs=-1)
@click.option(
    "-o",
    "--out",
    metavar="ARTIFACT",
    help="The folder to write, such as ens.wide; parent folders are created. Required without --dry-run.",
)
@model_options
@click.option(
    "--key",
    help="The key of the state dict (such as ema.model or model_ema.module) in a checkpoint that contains "
    "other values, too. '*' in it names several members of a file: 'model_*', 'models.*', '*', or '[*]' for "
    "weights that are stacked to [N, ...].",
)
@click.option(
    "--dtype",
    metavar="D",
    help="Convert all floating weights and the model: float32, float64, bfloat16 or float16.",
)
@click.option(
    "--trust-pickle",
    is_flag=True,
    help="Load the checkpoints with pickle, which can run any code that they contain. Only for files that "
    "you trust.",
)
@click.option(
    "--base",
    metavar="CKPT",
    help="The checkpoint of the model that the members were fine-tuned from, for --adapter and --unmerge.",
)
@click.option(
    "--adapter",
    "adapters",
    metavar="DIR",
    multiple=True,
    help="The folder of a LoRA adapter, as PEFT writes it: a member. The base is stored once. Needs --base. "
    "Repeatable.",
)
@click.option(
    "--unmerge",
    is_flag=True,
    help="Find a common base and low-rank differences in checkpoints that adapters were merged into, and "
    "store these. With --dry-run: show what is found.",
)
@click.option(
    "--tolerance",
    type=float,
    metavar="PART",
    help="Let factors be approximate where none are exact. On the calls of the verification, the answers "
    "differ from the checkpoints' by at most this part of what the fine-tunes change, such as 0.05. Needs "
    "--unmerge and --base.",
)
@ignore_option
@click.option(
    "--skip-bad",
    is_flag=True,
    help="Leave out checkpoints that cannot be read or belong to another model, and list them.",
)
@click.option(
    "--input",
    "inputs",
    metavar="SPEC",
    multiple=True,
    help='An input, such as "x=float32[B,3,32,32]", or the bounds of a dim, such as T=2..512. For one '
    "entry only: encode:x=... Repeatable.",
)
@click.option(
    "--sample",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A .pt file with example inputs: a tensor, a tuple of them, or a dict of keyword inputs.",
)
@click.option(
    "--entry",
    "entries",
    metavar="NAME",
    multiple=True,
    help="A method of the model to build instead of forward. Repeatable; all entries use one set of weights.",
)
@click.option(
    "--state",
    "states",
    metavar="NAME",
    multiple=True,
    help="A state: a value that one call leaves for the next. Give a buffer that the model changes "
    "(cache), or an input with the output that is its new value (h=h_new). Repeatable.",
)
@click.option(
    "--features",
    metavar="[INPUT=]A,B,...|FILE",
    multiple=True,
    help="The names of the numbers of a row of an input, in their order: a,b,c or f0..f63, or a table with "
    "these columns. The artifact keeps them, and predict, evaluate and select read columns by them.",
)
@sort_option
@click.option(
    "--names",
    metavar="A,B,...|FILE",
    help="The members' names, or a file with one name on each line. Default: the shortest parts in which "
    "the paths differ.",
)
@click.option(
    "--strategy",
    "strategies",
    metavar="NAME",
    multiple=True,
    help="auto, wide, loop, or a strategy that is preferred for its ops; `widepack primitives` lists them. "
    "Repeatable.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="The most processor seconds in which plans are measured here afterwards; the fastest are published "
    "in the artifact. 0 only predicts. Default: 20.",
)
@click.option(
    "--tune",
    is_flag=True,
    help="Measure the plans on this machine afterwards, and publish the fastest in the "
    "artifact (widepack tune --write).",
)
@click.option(
    "--share",
    type=click.Choice(["auto", "none"]),
    default="auto",
    show_default=True,
    help="auto: store weights that are equal in all members once. none: store every member's weights.",
)
@click.option(
    "-n",
    "passes",
    metavar="N",
    type=click.IntRange(min=1),
    help="With --dropout on: the number of stochastic passes of one checkpoint; its weights are stored once.",
)
@click.option(
    "--dropout",
    type=click.Choice(["on", "off"]),
    default="off",
    show_default=True,
    help="on: keep dropout active. Every call draws random numbers for each member.",
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A TOML file with options that the command line does not give. Default: widepack.toml in the "
    "working folder.",
)
@click.option("--no-pt2", is_flag=True, help="Leave out the .pt2 files (programs that run without widepack).")
@click.option(
    "--max-shard-size",
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="Largest size of a weights file. One weight is always in one file.",
)
@click.option(
    "--shards",
    metavar="K",
    type=click.IntRange(min=2),
    multiple=True,
    help="Also write the programs of K parts of the members, for a load on K devices or in K processes. "
    "Repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Do everything except writing, and show what would be written.")
@click.option("--force", is_flag=True, help="Replace an existing artifact.")
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also print the ops, each measured plan, and the time of each stage.",
)
@json_option
def command(
    checkpoints: tuple[str, ...],
    out: str | None,
    model: str | None,
    model_args: tuple[str, ...],
    key: str | None,
    dtype: str | None,
    trust_pickle: bool,
    ignore: tuple[str, ...],
    base: str | None,
    adapters: tuple[str, ...],
    unmerge: bool,
    tolerance: float | None,
    skip_bad: bool,
    inputs: tuple[str, ...],
    sample: Path | None,
    entries: tuple[str, ...],
    states: tuple[str, ...],
    features: tuple[str, ...],
    sort: str,
    names: str | None,
    strategies: tuple[str, ...],
    budget: float | None,
    tune: bool,
    share: str,
    passes: int | None,
    dropout: str,
    config: Path | None,
    no_pt2: bool,
    max_shard_size: str,
    shards: tuple[int, ...],
    dry_run: bool,
    force: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Turn the checkpoints CKPT... of one architecture into one artifact that runs all of them.

    A CKPT is a file of torch.save, safetensors or torch.export, an index of shards, or a folder; the content
    decides, not the suffix. torch.export programs need no --model. --model hf makes the members of Hugging
    Face folders. Options that are not given are read from widepack.toml in the working folder, or from the
    file of --config (model, model_arg, input, key, entry, state). The artifact is published only after its
    answers are verified against every member.
    """
    _refuse_missing([*checkpoints, *adapters], out, dry_run)
    paths = in_order(members_of(adapters, checkpoints), sort)
    settings = settings_beside(model, config, paths)
    named = list(entries) or settings.get("entry")
    args, kwargs = read_sample(sample, named or ()) if sample else (None, None)
    from widepack.building.build import build
    from widepack.spec.config import parse_model_args

    with stdout_kept(as_json), Progress() as progress:
        use_free_cores()
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
            ignore=ignore,
            skip_bad=skip_bad,
            strategy=strategies[0] if len(strategies) == 1 else strategies or "auto",
            share=share,
            pt2=not no_pt2,
            max_shard_size=max_shard_size,
            shards=shards,
            force=force,
            progress=progress,
            dry_run=dry_run,
            budget=budget,
            tune=tune,
            n=passes,
            dropout=dropout,
            base=base,
            unmerge=unmerge,
            tolerance=tolerance,
            features=_features(features or tuple(settings.get("features") or ())),
        )
    _print(report, dry_run, as_json, verbose)


def _features(words: tuple[str, ...]) -> Any:
    """Returns `--features` as `widepack.build` takes them. Raises: click.UsageError for a repetition."""
    found = [(_INPUT.match(word), word) for word in words]
    pairs = [(match[1], word[match.end() :]) if match else ("", word) for match, word in found]
    if len({name for name, _ in pairs}) < len(pairs) or (len(pairs) > 1 and "" in dict(pairs)):
        raise click.UsageError("give --features once for each input: --features x=a,b --features y=c,d")
    return dict(pairs).get("", dict(pairs) or None)


def _print(report: BuildReport, dry_run: bool, as_json: bool, verbose: bool) -> None:
    for sentence in absent_lines(report):
        click.echo(sentence, err=True)
    if as_json:
        for line in unused_lines(report.unused):
            click.echo(line, err=True)
        emit(report.to_json())
    else:
        click.echo("\n".join(build_lines(report, dry_run, verbose)))


def _refuse_missing(checkpoints: Sequence[str], out: str | None, dry_run: bool) -> None:
    """Says what to give if the checkpoints or the folder are missing. Raises: click.UsageError."""
    if not checkpoints:
        raise click.UsageError(
            "give the checkpoints, the folder to write, and what makes one model, for example\n"
            "widepack build fold*.pt -o ens.wide --model net.py:make --input 'x=float32[B,8]'"
        )
    if out is None and not dry_run:
        raise click.UsageError("Missing option '-o': the folder to write, such as -o ens.wide, or --dry-run")


def settings_beside(model: str | None, config: Path | None, paths: list[str]) -> dict[str, Any]:
    """Returns the options of the file of settings, without those of its model if `--model` names another."""
    settings = settings_of(config, paths)
    # arguments in the file belong to the model that is named there
    return {k: settings.get(k) for k in ("input", "key", "entry", "state", "features")} if model else settings


def settings_of(config: Path | None, paths: list[str]) -> dict[str, Any]:
    """Returns the options of `--config`, or of widepack.toml in the working folder.

    A model file in it is relative to its folder. A widepack.toml beside the checkpoints is named, not read:
    it may come with checkpoints of unknown origin, and its model is code that the build would run.

    Raises:
        Refusal: There is no file `config`.
    """
    file = config if config is not None else Path(TOML)
    if config is not None and not config.is_file():
        raise Refusal(f"--config {config}: {'is a folder' if config.is_dir() else 'there is no such file'}")
    if config is None:
        _name_unread(paths)
        if not file.is_file():
            return {}
    from widepack.spec.config import read_toml

    found = read_toml(file.parent, file.name)
    model, colon, name = str(found.get("model", "")).rpartition(":")
    if colon and model.endswith(".py") and not os.path.isabs(model):
        found["model"] = f"{os.path.relpath(file.parent / model)}:{name}"
    click.echo(
        f"options that the command line does not give are read from {os.path.relpath(file)}: "
        f"{', '.join(found) or 'nothing'}",
        err=True,
    )
    return found


def _name_unread(paths: list[str]) -> None:
    """Prints a notice about a widepack.toml in the folder of the checkpoints, which is not read."""
    folder = os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths])
    unread = os.path.relpath(os.path.join(folder, TOML))
    if unread != TOML and os.path.isfile(unread):
        click.echo(
            f"{unread} was not read: it is not in the working folder. If you trust it, give --config "
            f"{unread}",
            err=True,
        )


def read_sample(path: Path, entries: Sequence[str] = ()) -> tuple[Any, Any]:
    """Reads example inputs from a file, as data only.

    Returns:
        (positional, keyword) inputs; each is a dict by entry if the file has one key for each entry.

    Raises:
        Refusal: The file is missing, or contains something else than tensors.
    """
    import torch

    if not path.is_file():
        raise Refusal(f"--sample {path}: {'is a folder' if path.is_dir() else 'there is no such file'}")
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for files that it cannot read
        raise Refusal(
            f"--sample {path} cannot be read as tensors saved with torch.save ({type(error).__name__}); "
            "save a tensor, a tuple of them or a dict of keyword inputs"
        ) from error
    if isinstance(value, Mapping) and entries and set(value) == set(entries):
        parts = {name: _sample(part, path) for name, part in value.items()}
        return {n: args for n, (args, _) in parts.items()}, {
            n: kwargs or {} for n, (_, kwargs) in parts.items()
        }
    return _sample(value, path)


def _sample(value: Any, path: Path) -> tuple[tuple[Any, ...] | None, dict[str, Any] | None]:
    """Returns the positional and the keyword inputs of one call."""
    import torch

    if isinstance(value, torch.Tensor):
        return (value,), None
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return (), dict(value)
    if isinstance(value, (tuple, list)):
        return tuple(value), None
    raise Refusal(
        f"--sample {path} holds a {type(value).__name__}; it must hold a tensor, a tuple "
        "of inputs or a dict of keyword inputs"
    )
