"""Options of the commands that run an artifact over the rows of a file: `predict`, `select`, `evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from .options import entry_option

F = TypeVar("F", bound=Callable[..., Any])


def row_options(f: F) -> F:
    """`--input`, `--answer`, `--dim`, `--batch`, `--nulls`, and how a CSV file is written."""
    f = click.option(
        "--nulls",
        type=click.Choice(["refuse", "nan"]),
        default="refuse",
        show_default=True,
        help="What a null in an input is: an error, or NaN, for models that take NaN.",
    )(f)
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
        help="CSV: what stands between values: ';', tab, ... Default: a comma, and tab in .tsv files.",
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
        "lists. A name with a comma stands in quotes: 'x=a,\"b,c\"'. Repeatable. Default: the column with "
        "the name of the input; for a single input all columns of numbers if they are exactly as many as it "
        "takes.",
    )(f)


def target_options(f: F) -> F:
    """`--on`, `--target`, `--classes`, `--of`, those of `row_options`, and `--entry`."""
    f = click.option(
        "--of",
        type=click.Choice(["softmax", "probabilities"]),
        help="What the members answer: scores of classes, or probabilities. Default: numbers.",
    )(row_options(entry_option(f)))
    f = click.option(
        "--classes",
        metavar="A,B,...",
        help="Targets are names of classes: their names in the order of the members' answers. Default: "
        "numbers, for classes 0 to C-1.",
    )(f)
    f = click.option("--target", metavar="COLUMN", required=True, help="The column of the targets.")(f)
    return click.option(
        "--on",
        type=click.Path(path_type=Path),
        required=True,
        help="The data: .parquet or a folder of such files, .arrow, .csv, .csv.gz, .jsonl, .npy or "
        ".safetensors.",
    )(f)


def target_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of such a command as the arguments of `widepack.select` and `widepack.evaluate`."""
    answer = options["answer"]
    number = int(answer) if answer is not None and answer.isdecimal() else answer
    return {**options, "inputs": columns_of(options["inputs"]) or None, "answer": number}


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
