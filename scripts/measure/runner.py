"""Runs what measures. A script declares its rows, and a function that measures one of them:

    def main() -> int:
        given = parser(__doc__, "reduce-cpu.json", seconds=4.0).parse_args()
        with quiet(1), torch.inference_mode():
            return run(given, {f"{shape}": partial(measured, shape, given.seconds) for shape in SHAPES})

The document of a run is JSON: its format, what it is, where it was measured, and the rows by key. It is
written as soon as a row is known. A later run measures the rows that are missing or that ended with an
error, and refuses a document of another device or another torch. An exception is the row's `error`.

Contestants in one process are timed by `widepack_bench.measure.race`. Contestants that need a process of
their own take turns: `in_turns` and `child`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import widepack
from widepack.errors import UsageError
from widepack_bench.baselines.members import reason
from widepack_bench.measure.race import order
from widepack_bench.models.weights import write_checkpoints
from widepack_bench.report.environment import environment
from widepack_bench.report.json_file import read_document, write_whole

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
CHECKED = ("device", "tf32")
"""What must be equal in all runs of a document, beside torch's version."""

FAILED = 3
"""The exit code of a run in which all rows were tried and some ended with an error."""

Row = Mapping[str, Any]
Measure = Callable[[], Row]
T = TypeVar("T")


class RowFile:
    """A document with rows by key.

    Args:
        path: The file. It may exist: its rows are kept.
        form: The document's format and version.
        what: What the rows are, in words.
        device: Where they are measured.
        again: Whether earlier rows are thrown away.

    Raises:
        UsageError: The file is another document, or its rows are of another device or version of torch.
    """

    def __init__(self, path: Path, form: str, what: str, device: str, again: bool = False) -> None:
        self._path = path
        now = environment(device, 1)
        document = None if again else read_document(path, form, what)
        self.document: dict[str, Any] = document or {"format": form, "what": what, "rows": {}}
        if self.rows and (other := differences(self.document["environment"], now)):
            raise UsageError(
                f"{path} has rows that were measured elsewhere: {other}. Give another file, or remove it"
            )
        self.document["environment"] = now
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def rows(self) -> dict[str, Any]:
        """The rows by key."""
        rows: dict[str, Any] = self.document["rows"]
        return rows

    def must_run(self, key: str) -> bool:
        """Returns whether a row is missing or ended with an error."""
        return key not in self.rows or "error" in self.rows[key]

    def add(self, key: str, row: Row) -> None:
        """Adds or replaces a row, and writes the file."""
        self.rows[key] = dict(row)
        self.write()

    def write(self) -> None:
        """Writes the file."""
        write_whole(self._path, self.document)


def differences(before: Row, now: Row) -> str:
    """Returns what differs between two environments whose measurements are not mixed."""
    pairs = {key: (before.get(key), now.get(key)) for key in CHECKED}
    pairs["torch"] = before["versions"]["torch"], now["versions"]["torch"]
    return "; ".join(f"{key} {old}, and now {new}" for key, (old, new) in pairs.items() if old != new)


def parser(
    doc: str | None, out: str, *, seconds: float | None = None, device: str = ""
) -> argparse.ArgumentParser:
    """Returns a parser with the options of all measurements.

    Args:
        doc: The docstring of the script.
        out: The name of the file in `bench/results`, unless `-o` names another. The format has its name.
        seconds: The default time of a race; None for a script that times no races.
        device: The default device; "" for a script that runs on the CPU alone.
    """
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    form = f"widepack.{out.removesuffix('.json').replace('/', '-')}/1"
    what = " ".join((doc or "").split("\n\n")[0].split())
    found.set_defaults(form=form, what=what, device="cpu")
    found.add_argument("-o", "--out", type=Path, default=RESULTS / out, help="the JSON document")
    found.add_argument("--only", default="", help="only rows whose keys have this text")
    found.add_argument("--again", action="store_true", help="measure also the rows that the document has")
    if seconds is not None:
        words = f"of timing for each race (default: {seconds:g})"
        found.add_argument("--seconds", type=float, default=seconds, help=words)
    if device:
        words = f"cuda, or cpu for a rehearsal (default: {device})"
        found.add_argument("--device", default=device, help=words)
    return found


