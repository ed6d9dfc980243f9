"""The group `widepack`: its commands by name, and how an error looks."""

from __future__ import annotations

import errno
import os
import traceback
import warnings
from difflib import get_close_matches
from importlib import import_module, metadata
from typing import Any

import click

from widepack_artifacts.errors import WidepackError

# Name -> module and one line for --help, so that it loads none of them; in the order in which a user meets them.
COMMANDS = {
    "demo": ("demo", "Train eight small classifiers and take them all the way."),
    "build": ("build", "Turn N checkpoints into one artifact that runs them all."),
    "bench": ("bench", "Time an artifact beside its members without widepack."),
    "inspect": ("inspect_artifact", "Say what is in an artifact."),
    "trace": ("trace", "Say how each op of the member runs for all members, and why."),
    "verify": ("verify", "Check an artifact's files and answers."),
    "tune": ("tune", "Measure plans on this machine, and keep the fastest."),
    "compile": ("compile", "Compile an artifact's programs for this machine."),
    "extract": ("extract", "Write one member's weights to a checkpoint of its own."),
    "update": ("update", "Put other checkpoints in the places of members."),
    "append": ("append", "Add members to an artifact."),
    "drop": ("drop", "Take members out of an artifact."),
    "export": ("export", "Write an artifact as ONNX, or as a torch.export program."),
    "primitives": ("primitives", "List the ops that run wide, and the strategies of each."),
    "selftest": ("selftest", "Check widepack's answers on this machine."),
    "info": ("info", "Say which versions and devices widepack sees here."),
}


class Failure(click.ClickException):
    """A paragraph on standard error and exit code 1."""


class Refusal(Failure):
    """What cannot be meant: exit code 2."""

    exit_code = 2


class Lazy(click.Group):
    """A group that imports a command when it is asked for, and prints every error as one paragraph."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f".{COMMANDS[cmd_name][0]}", __package__).command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], COMMANDS, n=1)
            if not near or "mean" in error.message:
                raise
            raise click.UsageError(f"{error.message} Did you mean {near[0]}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        if not ctx.params.get("debug"):
            warnings.simplefilter("ignore", FutureWarning)  # of torch about torch: nothing that the user could change
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of a pipe has gone: click ends in silence
            if ctx.params.get("debug"):
                traceback.print_exc()
            raise _failure(error) from error


def _failure(error: Exception) -> Failure:
    """Any exception as one paragraph."""
    if isinstance(error, WidepackError):
        return (Refusal if error.exit_code == 2 else Failure)(str(error))
    if isinstance(error, OSError):
        names = [os.fsdecode(n) for n in (error.filename, error.filename2) if isinstance(n, (str, bytes, os.PathLike))]
        return Failure(": ".join([*names, error.strerror or str(error) or type(error).__name__]))
    if isinstance(error, MemoryError):
        return Failure("there is not enough memory for this")
    first = (str(error).strip().splitlines() or [""])[0]
    return Failure(f"{type(error).__name__}: {first}. That is a fault of widepack's, not an answer: `widepack --debug ...` shows where it happened")


def _version(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        try:
            click.echo(f"widepack {metadata.version('widepack')}")
        except metadata.PackageNotFoundError:
            click.echo("widepack (not installed: run from its source tree)")
        ctx.exit()


EPILOG = """Example:

\b
  widepack build ckpts/*.pt -o ens.wide --model net.py:make --input "x=float32[B,3,32,32]"
  widepack bench ens.wide
"""


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120}, epilog=EPILOG)
@click.option("--debug", is_flag=True, envvar="WIDEPACK_DEBUG", help="Show the traceback of an error.")
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version and exit.")
def cli(debug: bool) -> None:
    """Run N trained models of one architecture as one."""


def main() -> None:
    """The entry point of the `widepack` script."""
    cli(prog_name="widepack")
