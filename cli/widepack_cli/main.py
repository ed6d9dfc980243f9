"""The group `widepack`: its commands by purpose, and errors as one paragraph."""

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

from .shared.failures import Failure, Interrupted, Refusal

# Command -> one line for --help, by purpose, so that --help imports none of them. Their modules have the same
# names.
SECTIONS = {
    "Make": {
        "demo": "Train eight small classifiers and try every step.",
        "build": "Turn N checkpoints into one artifact that runs all of them.",
        "verify": "Check the files and the answers of an artifact.",
    },
    "Run and measure": {
        "serve": "Answer inference requests over HTTP, batched over all members.",
        "predict": "Run an artifact over the rows of a file.",
        "bench": "Time an artifact beside its members without widepack.",
        "evaluate": "Measure the members and the ensemble on data with targets.",
        "select": "Choose members and a cascade on validation data.",
        "tune": "Measure plans on this machine and keep the fastest.",
        "advise": "Find what would make calls faster, and try it.",
        "compile": "Compile the programs of an artifact for this machine.",
        "inspect": "Show what an artifact contains.",
        "analyze": "Show what a call costs, as formulas and numbers.",
        "trace": "Show how each op of the member runs for all members, and why.",
    },
    "Change": {
        "update": "Replace members by other checkpoints.",
        "append": "Add members to an artifact.",
        "drop": "Remove members from an artifact.",
    },
    "Share": {
        "export": "Write an artifact as ONNX or as a torch.export program.",
        "extract": "Write the weights of one member to a checkpoint.",
    },
    "This machine": {
        "bench-layers": "Time layers of torch.nn: every strategy beside the baselines.",
        "bench-suite": "Time the suite of reference networks.",
        "primitives": "List the ops that run wide, with their strategies.",
        "calibrate": "Measure what kernels take on this machine.",
        "selftest": "Check widepack's answers on this machine.",
        "info": "Show the versions and devices that widepack sees here.",
    },
}
COMMANDS = {name: line for section in SECTIONS.values() for name, line in section.items()}
MOST_LINES = 5  # of an error


class Lazy(click.Group):
    """A group that imports a command when it is called, and prints every error as one paragraph."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f".commands.{cmd_name.replace('-', '_')}", __package__).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], COMMANDS, n=1)
            if not near or "mean" in error.message:
                raise
            raise click.UsageError(f"{error.message} Did you mean {near[0]}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, line in commands.items()])

    def invoke(self, ctx: click.Context) -> Any:
        if not ctx.params.get("debug"):
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # torch warns about its own code; the user cannot change it
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (KeyboardInterrupt, click.Abort) as error:
            raise Interrupted from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # the reader of the pipe ended: click exits silently
            if ctx.params.get("debug"):
                traceback.print_exc()
            raise _failure(error) from error


def _failure(error: Exception) -> Failure:
    """Returns an exception as one paragraph."""
    if isinstance(error, WidepackError):
        return (Refusal if error.exit_code == 2 else Failure)(_folded(str(error)))
    if isinstance(error, OSError):
        names = [
            os.fsdecode(n)
            for n in (error.filename, error.filename2)
            if isinstance(n, (str, bytes, os.PathLike))
        ]
        return Failure(": ".join([*names, error.strerror or str(error) or type(error).__name__]))
    from widepack.system.memory import bytes_lacking

    lacking = bytes_lacking(error)
    if isinstance(error, MemoryError) or lacking:
        return Failure(f"there is not enough memory{f' for {lacking}' if lacking else ''}")
    first = (str(error).strip().splitlines() or [""])[0]
    return Failure(
        f"{type(error).__name__}: {first}. This is an error in widepack: "
        "`widepack --debug ...` shows where it happened"
    )


def _folded(message: str) -> str:
    """Returns at most five lines of a message."""
    lines = message.split("\n")
    if len(lines) <= MOST_LINES:
        return message
    rest = len(lines) - MOST_LINES + 1
    return "\n".join([*lines[: MOST_LINES - 1], f"and {rest} more lines; `widepack --debug ...` shows all"])


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


@click.group(
    cls=Lazy,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=EPILOG,
)
@click.option("--debug", is_flag=True, envvar="WIDEPACK_DEBUG", help="Show the traceback of an error.")
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_version,
    help="Show the version and exit.",
)
def cli(debug: bool) -> None:
    """Run N trained models of one architecture as one."""


def main() -> None:
    """The entry point of the `widepack` script."""
    # torch says so at its import. Commands that need NumPy say it themselves.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    cli(prog_name="widepack")
