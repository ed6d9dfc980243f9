"""Shows the options of a command by purpose in --help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


class GroupedCommand(click.Command):
    """A command with many options.

    Args:
        groups: The titles, each with the names of its parameters. Options of no group follow under `Options`.
        args, more: As `click.Command` takes them.
    """

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **more: Any) -> None:
        super().__init__(*args, **more)
        self.groups = groups

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {p.name: p.get_help_record(ctx) for p in self.get_params(ctx)}
        grouped = {name for names in self.groups.values() for name in names}
        rest = [str(name) for name in records if name not in grouped]
        for title, names in [*self.groups.items(), ("Options", rest)]:
            rows = [record for name in names if (record := records.get(name)) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
