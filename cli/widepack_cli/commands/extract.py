"""`widepack extract`: writes the weights of one member to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import click

from widepack_bench.text import plural

from ..shared.failures import Failure
from ..shared.options import ARTIFACT, example

if TYPE_CHECKING:
    from widepack_artifacts.state_dicts import StateDicts


@click.command(
    epilog=example(
        "widepack extract ens.wide fold3",
        "widepack extract ens.wide 0 -o first.safetensors",
        "widepack extract ens.wide fold3 -o fold3.pt --force",
    )
)
@ARTIFACT
@click.argument("member")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="A .pt, .pth or .safetensors file. Default: MEMBER.safetensors in the current folder, or MEMBER.pt "
    "for a model whose load_state_dict reads versions or extra state, which safetensors does not have.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def command(artifact: Path, member: str, out: Path | None, force: bool) -> None:
    """Write the weights of MEMBER (a name, or a number from 0) of ARTIFACT to a state dict.

    The state dict is that of the member after the checkpoint was loaded, bit for bit, under the model's
    names, with the versions and the extra state of its modules. If the artifact was built with `--dtype`,
    the weights have that dtype. The hashes of the artifact's files are checked first.
    """
    from widepack.spec.names import number_in
    from widepack_artifacts.reader import Reader

    manifest = Reader(artifact).manifest
    names = [m.name for m in manifest.members]
    name = names[number_in(names, member)]
    needs = _needs_pt(manifest.state_dicts)
    out = out or Path(f"{name.replace('/', '-')}{'.pt' if needs else '.safetensors'}")
    if out.suffix not in (".pt", ".pth", ".safetensors"):
        raise click.BadParameter(f"{out} must end in .pt, .pth or .safetensors", param_hint="--out")
    if needs and out.suffix == ".safetensors":
        raise Failure(f"{out}: a safetensors file has no {needs}, which the model reads; write a .pt file")
    import widepack
    from widepack.system.atomic_file import admit, whole

    admit(out, force)
    ens = widepack.load(artifact, verify="hashes", prologue=False, warmup=False)
    if refused := manifest.state_dicts.changed_at_load:
        raise Failure(f"member {name}: {refused}")
    state = ens.state_dict(name)
    for k in state:  # clones: the file must not share memory with the artifact, nor two names with each other
        state[k] = state[k].detach().clone() if hasattr(state[k], "detach") else state[k]
    try:
        with whole(out, force, out.suffix) as path:
            save(state, path)
    except OSError as e:
        raise Failure(
            f"{out}: cannot be written: {e.strerror or e}. No part of it remains; an earlier "
            "file is unchanged"
        ) from e
    click.echo(
        f"wrote {out}: {plural(sum(hasattr(v, 'detach') for v in state.values()), 'tensor')} of member {name}"
    )


def _needs_pt(record: StateDicts) -> str:
    """Returns what a state dict has that a safetensors file does not, if a load of the model reads it."""
    if record.extra:
        return "extra state"
    return "versions (_metadata)" if record.verbatim and not record.verbatim_bare else ""


def save(state: dict[str, Any], path: Path) -> None:
    """Writes a state dict in the format that the suffix names. Raises: OSError."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            save_file({k: v.contiguous() for k, v in state.items()}, path, {"format": "pt"})
        except SafetensorError as e:  # the system's message is only in its text
            raise OSError(str(e)) from e
    else:
        import torch

        from widepack.system.atomic_file import Sink

        with Sink(path) as file:
            torch.save(state, cast(IO[bytes], file))
