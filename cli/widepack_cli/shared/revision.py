"""What `update`, `append` and `drop` share: where the result goes, and how it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from widepack_bench.text import duration, plural, size

from ..commands.build import damaged, some
from .options import emit

if TYPE_CHECKING:
    from widepack import ReviseReport

F = TypeVar("F", bound=Callable[..., Any])
_WAYS = {
    "reflink": "the new members' slices, into a file that shares the rest with the old one",
    "kernel": "a copy of the old file, the new members' slices written into it",
    "copy": "a copy of the old file, the new members' slices written into it",
    "streamed": "written anew",
    "kept": "as they were",
}


def out_options(f: F) -> F:
    """`-o`, `--force` and `--max-shard-size`."""
    f = click.option("--max-shard-size", metavar="SIZE", help="Of a weights file; all are written anew then. Without it: as the artifact was built.")(
        f
    )
    f = click.option("--force", is_flag=True, help="Replace an artifact that is at OUT.")(f)
    return click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the result there; without it ARTIFACT itself is replaced.")(f)


def checkpoint_options(f: F) -> F:
    """How checkpoints are read."""
    f = click.option("--trust-pickle", is_flag=True, help="Unpickle whatever the checkpoints hold. This runs the code that they name.")(f)
    return click.option("--key", help="Where the state dict is inside a checkpoint that holds more, such as ema.model.")(f)


def tell(report: ReviseReport, as_json: bool) -> None:
    """The report, for people or for programs."""
    if as_json:
        emit(report.to_json())
    else:
        click.echo("\n".join(lines(report)))


def lines(report: ReviseReport) -> list[str]:
    """What became of the artifact."""
    weights = ", ".join(f"{size(count)} {kind}" for kind, count in report.weights.items() if count)
    text = [f"{plural(len(report.members), 'member')}: {some(report.members)}"]
    for c in report.changed:
        if "source" not in c:
            text.append(f"{'dropped':<13}{c['member']}, which was {c['left']}")
        else:
            text.append(f"{'changed' if 'left' in c else 'new':<13}{c['member']} is {c['source']}{', and was ' + c['left'] if 'left' in c else ''}")
    text.append(f"{'weights':<13}{weights or 'none'}: {_WAYS[report.written]}")
    for k in report.kinds:
        why = "not equal in all members any more" if k["was"] == "shared" else "of one shape in all members now"
        text.append(f"{'kind':<13}{k['weight']} is {why}: {k['was']} {size(k['before'])} -> {k['kind']} {size(k['after'])}")
    again = "lowered again" + ("" if report.lowered == ["forward"] else f" ({', '.join(report.lowered)})")
    text.append(f"{'programs':<13}{again if report.lowered else 'as they were'}")
    text += [f"{'left out':<13}a measured plan, {words}; measure again: widepack tune" for words in report.left_out]
    text += damaged(report.not_finite)
    asked = f"; the own modules of {some(report.asked)} hold to the captured program" if report.asked else ""
    text.append(f"{'verified':<13}every wide program for all members in float64, and the probe{asked}")
    text.append(f"{'time':<13}{', '.join(f'{stage} {duration(1000 * s)}' for stage, s in report.seconds.items())}")
    return [*text, f"wrote {report.path}, {size(report.bytes_disk)}, now {report.digest}"]
