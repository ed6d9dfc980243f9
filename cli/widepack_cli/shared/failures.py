"""How a command ends when it fails: a paragraph on standard error and an exit code."""

from __future__ import annotations

import click


class Failure(click.ClickException):
    """A paragraph on standard error and exit code 1."""


class Refusal(Failure):
    """What cannot be meant: exit code 2."""

    exit_code = 2
