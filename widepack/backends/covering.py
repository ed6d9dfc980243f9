"""Compiles variants of a program until they cover its sizes, checks each, and keeps programs in a cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import LoweringError, WidepackError
from ..system.compiled_cache import CompiledCache, default_folder
from .flat import Flat
from .index_flags import is_flagged
from .task import SIZES, Function, Sizes, Task, Unavailable, first_line, quiet, sizes_to_try, words
from .variants import Checked, Variant

if TYPE_CHECKING:
    from .tracing import TracedGraph

VARIANTS = 2
"""The most variants of a program."""


def refuse_other_devices(task: Task, backend: str) -> None:
    """Refuses a task on another device than the CPU. Raises: Unavailable."""
    if task.device.type != "cpu":
        raise Unavailable(
            f"backend {backend!r} runs on the cpu in this version, and the model is on {task.device}; load "
            "with backend='eager'"
        )


def key_of(task: Task, **parts: Any) -> str:
    """Returns the key of a compiled program: everything that it depends on. parts: what a backend adds."""
    parts |= {
        "program": task.content,
        "pattern": task.pattern,
        "dims": {d: list(v) for d, v in task.dims.items()},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def stored(
    task: Task, key: str, why: str, compile_into: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """Returns the folder and the record of a compiled program, and compiles it first if the task allows that.

    Args:
        task: The program.
        key: From `key_of`.
        why: Says that there is none, and what the user may do. It names the place `{folder}`.
        compile_into: Writes the program's files into a folder, and returns its record.

    Raises:
        Unavailable: There is none, and the task may not compile.
        UsageError: Other users can write in the folder.
    """
    cache = CompiledCache(task.cache or default_folder())
    entry = cache.find(key)
    if entry is None and not task.compile:
        raise Unavailable(f"{task.title} {why.format(folder=cache.folder)}")
    return entry or cache.make(key, compile_into)


def covering(task: Task, flat: Flat, compile_at: Callable[[int, Sizes], Variant]) -> list[Variant]:
    """Compiles variants until all trial sizes are covered. Each gives the answers of the flat graph.

    Args:
        task: The program.
        flat: Its flat form.
        compile_at: Compiles the variant with a number, at sizes.

    Returns:
        The variants, in the order in which they are tried.

    Raises:
        LoweringError: A variant gives other answers than the flat graph. Also what `compile_at` raises.
    """
    tried, made = list(sizes_to_try(task)), list[Variant]()
    for number in range(VARIANTS):
        open_ = (s for s in tried if min(s.values(), default=2) >= 2 and not any(v.holds(s) for v in made))
        example = dict(task.example) if number == 0 else next(open_, None)
        if example is None or any(v.fixed for v in made):
            break
        if task.progress:
            task.progress(f"compiling {task.title}{f', again for {words(example)}' if number else ''}", 0, 1)
        variant = replace(compile_at(number, example), example=example)
        run = Checked(task, flat.shape, [variant], flagged=is_flagged(flat.program))
        least = agree(task, run, task.eager, "the compiled program", variant.holds)
        made.append(replace(variant, least=least))
    return made


def compiled_at(
    task: Task, flat: Flat, example: Sizes, compiler: str, compile_: Callable[[TracedGraph], Any]
) -> tuple[Any, TracedGraph]:
    """Compiles a program for all sizes, or for the example's sizes of all dims but one if that fails.

    Inductor's arithmetic over two symbols of image sizes fails for some networks. The dim that stays open is
    the first, which most programs have as their batch.

    Returns:
        What `compile_` returned, and what it was given.

    Raises:
        LoweringError: What the compiler raised for all sizes.
    """
    from .tracing import traced  # imports torch's compiler, which a compiled program does not need

    try:
        with warnings.catch_warnings(), quiet(), torch.no_grad():
            warnings.simplefilter("ignore")
            try:
                made = traced(flat, example, task.dims, task.device)
                return compile_(made), made
            except WidepackError:
                raise
            except Exception:
                if len(task.dims) < 2:
                    raise
                with contextlib.suppress(Exception):
                    made = traced(flat, example, task.dims, task.device, list(task.dims)[1:])
                    return compile_(made), made
                raise
    except WidepackError:
        raise
    except Exception as e:
        raise LoweringError(
            f"{task.title} does not compile with {compiler} of torch {torch.__version__}"
            f"{f' at {words(example)}' if example else ''}: {type(e).__name__}: {first_line(e)}; "
            "load with backend='eager'"
        ) from e


def agree(
    task: Task,
    run: Function,
    eager: Function,
    what: str,
    holds: Callable[[Sizes], bool] = lambda _: True,
    others: Sequence[int] = SIZES,
) -> dict[str, int]:
    """Checks a compiled program against the flat graph.

    run, eager: the two. what: the compiled program, for the message. holds: whether it should be valid at
    sizes. others: the sizes of each dim beside the example's. Returns: the dims at which it is wrong at size
    1, with the smallest valid size. Raises: LoweringError.
    """
    least: dict[str, int] = {}
    for sizes in filter(holds, sizes_to_try(task, others)):
        try:
            inputs = task.inputs(sizes)
            with torch.inference_mode():
                want = eager(*inputs)
        except (RuntimeError, ValueError, IndexError):
            continue  # members do not accept inputs of these sizes
        try:
            with torch.inference_mode():
                wrong = task.differ(run(*inputs), want)
        except torch.OutOfMemoryError:
            raise  # it says nothing of the program
        except Exception as e:  # noqa: BLE001  a session has its own classes of errors
            wrong = f"it fails: {type(e).__name__}: {first_line(e)}"
        ones = [d for d, s in sizes.items() if s == 1 and task.example[d] != 1]
        if wrong and ones:
            least.update(dict.fromkeys(ones, 2))
        elif wrong:
            raise LoweringError(
                f"{task.title}: {what} differs from the flat graph at {words(sizes) or 'its sizes'}: "
                f"{wrong}. It is not used; load with backend='eager'"
            )
    return least