def file_of(given: argparse.Namespace) -> RowFile:
    """Returns the document that the options name."""
    try:
        return RowFile(given.out, given.form, given.what, given.device, given.again)
    except UsageError as error:
        raise SystemExit(f"{error}. `--again` measures all rows anew") from None


def run(
    given: argparse.Namespace,
    cases: Mapping[str, Measure] | Iterable[tuple[str, Measure]],
    *,
    summary: Callable[[Sequence[Row]], Row] | None = None,
    **fields: Any,
) -> int:
    """Measures the rows that the document lacks. Returns the exit code: `FAILED` if a row ended with an
    error.

    Args:
        given: The options, of `parser`.
        cases: What measures each row, by key.
        summary: Makes the document's `summary` of the rows without errors.
        fields: What else the document has.
    """
    file, failed = file_of(given), 0
    file.document |= fields
    for key, measure in cases.items() if isinstance(cases, Mapping) else cases:
        if given.only not in key or not file.must_run(key):
            continue
        try:
            row = measure()
        except Exception as error:  # noqa: BLE001  # whatever a row raises is its result
            row = {"error": reason(error)}
        failed += "error" in row
        file.add(key, {**row, "commit": file.document["environment"]["commit"]})
        say(f"{key}: {one_line(row)}")
        right = [r for r in file.rows.values() if "error" not in r]
        if summary is not None and right:
            file.document["summary"] = summary(right)
            file.write()
    return FAILED if failed else 0


def one_line(row: Row) -> str:
    """Returns the error of a row, or its numbers and its values with an interval."""
    if "error" in row:
        return str(row["error"])
    values = {name: v["value"] if isinstance(v, dict) and "value" in v else v for name, v in row.items()}
    return ", ".join(f"{name} {v:.4g}" for name, v in values.items() if isinstance(v, (int, float)))


def in_turns(kinds: Sequence[str], once: Callable[[str, int], T], rounds: int) -> dict[str, list[T]]:
    """Runs contestants in turn, in changing order. Returns what each gave in each round.

    Args:
        kinds: The contestants.
        once: Runs one, in a round. Round -1 fills caches and does not count.
        rounds: How many count.
    """
    found: dict[str, list[T]] = {kind: [] for kind in kinds}
    for number in range(-1, rounds):
        for place in order(max(number, 0), len(kinds)):
            value = once(kinds[place], number)
            if number >= 0:
                found[kinds[place]].append(value)
    return found


def child(code: str, *arguments: object, variables: Mapping[str, str | None] | None = None) -> Any:
    """Runs Python code in a process of its own. Returns the last line that it prints, which is JSON.

    variables: of its environment, beside those of this process; None removes one. Raises: RuntimeError, with
    the end of what the process said.
    """
    path = os.pathsep.join(p for p in sys.path if p)
    given = {**os.environ, "PYTHONPATH": path, **(variables or {})}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in given.items() if value is not None},
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def built(
    folder: Path | str,
    make: Callable[[], nn.Module],
    count: int,
    inputs: Sequence[str],
    device: str = "cpu",
    shared: Callable[[str], bool] = lambda name: False,
    **options: Any,
) -> tuple[list[nn.Module], Path]:
    """Builds members with random weights. Returns them as modules on the device, and the artifact.

    Args:
        folder: Where the checkpoints and the artifact are written.
        make: Makes a member.
        count: Of members.
        inputs: Their specs; empty with the option `sample`.
        device: Where the artifact runs.
        shared: Names of weights that are equal in all members.
        options: Of `widepack.build`.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(build_threads(device))
    paths, path = write_checkpoints(make, count, folder, shared), Path(folder) / "e.wide"
    given = {"pt2": False, "budget": 0, "targets": (torch.device(device).type,), **options}
    widepack.build(paths, path, model=make, inputs=list(inputs) or None, **given)
    torch.set_num_threads(before)
    modules = []
    for name in paths:
        modules.append(make().eval().requires_grad_(requires_grad=False))
        modules[-1].load_state_dict(torch.load(name, weights_only=True))
    return [module.to(device) for module in modules], path


def build_threads(device: str) -> int:
    """Returns how many threads a build takes: on a GPU all, since no contestant computes on the CPU."""
    return 1 if device == "cpu" else os.cpu_count() or 1


def say(*words: object) -> None:
    """Prints a line of progress at once."""
    print(*words, file=sys.stderr, flush=True)
