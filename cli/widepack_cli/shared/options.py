"""What several commands need."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from widepack_artifacts.errors import DRIVES, ArtifactError

from ..main import Refusal

F = TypeVar("F", bound=Callable[..., Any])

ARTIFACT = click.argument("artifact", metavar="ARTIFACT", type=click.Path(path_type=Path))


def json_option(f: F) -> F:
    """`--json`: one document on standard output, all else on standard error."""
    return click.option("--json", "as_json", is_flag=True, help="Write one JSON document to standard output, all else to standard error.")(f)


def model_options(f: F) -> F:
    """`--model` and `--model-arg`."""
    f = click.option(
        "--model-arg", "model_args", metavar="K=V", multiple=True, help="An argument of the factory; V is JSON where it parses. Repeatable."
    )(f)
    return click.option("--model", metavar="FACTORY", help="What makes one member: package.module:factory, path/file.py:factory, or hf.")(f)


def entry_option(f: F) -> F:
    """`--entry`: one of the artifact's entries."""
    return click.option("--entry", metavar="NAME", default="", help="The entry. Without it: forward, or the first where there is no forward.")(f)


def entry_named(entries: Mapping[str, Any], name: str, first: str) -> str:
    """The entry that is meant. Raises: Refusal naming those that there are."""
    if name and name not in entries:
        raise Refusal(f"there is no entry {name!r}; this artifact has {', '.join(entries)}")
    return name or first


def example(*lines: str) -> str:
    """An epilog with a command's examples, kept line by line."""
    return "Example:\n\n\b\n" + "\n".join(f"  {line}" for line in lines)


def emit(document: Any) -> None:
    """The one JSON document of a command, on standard output; what could drive a terminal is written as JSON's escapes."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    click.echo(DRIVES.sub(lambda found: json.dumps(found[0])[1:-1], text))


@contextlib.contextmanager
def readable(artifact: Path) -> Iterator[None]:
    """While free records of an artifact are shown, which may be of any form. Raises: ArtifactError."""
    try:
        yield
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as e:
        raise ArtifactError(f"{artifact}: a record in its manifest is not of the form that widepack writes: {type(e).__name__}: {e}") from e


@contextlib.contextmanager
def stdout_kept(kept: bool) -> Iterator[None]:
    """While `kept`, whatever is printed (by the user's own model too) goes to standard error, so that standard output holds the document alone."""
    with contextlib.redirect_stdout(sys.stderr) if kept else contextlib.nullcontext():
        yield


def batch_list(_ctx: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """A click callback: `1,8,32` as numbers."""
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"{value!r} is no list of whole numbers from 1, such as 1,8,32", param=parameter)
    return found
