"""Runs every op of the allow-list with random operands. Each tensor ends at a page without access.

    python scripts/stress/fence/fuzz_operands.py --cases 130 -o bench/results/fence.json
    python scripts/stress/fence/fuzz_operands.py --ops aten.lstm.input --cases 2000 --seed 7
    python scripts/stress/fence/fuzz_operands.py --ops aten.take.default --case 123

A run that was stopped goes on with the same command. Operands are drawn with NaN, infinities, denormals, the
largest numbers of their type, empty dims, other strides and other sizes. The fence sees accesses outside of
the memory that torch allocates: operands, results, and the workspaces that torch gives to LAPACK. It does
not see memory that MKL allocates for itself.

An operand set goes two ways, like the operands of a node of an untrusted artifact: through the check before a
load (`Walk`), and to the function that a bound program calls. A call may have other sizes than the load, so
the second way does not depend on the first. A Python exception may refuse a set. A set must not end the
process, read or write outside its tensors, or take more than 20 s. A call that returns is repeated with other
bytes in new memory: a result that differs contains memory that the op never wrote.

A case depends only on the op, the seed and its number. `--case` runs one case again in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SECONDS = 20.0
UNWRITTEN = "unwritten"
FILLS = (0x00, 0xFF)
"""The bytes of new memory in the two calls of a case: 0 and NaN, or 0 and -1."""
Fill = Callable[[int], None]
LARGE = 2**23
"""Calls whose results have more numbers are not repeated."""
VARY = frozenset({"aten.linalg_lstsq.default"})
"""Ops that are not called twice. LAPACK's `gelsy` begins with pivots that torch does not set: they determine
the order of the columns, so that the solution of a matrix without full rank varies.
"""
AT_ONCE = 40
"""The number of ops after which the result is written."""
BYTES = 6 * 2**30
"""Memory of a worker. An operand set that asks for more is refused."""


def compiled(folder: Path) -> Path:
    """Compiles the allocator and returns the library. Raises: CalledProcessError, FileNotFoundError."""
    library = folder / "fence.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "allocator.c"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


# ---------------------------------------------------------------- one operand set


def admitted(op: str, args: list[Any], kwargs: dict[str, Any]) -> str:
    """Checks the operands as a load does.

    Returns: `admitted`; `refused`; or `too much` for operands that need more memory or work than a load
    may take, or that no program can have at a call. Operands with `too much` are not run.
    """
    import torch

    from widepack.errors import ArtifactError
    from widepack.ir import ops
    from widepack.runtime.budget import Budget
    from widepack.runtime.walk import NeedsValues, Walk
    from widepack_artifacts.program import Node, Output, Program, Ref, Slot

    class TooMuch(ArtifactError):
        """The budget does not allow these operands."""

    class SmallBudget(Budget):
        def admit(self, said: str, work: float, memory: float) -> None:
            try:
                super().admit(said, work, memory)
            except ArtifactError as e:
                raise TooMuch(str(e)) from None

    values: list[Any] = []

    def slot(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            values.append(value)
            return Ref(f"x{len(values) - 1}")
        return [slot(v) for v in value] if isinstance(value, (list, tuple)) else value

    named = ops.bind(op, tuple(args), kwargs)
    if any(isinstance(named.get(name), (int, float, str, torch.Tensor)) for name in ops.enumerations(op)):
        return "too much"  # any number in the place of a dtype is refused
    node = Node("y", op, tuple(slot(a) for a in args), {k: slot(v) for k, v in kwargs.items()})
    slots = tuple(Slot(f"x{i}", f"x{i}", "shared", "") for i in range(len(values)))
    program = Program((), slots, (node,), (Output(Ref("y"), "shared"),))
    budget = SmallBudget(2.0**30, 4e9)
    try:
        for with_values in (False, True):
            with contextlib.suppress(NeedsValues):
                Walk(budget, "fuzz", torch.device("cpu"), values=with_values).run(program, values)
                break
    except TooMuch:
        return "too much"
    except ArtifactError as e:
        # more tensors than a load may make: the number of results does not affect memory safety
        return "too much" if "tensors; at most" in str(e) else "refused"
    return "admitted"


def call(op: str, args: list[Any], kwargs: dict[str, Any], unchecked: bool = False) -> tuple[str, Any]:
    """Runs an operand set.

    Returns: how it ended: `ran`, or the class of the exception; and the results, or None.
    """
    import torch

    from widepack.ir import ops

    torch.manual_seed(0)
    try:
        with torch.inference_mode():
            return "ran", ops.function(op, "none" if unchecked else "all")(*args, **kwargs)
    except Exception as e:  # noqa: BLE001  # each class is a refusal; a bound program raises an error of widepack instead
        return type(e).__name__, None


def case(
    op: str, seed: int, number: int, unchecked: bool = False, fill: Fill | None = None
) -> tuple[str, str]:
    """Runs one case. With `fill`, an op that returns runs again with other bytes in new memory.

    Returns: how the check before a load and how the call ended. `unwritten` is a call whose results differ.
    """
    from operands import Drawn

    args, kwargs = Drawn(op, 1_000_003 * seed + number).operands()
    first = admitted(op, args, kwargs).replace(" ", "-")
    if first == "too-much":
        return first, "not-called"
    if fill is None or op in VARY:
        return first, call(op, args, kwargs, unchecked)[0]
    how, results = _filled(fill, FILLS[0], op, args, kwargs, unchecked)
    if _numbers(results) > LARGE:
        return first, how
    again, others = _filled(fill, FILLS[1], op, args, kwargs, unchecked)
    return first, how if how == again and _equal(results, others) else UNWRITTEN


def _filled(fill: Fill, byte: int, *what: Any) -> tuple[str, Any]:
    """Runs an operand set as `call` does, with this byte in new memory."""
    fill(byte)
    found = call(*what)
    fill(-1)
    return found


def _numbers(results: Any) -> int:
    """Returns how many numbers the results have."""
    import torch
    from torch.utils import _pytree as pytree

    return sum(x.numel() for x in pytree.tree_leaves(results) if isinstance(x, torch.Tensor))


def _equal(results: Any, others: Any) -> bool:
    """Returns whether two results of one op are equal, up to the rounding of another order of sums."""
    import torch
    from torch.utils import _pytree as pytree

    for x, y in zip(pytree.tree_leaves(results), pytree.tree_leaves(others), strict=True):
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            return False
        wide = torch.complex128 if x.is_complex() else torch.float64
        with contextlib.suppress(RuntimeError):  # no op reads a negated bool, or a size below 0
            if not torch.allclose(x.to(wide), y.to(wide), rtol=1e-2, atol=1e-3, equal_nan=True):
                return False
    return True


# ---------------------------------------------------------------- worker and monitor


def work(tasks: str, seed: int, unchecked: bool) -> None:
    """Runs the cases of a list `[[op, first, last], ...]`, and writes one line before and after each."""
    import warnings

    import torch

    import widepack

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    widepack.primitives.find("linear")  # the ops and the samples are created before the fence is on
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    assert library.fence_enable(1) == 0, "no addresses for the fence"
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + BYTES,) * 2)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # an op may print
    for op, first, last in json.loads(tasks):
        for number in range(first, last):
            out.write(f"> {op} {number}\n")
            found = case(op, seed, number, unchecked, library.fence_fill)
            out.write(f"< {found[0]} {found[1]}\n")


class Monitor:
    """Runs cases in workers and restarts a worker that ends or takes too long.

    Args:
        seed: The seed of all cases.
        library: The compiled allocator.
        unchecked: Whether ops run without their checks.
    """

    def __init__(self, seed: int, library: Path, unchecked: bool) -> None:
        self.seed, self.library, self.unchecked = seed, library, unchecked
        self.ended: list[dict[str, Any]] = []
        self.crashes = 0
        self.outcomes: dict[str, Counter[str]] = {}

    def run(self, tasks: list[list[Any]]) -> None:
        """Runs all tasks `[op, first, last]`. After a crash, another worker runs the rest."""
        while tasks:
            tasks = self._once(tasks)

    def _once(self, tasks: list[list[Any]]) -> list[list[Any]]:
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment = {**os.environ, **threads, "LD_PRELOAD": str(self.library)}
        options = ["--worker", json.dumps(tasks), "--seed", str(self.seed)]
        options += ["--unchecked"] if self.unchecked else []
        worker = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert worker.stdout is not None
        at: tuple[str, int] | None = None
        buffer = b""
        while True:
            ready, _, _ = select.select([worker.stdout], [], [], SECONDS if at else 600.0)
            chunk = os.read(worker.stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                at = self._line(line.decode(), at)
        if not ready:
            worker.kill()
        code = worker.wait()
        worker.stdout.close()
        if at is None:
            if code:
                raise RuntimeError(f"the worker ended with {code} outside a case")
            return []
        how = "timeout" if not ready else signal.Signals(-code).name if code < 0 else f"exit {code}"
        self.crashes += 1
        self.ended.append({"op": at[0], "case": at[1], "how": how})
        print(f"{at[0]} case {at[1]}: {how}", file=sys.stderr, flush=True)
        return _after(tasks, at)

    def _line(self, line: str, at: tuple[str, int] | None) -> tuple[str, int] | None:
        mark, first, second = line.split(" ", 2)
        if mark == ">":
            return first, int(second)
        assert at is not None
        self.outcomes.setdefault(at[0], Counter())[f"{first}, {second}"] += 1
        if second == UNWRITTEN:
            self.ended.append({"op": at[0], "case": at[1], "how": UNWRITTEN})
            print(f"{at[0]} case {at[1]}: a result was never written", file=sys.stderr, flush=True)
        return None


def _after(tasks: list[list[Any]], at: tuple[str, int]) -> list[list[Any]]:
    """Returns the tasks after a case."""
    for i, (op, first, last) in enumerate(tasks):
        if op == at[0] and first <= at[1] < last:
            rest = [[op, at[1] + 1, last]] if at[1] + 1 < last else []
            return rest + tasks[i + 1 :]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", help="names of ops, separated by commas. Default: the whole allow-list")
    parser.add_argument("--cases", type=int, default=130, help="operand sets for each op")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case of the op in this process, without the fence")
    parser.add_argument("--unchecked", action="store_true", help="call the ops without their checks")
    parser.add_argument("-o", "--out", type=Path, help="a JSON file for the result")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT / package) for package in (".", "artifacts", "bench", "cli")] + [str(HERE)]
    if given.worker:
        work(given.worker, given.seed, given.unchecked)
        return
    names = given.ops.split(",") if given.ops else fuzzed()
    if given.case is not None:
        show(names[0], given.seed, given.case)
        return
    with tempfile.TemporaryDirectory(prefix="widepack-fence-") as folder:
        monitor = Monitor(given.seed, compiled(Path(folder)), given.unchecked)
        with contextlib.suppress(KeyboardInterrupt):
            document = _run(monitor, names, given.cases, given.out)
    crashes = Counter(f"{e['op']} {e['how']}" for e in monitor.ended)
    print(
        f"{document['cases']:,} operand sets of {len(names)} ops in {document['seconds']:.0f} s: "
        f"{len(monitor.ended)} ended the process or returned memory that was never written"
    )
    for what, count in sorted(crashes.items()):
        print(f"  {what}: {count}")
    sys.exit(1 if monitor.ended else 0)


def _run(monitor: Monitor, names: list[str], cases: int, out: Path | None) -> dict[str, Any]:
    """Runs the cases of all ops, and writes the result after every `AT_ONCE` ops.

    If the file has a part of this run, the ops that it lacks run.
    """
    from widepack_bench.report.environment import environment

    document: dict[str, Any] = {
        "environment": environment("cpu", 1),
        "command": f"scripts/stress/fence/fuzz_operands.py --cases {cases} --seed {monitor.seed}",
        "seed": monitor.seed,
        "ops": len(names),
    }
    begin = time.time()
    if out is not None and out.is_file():
        before = json.loads(out.read_text(encoding="utf-8"))
        if before["command"] == document["command"] and before["ops"] == len(names):
            monitor.ended, monitor.crashes = before["ended"], before["crashes"]
            monitor.outcomes = {op: Counter(c) for op, c in before["outcomes"].items()}
            begin -= before["seconds"]
    left = [op for op in names if op not in monitor.outcomes]
    for chunk in (left[i : i + AT_ONCE] for i in range(0, len(left) or 1, AT_ONCE)):
        monitor.run([[op, 0, cases] for op in chunk])
        document["cases"] = sum(sum(c.values()) for c in monitor.outcomes.values()) + monitor.crashes
        document["seconds"] = round(time.time() - begin, 1)
        document |= {"ended": monitor.ended, "crashes": monitor.crashes}
        document["outcomes"] = {op: dict(sorted(c.items())) for op, c in sorted(monitor.outcomes.items())}
        if out is not None:
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return document


def fuzzed() -> list[str]:
    """Returns the ops of the allow-list that read tensors."""
    from widepack.ir import ops
    from widepack_artifacts.opset import OPS

    python = {"loop", *ops.PYTHON}
    return sorted(op for op in OPS if op not in python and not op.startswith("aten.sym_"))


def show(op: str, seed: int, number: int) -> None:
    """Prints the operands of a case and runs it in this process."""
    from operands import Drawn

    faulthandler.enable()
    args, kwargs = Drawn(op, 1_000_003 * seed + number).operands()
    print(op, args, kwargs, flush=True)
    print(*case(op, seed, number))


if __name__ == "__main__":
    main()
