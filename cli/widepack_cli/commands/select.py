"""`widepack select`: chooses members of an ensemble on validation data, and fits a cascade of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from widepack_bench.text import plural

from ..shared.options import ARTIFACT, emit, example, json_option, stdout_kept
from ..shared.progress_bar import Progress
from ..shared.row_options import target_arguments, target_options
from ..shared.threads import use_free_cores

if TYPE_CHECKING:
    from widepack import SelectReport


@click.command(
    epilog=example(
        "widepack select ens.wide --on val.safetensors --target y --of softmax",
        "widepack select ens.wide --on val.csv --target price --input x=f0..f63 -o best.wide",
        "widepack select ens.wide --on val.csv --target kind --of softmax --classes cat,dog,bird "
        "--input x=f0..f63",
        "widepack select ens.wide --on val.parquet --target y --of softmax --allowed 0.002 --dry-run",
    )
)
@ARTIFACT
@target_options
@click.option(
    "--metric",
    type=click.Choice(["accuracy", "log_loss", "squared_error", "nll"]),
    help="What is made best. Default: accuracy with --of, else squared_error. nll is of the normal "
    "distribution with the mean and the variance of the members.",
)
@click.option("--most", type=click.IntRange(min=1), metavar="K", help="Select at most K different members.")
@click.option(
    "--first",
    type=click.IntRange(min=1),
    metavar="K",
    help="The members of the cascade's first stage. Default: fitted.",
)
@click.option(
    "--allowed",
    type=float,
    default=0.0,
    show_default=True,
    metavar="LOSS",
    help="How much the cascade may lose against all selected members: 0.002 for 0.2 points of accuracy.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="Write an artifact of the selected members alone. Default: record the selection in ARTIFACT.",
)
@click.option("--force", is_flag=True, help="Replace an existing artifact at OUT.")
@click.option("--dry-run", is_flag=True, help="Show what would be selected, and write nothing.")
@json_option
def command(artifact: Path, as_json: bool, **options: Any) -> None:
    """Choose members of ARTIFACT and their weights on validation data, and fit a cascade of them.

    Members are added greedily, with replacement, while the mean of their predictions gets better. A selection
    that scores worse than all members is never written. The cascade runs a few of them on all rows, and the
    others only on rows of which these are not sure. The threshold is fitted on the same data. What it costs
    is measured on parts that it was not fitted on. Both are recorded in the artifact: ens.cascade(x) runs
    the cascade.
    """
    arguments = target_arguments(options)
    with stdout_kept(as_json), Progress() as progress:
        import widepack

        use_free_cores()
        report = widepack.select(artifact, **arguments, progress=progress)
    if as_json:
        emit(report.to_json())
    else:
        click.echo("\n".join(lines(report)))


def lines(report: SelectReport) -> list[str]:
    """Returns the report as lines of text."""
    s = {name: f"{value:.4f}" for name, value in report.scores.items()}
    text = [
        f"{report.metric} on {report.rows} rows: all {plural(report.members, 'member')} {s['all']}; best"
        f" member {report.best_member} {s.get('best_member', '-')}; selected {s['selected']}",
        f"selected     {plural(len(report.weights), 'member')}: "
        + ", ".join(f"{name} {weight:.3g}" for name, weight in report.weights.items()),
    ]
    if (c := report.cascade) is None:
        text.append("cascade      none: no cascade runs fewer members within what is allowed")
    else:
        held = c["held_out"]
        text += [
            f"cascade      stages {', '.join(map(str, c['stages']))}, until {c['until']:.4g}:"
            f" {c['score']:.4f} with {c['calls']:.2f} of {report.members} members for each row",
            f"held out     {held['score']:.4f} with {held['calls']:.2f} members; the selected members"
            f" {held['of_selected']:.4f}",
        ]
    return [*text, f"wrote {report.path}" if report.path else "dry run: nothing was written"]
