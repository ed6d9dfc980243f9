"""`aot`: AOTInductor packages: native code, compiled once into a cache, loaded in milliseconds where there is no compiler.

1. Weights stay outside the package and are bound without a copy; a package is of the shapes and strides of weights, never of their values.
2. Named dims stay symbols. What the compiler takes for granted about sizes is kept beside the package (variants.py); a second variant is compiled for sizes that
   the first does not hold for.
3. Before a package is kept it answers as the flat graph does, at several sizes, 1 among them.
4. The code asks nothing about what it is given. Weights are held to the record here, inputs at each call by `Checked`.
5. Packages are loaded by torch's own loader of packages, without the search for a compiler that the public function begins with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from widepack_artifacts.errors import WidepackError
from widepack_artifacts.guards import check as check_condition

from ..system.compiled_cache import CompiledCache, default_folder
from ..errors import ArtifactError, LoweringError
from .flat import Flat, flatten
from .task import Function, Sizes, Task, Unavailable, first_line, quiet, sizes_to_try, words
from .variants import Checked, Variant

NAME = "aot"
COPIES = False
OPTIONS: dict[str, Any] = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,  # else the numbers of small weights are burnt in, and a package would be of one artifact, and of its members as they were
    "aot_inductor.check_lowerbound": False,  # else a batch of 1 is refused where inputs are checked
    "cpp.dynamic_threads": True,  # else the number of threads is burnt in
}
VARIANTS = 2
_FORM = 1  # of what is written into the cache


def bind(task: Task) -> Function:
    """Raises: Unavailable without a compiled program, unless the task may compile; LoweringError for what does not compile; UsageError for a folder that others can write."""
    if task.device.type != "cpu":
        raise Unavailable(f"backend 'aot' runs on the cpu in this version, and the model is on {task.device}; load with backend='eager'")
    flat = flatten(task.program, task.weights, NAME, task.said)
    cache = CompiledCache(task.cache or default_folder())
    key = key_of(task, flat)
    found = cache.find(key)
    if found is None:
        if not task.compile:
            raise Unavailable(
                f"{task.said} has not been compiled for this machine: {cache.folder} holds no program of torch {torch.__version__} and "
                f"{torch.backends.cpu.get_cpu_capability()} for it, and loading never compiles unless it is asked to. `widepack compile ARTIFACT` fills the cache "
                "(-o DIR and load(cache=DIR) for a container image), load(compile='now') compiles here, and backend='eager' runs without"
            )
        found = cache.make(key, lambda folder: compile_into(task, flat, folder))
    place, record = found
    try:
        variants = [_open(place / _named(v["file"], record), flat.weights, v, task) for v in record["variants"]]
    except (KeyError, TypeError, ValueError, RuntimeError, ArtifactError) as e:
        raise ArtifactError(
            f"{place}: this compiled program cannot be used ({str(e).splitlines()[0] if str(e) else e!r}); remove the folder and compile again: `widepack compile`"
        ) from e
    return Checked(task.device, flat, variants, task.eager, place)


def key_of(task: Task, flat: Flat) -> str:
    """All that a package hangs on."""
    parts = {
        "form": _FORM,
        "program": task.content,
        "pattern": task.pattern,
        "weights": [[str(w.dtype), list(w.shape), list(w.stride())] for w in flat.weights],
        "dims": {d: list(v) for d, v in task.dims.items()},
        "example": dict(task.example),
        "device": str(task.device),
        "instructions": [platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor()],
        "torch": [torch.__version__, torch.version.git_version, torch.version.cuda],
        "options": OPTIONS,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------- loading


def _open(path: Path, weights: Sequence[torch.Tensor], row: Mapping[str, Any], task: Task) -> Variant:
    """A package with its weights bound. Raises: ArtifactError, RuntimeError and others for what is none."""
    own = [[str(w.dtype), list(w.shape), list(w.stride())] for w in weights]
    if row["weights"] != own:
        raise ArtifactError("it was compiled for weights of other shapes")
    for condition in row["conditions"]:
        check_condition(condition, task.dims)
    loader = _loader(path)
    names = {_name(i): w for i, w in enumerate(weights)}
    needed = loader.get_constant_fqns()
    if missing := sorted(set(needed) - set(names)):
        raise ArtifactError(f"it asks for the constants {', '.join(missing[:3])}")
    loader.load_constants({n: names[n] for n in needed}, False, True, True)
    run = loader.boxed_run if hasattr(loader, "boxed_run") else loader.run
    return Variant(run, row["conditions"], {str(d): int(n) for d, n in row["least"].items()})


def _named(file: str, record: Mapping[str, Any]) -> str:
    """A package's file, which must be one that the record has a hash of. Raises: ArtifactError."""
    if file not in record["files"]:
        raise ArtifactError(f"its record names {str(file)[:60]!r}, of which it has no hash")
    return file


