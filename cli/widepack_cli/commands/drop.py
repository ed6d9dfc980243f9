"""`widepack drop`: removes members from an artifact."""

from __future__ import annotations

from pathlib import Path

import click

from ..shared.options import ARTIFACT, example, json_option, stdout_kept
from ..shared.progress_bar import Progress
from ..shared.revision import out_options, print_report


@click.command(epilog=example("widepack drop ens.wide fold3", "widepack drop ens.wide 0 5 -o rest.wide"))
@ARTIFACT
@click.argument("members", metavar="MEMBER...", nargs=-1, required=True)
@out_options
@json_option
def command(
    artifact: Path,
    members: tuple[str, ...],
    out: Path | None,
    force: bool,
    max_shard_size: str | None,
    as_json: bool,
) -> None:
    """Remove members from ARTIFACT, by name or by number from 0. At least one member must remain.

    The programs contain the number of members, so they are lowered again with predicted plans, and plans that
    were measured for more members are left out. The answers are verified again before one rename publishes
    the result. To keep the weights of a member, run `widepack extract` first.
    """
    from widepack.spec.names import number_in
    from widepack_artifacts.reader import Reader

    names = [m.name for m in Reader(artifact).manifest.members]
    with stdout_kept(as_json), Progress() as progress:
        import widepack

        report = widepack.drop(
            artifact,
            [number_in(names, m) for m in members],
            out=out,
            force=force,
            max_shard_size=max_shard_size,
            progress=progress,
        )
    print_report(report, as_json)
