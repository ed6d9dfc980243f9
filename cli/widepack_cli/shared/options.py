"""Options that several commands have, and the JSON document of a command."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from widepack_artifacts.errors import DRIVES, ArtifactError

from .failures import Refusal

F = TypeVar("F", bound=Callable[..., Any])

ARTIFACT = click.argument("artifact", metavar="ARTIFACT", type=click.Path(path_type=Path))


def json_option(f: F) -> F:
    """`--json`: write one document to standard output and everything else to standard error."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Write one JSON document to standard output, everything else to standard error.",
    )(f)


def model_options(f: F) -> F:
    """`--model` and `--model-arg`."""
    f = click.option(
        "--model-arg",
        "model_args",
        metavar="K=V",
        multiple=True,
        help="An argument of the factory, such as width=64. V is read as JSON if possible. Repeatable.",
    )(f)
    return click.option(
        "--model",
        metavar="FACTORY",
        help="The factory of one member: package.module:factory, path/file.py:factory, or hf.",
    )(f)


def weights_options(f: F) -> F:
    """`--weights` and `--max-error`."""
    f = click.option(
        "--max-error",
        metavar="X",
        type=float,
        help="With --weights: refuse errors above this part of the answer's rms, for example 0.02.",
    )(f)
    return click.option(
        "--weights",
        type=click.Choice(["int8"]),
        help="Run calls of few rows over int8 weights, on a CPU. Their error is measured on the probe.",
    )(f)


def ignore_option(f: F) -> F:
    """`--ignore`: names in the checkpoints that are not the model's."""
    return click.option(
        "--ignore",
        metavar="PATTERN",
        multiple=True,
        help="Leave out names in the checkpoints that the model does not have, such as 'criterion.*'. "
        "Repeatable; kept in the artifact.",
    )(f)


def sort_option(f: F) -> F:
    """`--sort`: the order of the checkpoints."""
    return click.option(
        "--sort",
        type=click.Choice(["none", "natural"]),
        default="none",
        show_default=True,
        help="The order of the checkpoints. none: the order of the command line (a shell puts m-10 before "
        "m-2). natural: numbers in names by value (m-2 before m-10).",
    )(f)


def entry_option(f: F) -> F:
    """`--entry`: one of the artifact's entries."""
    return click.option(
        "--entry",
        metavar="NAME",
        default="",
        help="The entry. Default: forward, or the first entry if there is no forward.",
    )(f)


def entry_named(entries: Mapping[str, Any], name: str, first: str) -> str:
    """Returns the entry that the user names, or `first`. Raises: Refusal for an unknown name."""
    if name and name not in entries:
        raise Refusal(f"there is no entry {name!r}; the entries of this artifact are {', '.join(entries)}")
    return name or first


def example(*lines: str) -> str:
    """Returns an epilog with the examples of a command, one a line."""
    return "Example:\n\n\b\n" + "\n".join(f"  {line}" for line in lines)


def emit(document: Any) -> None:
    """Writes the JSON document of a command. Terminal control characters are escaped."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    click.echo(DRIVES.sub(lambda found: json.dumps(found[0])[1:-1], text))


@contextlib.contextmanager
def readable(artifact: Path) -> Iterator[None]:
    """Turns errors in free records of a manifest, which may hold anything, into ArtifactError."""
    try:
        yield
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as e:
        raise ArtifactError(
            f"{artifact}: a record in its manifest does not have the form that widepack writes: "
            f"{type(e).__name__}: {e}"
        ) from e


@contextlib.contextmanager
def stdout_kept(kept: bool) -> Iterator[None]:
    """While `kept`, sends all prints (also those of the user's model) to standard error.

    Then standard output holds only the JSON document.
    """
    with contextlib.redirect_stdout(sys.stderr) if kept else contextlib.nullcontext():
        yield


def batch_list(_ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """A click callback: parses `1,8,32`."""
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(
            f"{value!r} is not a list of positive integers, such as 1,8,32", param=parameter
        )
    return found
