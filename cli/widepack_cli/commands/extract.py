"""`widepack extract`: one member's weights as a checkpoint of its own."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, cast

import click

from widepack_bench.text import plural

from ..shared.options import ARTIFACT, example
from ..main import Failure


@click.command(
    epilog=example(
        "widepack extract ens.wide fold3", "widepack extract ens.wide 0 -o first.safetensors", "widepack extract ens.wide fold3 -o fold3.pt --force"
    )
)
@ARTIFACT
@click.argument("member")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="A .pt, .pth or .safetensors file. Without it: MEMBER.safetensors in this folder.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def command(artifact: Path, member: str, out: Path | None, force: bool) -> None:
    """Write the weights of MEMBER (a name or a number from 0) of ARTIFACT to a state dict of their own.

    Bit for bit those of the checkpoint that the artifact was built from, under the same names; in the dtype of `--dtype` where it was built with one. The artifact's
    files are held to their hashes first.
    """
    from widepack.spec.names import number_in
    from widepack_artifacts.writer import Reader

    names = [m.name for m in Reader(artifact).manifest.members]
    name = names[number_in(names, member)]
    out = out or Path(f"{name.replace('/', '-')}.safetensors")
    if out.suffix not in (".pt", ".pth", ".safetensors"):
        raise click.BadParameter(f"{out} ends in none of .pt, .pth, .safetensors", param_hint="--out")
    import widepack
    from widepack.system.atomic_file import admit, whole

    admit(out, force)
    # clones: a file of its own, and no two names over one memory
    state = {k: v.detach().clone() for k, v in widepack.load(artifact, verify="hashes", prologue=False, warmup=False).state_dict(name).items()}
    try:
        with whole(out, force, out.suffix) as path:
            save(state, path)
    except OSError as e:
        raise Failure(f"{out}: cannot be written: {e.strerror or e}; nothing of it is left, and what was there before is as it was") from e
    click.echo(f"wrote {out}: {plural(len(state), 'tensor')} of member {name}")


def save(state: dict[str, Any], path: Path) -> None:
    """Write a state dict in the format that the suffix names. Raises: OSError."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file({k: v.contiguous() for k, v in state.items()}, path)
        except SafetensorError as e:  # what the system said stands in its text alone
            raise OSError(str(e)) from e
    else:
        import torch

        from widepack.system.atomic_file import Sink

        with Sink(path) as file:
            torch.save(state, cast(IO[bytes], file))