def _processor() -> str:
    """What the code may use of a processor: it is compiled for all that this one has, which the name of its vectors (`AVX512`) does not say."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        flags = next((line.partition(":")[2].split() for line in file if line.startswith(("flags", "Features"))), [])
        return " ".join(sorted(flags))
    return platform.processor()


def _loader(path: Path) -> Any:
    kind = getattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader", None)
    if kind is not None:
        with contextlib.suppress(TypeError):  # other arguments in another torch
            return kind(str(path), "model", False, 1, -1)
    return torch._inductor.aoti_load_package(str(path)).loader


def _name(i: int) -> str:
    return f"w{i}"


# ---------------------------------------------------------------- compiling


def compile_into(task: Task, flat: Flat, folder: Path) -> dict[str, Any]:
    """Compile variants until the sizes that are tried are covered, and hold each to the flat graph. Gives the record. Raises: LoweringError."""
    rows: list[dict[str, Any]] = []
    tried = list(sizes_to_try(task))
    for number in range(VARIANTS):
        open_ = (s for s in tried if min(s.values(), default=2) >= 2 and not any(v.holds(s) for v in _variants(rows)))
        example = dict(task.example) if number == 0 else next(open_, None)
        if example is None:
            break
        if task.progress:
            task.progress(f"compiling {task.said}{f', again for {words(example)}' if number else ''}", 0, 1)
        path = folder / f"program-{number}.pt2"
        conditions = _compile(task, flat, example, path)
        row: dict[str, Any] = {
            "file": path.name,
            "weights": [[str(w.dtype), list(w.shape), list(w.stride())] for w in flat.weights],
            "conditions": conditions,
            "least": {},
            "example": example,
        }
        row["least"] = _agree(task, flat, _open(path, flat.weights, row, task), tried)
        rows.append(row)
    return {"form": _FORM, "said": task.said, "torch": torch.__version__, "content": task.content, "variants": rows}


def _variants(rows: Sequence[Mapping[str, Any]]) -> list[Variant]:
    return [Variant(lambda inputs: inputs, r["conditions"], r["least"]) for r in rows]


def _compile(task: Task, flat: Flat, example: Sizes, path: Path) -> list[Any]:
    """One package. Gives the conditions that it was compiled under. Raises: LoweringError."""
    from torch._inductor.package.package import package_aoti

    from .tracing import traced

    try:
        made = traced(flat, example, task.dims, task.device)
        if 0 < task.most_nodes < (many := len(made.module.graph.nodes)):
            raise LoweringError(
                f"{task.said} has {many} nodes for the compiler, and up to {task.most_nodes} were asked for: it would compile for long"
            )
        with warnings.catch_warnings(), quiet(), torch.no_grad():
            warnings.simplefilter("ignore")
            files: Any = torch._inductor.aot_compile(made.module, tuple(made.inputs), options=dict(OPTIONS))
            package_aoti(str(path), files)
        return made.conditions()
    except WidepackError:
        raise
    except Exception as e:
        raise LoweringError(
            f"{task.said} does not compile with AOTInductor of torch {torch.__version__}: {type(e).__name__}: {first_line(e)}; load with backend='eager'"
        ) from e


def _agree(task: Task, flat: Flat, variant: Variant, tried: Sequence[Sizes]) -> dict[str, int]:
    """Hold a package to the flat graph at all sizes that it says it holds for. Gives the dims that it does not hold for at 1. Raises: LoweringError."""
    run = Checked(task.device, flat, [variant], task.eager)
    least: dict[str, int] = {}
    for sizes in tried:
        if not variant.holds(sizes):
            continue
        try:
            inputs = task.inputs(sizes)
            with torch.inference_mode():
                want = task.eager(*inputs)
        except (RuntimeError, ValueError, IndexError):
            continue  # inputs that members do not take at these sizes
        with torch.inference_mode():
            wrong = task.differ(run(*inputs), want)
        ones = [d for d, s in sizes.items() if s == 1 and task.example[d] != 1]
        if wrong and ones:
            least.update(dict.fromkeys(ones, 2))
        elif wrong:
            raise LoweringError(
                f"{task.said}: the compiled program differs from the flat graph at {words(sizes) or 'its sizes'}: {wrong}. It is not kept; load with backend='eager'"
            )
    return least
