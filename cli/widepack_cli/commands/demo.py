"""`widepack demo`: eight classifiers from training to a benchmark, by the commands that a user would type."""

from __future__ import annotations

import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from widepack_bench.text import columns, plural

from .bench import Noisy
from ..shared.options import example
from ..main import Failure, Refusal, cli

MODEL = Path(__file__).with_name("digits_model.py")
SPEC = "x=float32[B,64]"


@click.command(epilog=example("widepack demo", "widepack demo /tmp/digits --threads 1"))
@click.argument("folder", default="demo", type=click.Path(path_type=Path, file_okay=False))
@click.option("--count", type=click.IntRange(min=1, max=100), default=8, show_default=True, help="How many classifiers to train.")
@click.option("--budget", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True, help="Seconds of measuring a batch.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads inside an op while measuring.")
def command(folder: Path, count: int, budget: float, threads: int | None) -> None:
    """Train eight small classifiers on scikit-learn's digits and take them all the way, into FOLDER (default: demo).

    Writes a model file, checkpoints and an artifact; builds, verifies and times it; prints the accuracy of each member and of the ensemble.
    Every command is shown as you would type it. A folder of an earlier demo is used again.
    """
    if find_spec("sklearn") is None:
        raise Failure(
            "the demo trains on scikit-learn's digits, and scikit-learn is not installed: pip install scikit-learn (or: pip install 'widepack[demo]')"
        )
    model, checkpoints, artifact = folder / MODEL.name, folder / "ckpts", folder / "digits.wide"
    prepare(folder, model)
    say(f"1. Train {plural(count, 'classifier')}, one a seed")
    for old in checkpoints.glob("seed*.pt"):
        old.unlink()
    shown([Path(sys.executable).name, str(model), str(checkpoints), str(count)])
    trained = subprocess.run([sys.executable, str(model), str(checkpoints), str(count)], check=False)
    if trained.returncode:
        raise Failure(f"training ended with exit code {trained.returncode}; what went wrong stands above")
    say("2. Build one artifact of them")
    paths = [str(checkpoints / f"seed{seed}.pt") for seed in range(count)]
    options = ["-o", str(artifact), "--model", f"{model}:make", "--input", SPEC, "--force"]
    run(["build", *paths, *options], ["build", f"{checkpoints}/*.pt", *options])
    say("3. Verify it")
    run(["verify", str(artifact)])
    say("4. Ask all members at once")
    click.echo("\n".join(accuracies(artifact)))
    say("5. Time it beside the members without widepack")
    timing = ["--budget", f"{budget:g}", *(["--threads", str(threads)] if threads else [])]
    try:
        run(["bench", str(artifact), "--model", f"{model}:make", "--batch", "1,32", *timing])
    except Noisy as noisy:  # says something about the machine, nothing about widepack
        click.echo(noisy.format_message(), err=True)
    say("What else there is")
    for words in (["inspect", str(artifact)], ["trace", str(artifact)], ["extract", str(artifact), "seed0", "-o", str(folder / "seed0.safetensors")]):
        shown(["widepack", *words])


def prepare(folder: Path, model: Path) -> None:
    """Write the model file. Raises: Refusal where the folder holds something that is no demo of ours."""
    text = MODEL.read_text(encoding="utf-8")
    if folder.exists() and any(folder.iterdir()):
        ours = model.is_file() and model.read_text(encoding="utf-8", errors="replace").splitlines()[:1] == text.splitlines()[:1]
        if not ours:
            raise Refusal(f"{folder} exists and is not the folder of an earlier demo; give another one: widepack demo FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    model.write_text(text, encoding="utf-8")


def run(words: list[str], typed: list[str] | None = None) -> None:
    """Show a command as a user types it, and run it."""
    shown(["widepack", *(typed or words)])
    cli.main(words, prog_name="widepack", standalone_mode=False)


def say(text: str) -> None:
    click.echo(f"\n{text}")


def shown(words: list[str]) -> None:
    click.echo(f"$ {' '.join(w if '*' in w else shlex.quote(w) for w in words)}")


def accuracies(artifact: Path) -> list[str]:
    """Each member's accuracy and that of the mean of their probabilities, all from the wide program."""
    import torch

    import widepack

    from .demo_model import data

    _, _, x, y = data()
    click.echo(f'>>> ens = widepack.load("{artifact}"); ens(x).argmax(-1); ens.mean(x, of="softmax").argmax(-1)')
    ens = widepack.load(artifact)
    with torch.inference_mode():
        right = (ens(x).argmax(-1) == y).float().mean(1)  # [N]
        mean = (ens.mean(x, of="softmax").argmax(-1) == y).float().mean().item()
        rows = [[name, f"{value:.2%}"] for name, value in zip(ens.members, right.tolist(), strict=True)]
    return columns([["member", f"accuracy on {len(y)} test images"], *rows, ["mean of all", f"{mean:.2%}"]])
