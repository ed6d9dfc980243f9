"""`widepack drop`: an artifact without some of its members."""

from __future__ import annotations

from pathlib import Path

import click

from ..shared.options import ARTIFACT, example, json_option, stdout_kept
from ..shared.progress_bar import Progress
from ..shared.revision import out_options, tell


@click.command(epilog=example("widepack drop ens.wide fold3", "widepack drop ens.wide 0 5 -o rest.wide"))
@ARTIFACT
@click.argument("members", metavar="MEMBER...", nargs=-1, required=True)
@out_options
@json_option
def command(artifact: Path, members: tuple[str, ...], out: Path | None, force: bool, max_shard_size: str | None, as_json: bool) -> None:
    """Take members, by name or number from 0, out of ARTIFACT; at least one stays.

    Programs are lowered again by rules of thumb, since the number of members stands in them; plans that were measured for more are left out. Every answer is proved
    again before one rename publishes the result. `widepack extract` writes a member's weights to a file of its own first.
    """
    from widepack.spec.names import number_in
    from widepack_artifacts.writer import Reader

    names = [m.name for m in Reader(artifact).manifest.members]
    with stdout_kept(as_json), Progress() as progress:
        import widepack

        report = widepack.drop(
            artifact, [number_in(names, m) for m in members], out=out, force=force, max_shard_size=max_shard_size, progress=progress
        )
    tell(report, as_json)
