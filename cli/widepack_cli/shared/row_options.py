"""Options of the commands that run an artifact over the rows of a file: `predict`, `select`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def row_options(f: F) -> F:
    """`--input`, `--answer`, `--dim`, `--batch`, and how a CSV file is written."""
    f = click.option(
        "--decimal",
        type=click.Choice([".", ","]),
        default=".",
        show_default=True,
        help="CSV: what stands before the decimals of a number.",
    )(f)
    f = click.option(
        "--delimiter",
        metavar="CHARACTER",
        help="CSV: what stands between values: ';', tab, ... Default: a comma.",
    )(f)
    f = click.option(
        "--header/--no-header",
        default=None,
        help="CSV: the first line has the names of the columns, or it is a row and the columns are f0, f1, "
        "... Default: it has names, and is refused if a name is a number.",
    )(f)
    f = click.option(
        "--batch", type=click.IntRange(min=1), metavar="ROWS", help="The rows of a batch. Default: 256."
    )(f)
    f = click.option(
        "--dim",
        type=int,
        default=-1,
        show_default=True,
        help="The dim of the classes in a member's answer, for figures and probabilities.",
    )(f)
    f = click.option(
        "--answer",
        metavar="OUTPUT",
        help="The output of the model, by name or number. Default: logits, else the first output. widepack "
        "predict without --reduce writes all outputs.",
    )(f)
    return click.option(
        "--input",
        "inputs",
        metavar="NAME=COLUMNS",
        multiple=True,
        help="The columns of an input of the model: x=f0..f63, x=a,b,c, or ids=tokens for one column with "
        "lists. Repeatable. Default: the column with the name of the input; for a single input all columns "
        "of numbers if they are exactly as many as it takes.",
    )(f)


def columns_of(words: tuple[str, ...]) -> dict[str, str]:
    """Returns the columns of each input that the user names. Raises: click.BadParameter."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, columns = word.partition("=")
        if not equals or not name or not columns:
            raise click.BadParameter(
                f"{word!r} is not NAME=COLUMNS, such as x=f0..f63 or x=a,b,c", param_hint="--input"
            )
        if name in found:
            raise click.BadParameter(
                f"input {name} is named twice; write its columns together, such as {name}=a,b,c",
                param_hint="--input",
            )
        found[name] = columns
    return found
