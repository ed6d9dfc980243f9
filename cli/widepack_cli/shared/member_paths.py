"""Finds the checkpoints that a command line names, in the order of the members."""

from __future__ import annotations

import glob
import os
import re

import click

from .failures import Refusal


def members_of(adapters: tuple[str, ...], checkpoints: tuple[str, ...]) -> list[str]:
    """Returns the paths of the members: those of `--adapter`, then the arguments.

    A shell gives `--adapter lora/*` the first folder, and the others are arguments.
    """
    if not checkpoints and not adapters:
        raise click.UsageError("Missing argument 'CKPT...': give the members' checkpoints, or --adapter")
    return [*expand(adapters), *expand(checkpoints)]


def expand(checkpoints: tuple[str, ...]) -> list[str]:
    """Expands glob patterns that the shell did not expand. Raises: Refusal if a pattern matches nothing."""
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


def in_order(paths: list[str], sort: str) -> list[str]:
    """Returns the checkpoints in the order of `--sort`; prints a notice if a shell sorted numbers as text."""
    natural = sorted(paths, key=_natural)
    if sort == "natural" or natural == paths:
        return natural
    if paths == sorted(paths):  # a list that the user ordered needs no notice
        first = next(i for i, path in enumerate(paths) if path != natural[i])
        click.echo(
            f"the members are in the order of the command line: member {first} is "
            f"{os.path.basename(paths[first])}, before {os.path.basename(natural[first])}. --sort "
            "natural sorts numbers in names by value",
            err=True,
        )
    return paths


def _natural(path: str) -> list[tuple[int, int, str]]:
    """Returns a key that sorts numbers in texts by value: `m-2`, then `m-10`."""
    parts = re.split(r"([0-9]+)", path)
    return [(0, int(p), p) if p.isdigit() else (1, 0, p) for p in parts]
