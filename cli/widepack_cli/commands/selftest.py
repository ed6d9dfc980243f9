"""`widepack selftest`: checks widepack's answers on this machine."""

from __future__ import annotations

import os
from typing import Any

import click

from widepack_bench.text import plural

from ..shared.failures import Failure
from ..shared.options import emit, example, json_option, stdout_kept
from ..shared.progress_bar import Progress

SHOWN = 20


@click.command(
    epilog=example(
        "widepack selftest", "widepack selftest --blocks -p quick", "widepack selftest --primitives --json"
    )
)
@click.option("--primitives", is_flag=True, help="Check only the strategies of all ops.")
@click.option("--blocks", is_flag=True, help="Check only the reference blocks: each is built and loaded.")
@click.option(
    "-p",
    "--preset",
    type=click.Choice(["ci", "quick", "full"]),
    default="ci",
    show_default=True,
    help="How much is checked: `ci` takes under a minute.",
)
@json_option
def command(primitives: bool, blocks: bool, preset: str, as_json: bool) -> None:
    """Check widepack's answers on this machine, with this torch and its kernels.

    Every strategy of every op runs on the op's samples and is compared with the op of each member in float64.
    Reference blocks are built and loaded. The exit code is 0 if all checks pass. Otherwise it is 1, and the
    failed checks are listed.
    """
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # torch reads it at import; warnings of single ops do not concern the user of this command
    both = not (primitives or blocks)
    with stdout_kept(as_json), Progress() as progress:
        from widepack_bench.report.environment import environment
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
        for line in _lines(found, where):
            click.echo(line)
    if not found.holds:
        raise Failure(
            f"{plural(len(found.wrong), 'check')} of {len(found.primitives) + len(found.blocks)} "
            "failed: do not use these strategies on this machine, and please report them"
        )


def _lines(found: Any, where: dict[str, Any]) -> list[str]:
    """Returns the results as lines of text."""
    lines = [
        f"{where['device']}, torch {where['versions']['torch']}, widepack {where['versions']['widepack']}"
    ]
    if found.primitives:
        right = sum(not c.wrong for c in found.primitives)
        count = len({c.name for c in found.primitives})
        cases = sum(c.cases for c in found.primitives)
        lines.append(
            f"{right} of {len(found.primitives)} strategies of {plural(count, 'op')} are right, in "
            f"{plural(cases, 'case')}"
        )
    if found.blocks:
        lines.append(
            f"{sum(not c.wrong for c in found.blocks)} of {plural(len(found.blocks), 'block')} are "
            f"right: {', '.join(c.name for c in found.blocks if not c.wrong)}"
        )
    if found.untried:
        lines.append(f"not applicable here: {', '.join(found.untried)}")
    lines += [f"wrong: {c.name} {c.strategy}: {c.wrong}" for c in found.wrong[:SHOWN]]
    if len(found.wrong) > SHOWN:
        lines.append(f"({len(found.wrong) - SHOWN} more)")
    return lines
