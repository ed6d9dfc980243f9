"""How a command ends when it fails: a paragraph on standard error and an exit code."""

from __future__ import annotations

from typing import IO, Any

import click


class Failure(click.ClickException):
    """A paragraph on standard error and exit code 1."""


class Interrupted(click.ClickException):
    """The user pressed Ctrl-C: exit code 130, as shells expect of a command that SIGINT ended."""

    exit_code = 130

    def __init__(self, message: str = "Aborted!") -> None:
        super().__init__(message)

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(self.message, err=True, file=file)


class Refusal(Failure):
    """Arguments that the command cannot use: exit code 2."""

    exit_code = 2
