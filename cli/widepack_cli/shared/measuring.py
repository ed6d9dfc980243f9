"""Options and output that the benchmark commands have in common: `bench`, `bench-layers`, `bench-suite`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
BASELINES = (
    "loop",
    "compiled-member",
    "compiled-loop",
    "vmap",
    "vmap-compiled",
    "onnxruntime",
    "cuda-graph-loop",
)

device_option = click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="The device on which everything is timed: cpu, cuda, cuda:1.",
)
baseline_option = click.option(
    "--baseline",
    "baselines",
    metavar="NAME",
    multiple=True,
    help=f"A baseline to compare with: {', '.join(BASELINES)}. Repeatable. Default: all of them.",
)
tune_option = click.option(
    "--tune", is_flag=True, help="Tune each artifact on this machine before it is timed."
)


def thread_options(f: F) -> F:
    """`--threads` and `--pin`."""
    f = click.option("--pin", is_flag=True, help="Bind the process to as many processors as it has threads.")(
        f
    )
    return click.option(
        "--threads",
        type=click.IntRange(min=1),
        help="Threads inside an op. Default: torch's number for `bench`, 1 for `bench-layers` "
        "and `bench-suite`.",
    )(f)


def compile_limit_option(f: F) -> F:
    """`--compile-limit`, `--threads` and `--pin`."""
    return click.option(
        "--compile-limit",
        type=click.FloatRange(min=0, min_open=True),
        default=600.0,
        show_default=True,
        help="Seconds that one baseline may take to compile. A slower one is left out.",
    )(thread_options(f))


def measuring_options(f: F) -> F:
    """`--budget` for each row, `--compile-limit`, `--threads` and `--pin`."""
    return click.option(
        "--budget",
        type=click.FloatRange(min=0, min_open=True),
        default=20.0,
        show_default=True,
        help="Seconds of measuring for each row, without building and compilation. A row takes up to three "
        "times as long if its interval is still wide.",
    )(compile_limit_option(f))


def total_options(f: F) -> F:
    """`--budget` for the whole command, `--compile-limit`, `--threads` and `--pin`."""
    return click.option(
        "--budget",
        type=click.FloatRange(min=0, min_open=True),
        help="Time limit in seconds for the whole command, with loading and compilation but without "
        "--full. Baselines that do not compile in time are left out. Default: no limit; each batch "
        "size is measured for 20 s, or for up to 60 s if intervals are still wide.",
    )(compile_limit_option(f))


def counts(_ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """A click callback: numbers of members; empty if the option is not given."""
    from .options import batch_list

    return () if value is None else batch_list(_ctx, parameter, value)


def check_output(option: str, path: str | None) -> None:
    """Checks before the work that a file can be written. Raises: click.BadParameter."""
    if not path or path == "-":
        return
    if Path(path).is_dir():
        raise click.BadParameter(f"{path} is a folder; give the path of a file", param_hint=option)
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise click.BadParameter(f"{path}: there is no folder {folder}; create it", param_hint=option)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise click.BadParameter(
            f"{path}: {folder} cannot be written; give a path in another folder", param_hint=option
        )


def as_text(document: Any) -> str:
    """Returns a JSON document as the text of a file."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def write(path: str, text: str) -> None:
    """Writes a file that appears complete or not at all."""
    from widepack.system.atomic_file import naming, whole

    with whole(Path(path), force=True) as temporary, naming(Path(path)):
        temporary.write_text(text, encoding="utf-8")
