"""`widepack update`: replaces members of an artifact by other checkpoints."""

from __future__ import annotations

from pathlib import Path

import click

from ..shared.failures import Refusal
from ..shared.options import ARTIFACT, example, json_option, model_options, stdout_kept
from ..shared.progress_bar import Progress
from ..shared.revision import checkpoint_options, out_options, print_report


@click.command(
    epilog=example(
        "widepack update ens.wide --member 3 new.pt",
        "widepack update ens.wide --member fold0 a.pt --member fold4 b.pt -o next.wide",
        "widepack update ens.wide --member fold0 a.pt --model net.py:make   # also compares your own module",
    )
)
@ARTIFACT
@click.option(
    "--member",
    "members",
    type=(str, str),
    multiple=True,
    required=True,
    metavar="MEMBER CKPT",
    help="A member, by name or by number from 0, and the checkpoint that replaces it. Repeatable.",
)
@out_options
@model_options
@checkpoint_options
@json_option
def command(
    artifact: Path,
    members: tuple[tuple[str, str], ...],
    out: Path | None,
    force: bool,
    max_shard_size: str | None,
    model: str | None,
    model_args: tuple[str, ...],
    key: str | None,
    trust_pickle: bool,
    ignore: tuple[str, ...],
    base: str | None,
    as_json: bool,
) -> None:
    """Replace members of ARTIFACT by other checkpoints. Names and order do not change.

    The code of your model is not needed: each checkpoint is checked against the artifact's weights and
    programs. If the new member differs in a weight that all members shared, that weight is stored for each
    member. The answers of all members are verified again before one rename publishes the result. At every
    moment the path holds the old artifact or the new one.
    """
    from widepack.spec.names import number_in
    from widepack_artifacts.reader import Reader

    names = [m.name for m in Reader(artifact).manifest.members]
    chosen: dict[int | str, str | Path] = {}
    for member, checkpoint in members:
        number = number_in(names, member)
        if number in chosen:
            raise Refusal(
                f"--member {member}: the member {names[number]} is given twice; give each member once"
            )
        chosen[number] = checkpoint
    with stdout_kept(as_json), Progress() as progress:
        import widepack
        from widepack.spec.config import parse_model_args

        report = widepack.update(
            artifact,
            chosen,
            out=out,
            force=force,
            max_shard_size=max_shard_size,
            key=key,
            trust_pickle=trust_pickle,
            ignore=ignore,
            base=base,
            model=model,
            model_args=parse_model_args(model_args) or None,
            progress=progress,
        )
    print_report(report, as_json)
