"""`widepack selftest`: whether widepack's answers are right on this machine."""

from __future__ import annotations

import os
from typing import Any

import click

from widepack_bench.text import plural

from ..shared.options import emit, example, json_option, stdout_kept
from ..main import Failure
from ..shared.progress_bar import Progress

SHOWN = 20


@click.command(epilog=example("widepack selftest", "widepack selftest --blocks -p quick", "widepack selftest --primitives --json"))
@click.option("--primitives", is_flag=True, help="The strategies of all ops alone.")
@click.option("--blocks", is_flag=True, help="The reference blocks alone, each built and loaded.")
@click.option(
    "-p",
    "--preset",
    type=click.Choice(["ci", "quick", "full"]),
    default="ci",
    show_default=True,
    help="How much is tried: under a minute, or longer.",
)
@json_option
def command(primitives: bool, blocks: bool, preset: str, as_json: bool) -> None:
    """Check widepack's answers on this machine, with this torch and its kernels.

    Every strategy of every op is run over the op's samples and held to the op once a member in float64; reference blocks are built and loaded. The exit code is 0
    where all of them hold, else 1, and what does not hold is named.
    """
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # read when torch is imported: ops warn of themselves on standard error, which is no news here
    both = not (primitives or blocks)
    with stdout_kept(as_json), Progress() as progress:
        from widepack_bench.report.document import environment
        from widepack_bench.selftest import Found, check_blocks, check_primitives

        found = Found()
        if primitives or both:
            checked, untried = check_primitives(preset, progress=progress)
            found = Found(checked, [], untried)
        if blocks or both:
            found = Found(found.primitives, check_blocks(preset, progress=progress), found.untried)
        import torch

        where = environment("cpu", torch.get_num_threads())
    if as_json:
        emit({**found.to_json(), "environment": where})
    else:
        for line in _said(found, where):
            click.echo(line)
    if not found.holds:
        raise Failure(
            f"{plural(len(found.wrong), 'check')} of {len(found.primitives) + len(found.blocks)} failed: do not trust these strategies here, and report them"
        )


def _said(found: Any, where: dict[str, Any]) -> list[str]:
    """What was found, for a person."""
    lines = [f"{where['device']}, torch {where['versions']['torch']}, widepack {where['versions']['widepack']}"]
    if found.primitives:
        right = sum(not c.wrong for c in found.primitives)
        count = len({c.name for c in found.primitives})
        cases = sum(c.cases for c in found.primitives)
        lines.append(f"{right} of {len(found.primitives)} strategies of {plural(count, 'op')} hold, in {plural(cases, 'case')}")
    if found.blocks:
        lines.append(
            f"{sum(not c.wrong for c in found.blocks)} of {plural(len(found.blocks), 'block')} hold: {', '.join(c.name for c in found.blocks if not c.wrong)}"
        )
    if found.untried:
        lines.append(f"not applicable here: {', '.join(found.untried)}")
    lines += [f"wrong: {c.name} {c.strategy}: {c.wrong}" for c in found.wrong[:SHOWN]]
    if len(found.wrong) > SHOWN:
        lines.append(f"({len(found.wrong) - SHOWN} more)")
    return lines
