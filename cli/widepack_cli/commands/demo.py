"""`widepack demo`: eight classifiers from training to an answer, by the commands that a user would type."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from widepack_bench.text import columns, duration, interval, plural

from ..shared.failures import Failure, Refusal
from ..shared.options import example
from .bench import Noisy

MODEL = Path(__file__).with_name("demo_model.py")
SPEC = "x=float32[B,64]"
BATCH = 32


@click.command(epilog=example("widepack demo", "widepack demo /tmp/digits --count 4"))
@click.argument("folder", default="demo", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--count",
    type=click.IntRange(min=1, max=100),
    default=8,
    show_default=True,
    help="How many classifiers to train.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    default=3.0,
    show_default=True,
    help="Seconds of measuring the speed.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Threads inside an op while measuring.",
)
def command(folder: Path, count: int, budget: float, threads: int) -> None:
    """Train small classifiers of handwritten digits in FOLDER, and try every step.

    The data are scikit-learn's digits. Training takes about 20 seconds on one thread. The demo then builds an
    artifact, checks it, times it, and calls it. Every command is shown as you would type it. FOLDER is `demo`
    by default; a folder of an earlier demo is used again.
    """
    if find_spec("sklearn") is None:
        raise Failure(
            "the demo trains on scikit-learn's digits, and scikit-learn is not installed: "
            "pip install scikit-learn (or: pip install 'widepack[demo]')"
        )
    model, checkpoints, artifact = folder / MODEL.name, folder / "ckpts", folder / "digits.wide"
    prepare(folder, model)
    print_title(f"1. Train {plural(count, 'classifier')} of handwritten digits, one for each seed")
    train(model, checkpoints, count)

    print_title("2. Build one artifact of them, and check its answers")
    paths = [str(checkpoints / f"seed{seed}.pt") for seed in range(count)]
    options = ["-o", str(artifact), "--model", f"{model}:make", "--input", SPEC, "--force"]
    built = run(["build", *paths, *options], shown_as=["build", f"{checkpoints}/*.pt", *options])
    print_results(*(line for line in built.splitlines() if line.startswith(("weights", "plan"))))

    print_title("3. Check its files and its answers")
    checked = run(["verify", str(artifact)])
    print_results(", ".join(" ".join(line.split()[:2]) for line in checked.splitlines()))

    print_title(f"4. Compare its speed with a loop over the {plural(count, 'model')}")
    speed = timed(folder, artifact, model, ["--budget", f"{budget:g}", "--threads", str(threads)])

    print_title("5. Ask all members at once")
    print_results(*answers(artifact), speed)

    print_title("Next:")
    print_results(
        *columns(
            [
                [f"widepack bench {artifact} --model {model}:make", "compare its speed with every baseline"],
                [f"widepack inspect {artifact}", "what the artifact contains"],
                [f"widepack trace {artifact}", "how each op runs for all members"],
                ["docs/tutorial/first-ensemble.md", "the same steps with a model of your own"],
            ]
        )
    )


def prepare(folder: Path, model: Path) -> None:
    """Writes the model file. Raises: Refusal if the folder contains something else than an earlier demo."""
    text = MODEL.read_text(encoding="utf-8")
    if folder.exists() and any(folder.iterdir()):
        earlier = (
            model.is_file()
            and model.read_text(encoding="utf-8", errors="replace").splitlines()[:1] == text.splitlines()[:1]
        )
        if not earlier:
            raise Refusal(
                f"{folder} exists and is not the folder of an earlier demo; give another one: "
                "widepack demo FOLDER"
            )
    folder.mkdir(parents=True, exist_ok=True)
    model.write_text(text, encoding="utf-8")


def train(model: Path, checkpoints: Path, count: int) -> None:
    """Runs the model file as a script, and shows the accuracies of its members in one line.

    Raises:
        Failure: The script failed.
    """
    for old in checkpoints.glob("seed*.pt"):
        old.unlink()
    words = [str(model), str(checkpoints), str(count)]
    show([Path(sys.executable).name, *words])
    click.echo("  accuracy:", nl=False)
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        for line in training.stdout:
            click.echo(f" {line.split()[-1]}", nl=False)
    click.echo()
    if training.returncode:
        raise Failure(f"training ended with exit code {training.returncode}; its messages are above")


def timed(folder: Path, artifact: Path, model: Path, options: list[str]) -> str:
    """Runs `widepack bench` against the loop. Returns the speed as one line."""
    document = folder / "bench.json"
    document.unlink(missing_ok=True)
    words = ["--model", f"{model}:make", "--baseline", "loop", "--batch", str(BATCH)]
    with contextlib.suppress(Noisy):  # the row of the report is marked as noisy
        run(["bench", str(artifact), *words, *options, "--json", str(document)])
    report = json.loads(document.read_text(encoding="utf-8"))
    (row,) = report["rows"]
    call = f"{duration(row['median_ms'])} for {BATCH} images and {plural(report['members'], 'member')}"
    ratio = row["ratio"]
    if ratio["value"] is None:
        print_results("no comparison: the time was too short; run the command again with a larger --budget")
        return f"speed: roughly {call}"
    loop = duration(row["baselines"]["loop"]["median_ms"])
    busy = "; uncertain: other programs keep the machine busy" if row["verdict"] == "noisy" else ""
    print_results(
        f"widepack {duration(row['median_ms'])}, loop {loop}, on {report['environment']['device']}: "
        f"{interval(ratio)} times as fast (95% interval){busy}"
    )
    if busy:
        return f"speed: roughly {call}, {interval(ratio)} times as fast as the loop (uncertain)"
    return f"speed: {call}, {ratio['value']:.1f} times as fast as the loop"


def run(words: list[str], shown_as: list[str] | None = None) -> str:
    """Shows a command as a user types it, and runs it. Returns what it prints, which is shown only if it
    fails.
    """
    show(["widepack", *(shown_as or words)])
    printed, messages = io.StringIO(), io.StringIO()
    main = click.get_current_context().find_root().command.main
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(printed))
            if not sys.stderr.isatty():  # a terminal shows the progress bars
                stack.enter_context(contextlib.redirect_stderr(messages))
            main(words, prog_name="widepack", standalone_mode=False)
    except Noisy:
        raise
    except Exception:
        click.echo(printed.getvalue() + messages.getvalue(), err=True)
        raise
    return printed.getvalue()


def print_title(text: str) -> None:
    """Prints a title."""
    click.echo(f"\n{text}")


def print_results(*lines: str) -> None:
    """Prints results."""
    for line in lines:
        click.echo(f"  {line}")


def show(words: list[str]) -> None:
    """Prints a command as a user types it."""
    click.echo(f"$ {' '.join(w if '*' in w else shlex.quote(w) for w in words)}")


def answers(artifact: Path) -> list[str]:
    """Returns the answers to the image on which members differ most, and the accuracy of one and of all."""
    import torch

    import widepack

    from .demo_model import data

    _, _, x, y = data()
    ens = widepack.load(artifact)
    with torch.inference_mode():
        each: Any = ens(x).argmax(-1)  # [N, B]
        together = ens.mean(x, of="softmax").argmax(-1)  # [B]
        image = int(ens.std(x, of="softmax").amax(-1).argmax())
    digits = " ".join(str(int(digit)) for digit in each[:, image])
    return [
        f'ens = widepack.load("{artifact}"); ens(x).argmax(-1); ens.mean(x, of="softmax").argmax(-1)',
        f"image {image}: the members answer {digits}, their mean answers {int(together[image])}, the "
        f"label is {int(y[image])}",
        f"accuracy on {len(y)} test images: one member {(each == y).float().mean():.2%} on average, "
        f"their mean {(together == y).float().mean():.2%}",
    ]
