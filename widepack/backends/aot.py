"""Provides the backend `aot`: AOTInductor packages, compiled once into a cache and loaded in milliseconds
without a compiler.

1. Weights stay outside the package and are bound without a copy. A package depends on their shapes and
   strides, not on their values.
2. Named dims stay symbols. The conditions on sizes that the compiler assumes are stored with the package
   (`variants.py`). A second variant is compiled for sizes at which the first is not valid.
3. Before a package is stored, its answers are checked against the flat graph at several sizes, 1 among them.
4. The native code checks nothing. Weights are checked against the record here, inputs at each call by
   `Checked`.
5. Packages are loaded by torch's package loader, without the search for a compiler of the public function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from widepack_artifacts.errors import some
from widepack_artifacts.guards import check as check_condition

from ..errors import ArtifactError, LoweringError
from ..ir.torch_internals import package_loader
from ..system.machine import instructions
from .covering import compiled_at, covering, key_of, refuse_other_devices, stored
from .flat import Flat, flatten
from .index_flags import is_flagged
from .task import Sizes, Task
from .variants import Checked, Variant

if TYPE_CHECKING:
    from .tracing import TracedGraph

NAME = "aot"
COPIES = False
OPTIONS: dict[str, Any] = {
    "aot_inductor.package": True,
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,  # else the values of small weights become constants of the package
    "aot_inductor.check_lowerbound": False,  # else the check of inputs refuses a batch of 1
    "cpp.dynamic_threads": True,  # else the number of threads is a constant of the package
}
_FORM = 4  # version of the cache entries


def bind(task: Task) -> Checked:
    """Binds a compiled program, and compiles it first if the task allows that.

    Raises: Unavailable without a compiled program, unless the task may compile; LoweringError if compiling
    fails; UsageError for a folder that other users can write.
    """
    refuse_other_devices(task, NAME)
    flat = flatten(task.program, task.weights(), NAME, task.title)
    key = key_of(
        task,
        form=_FORM,
        weights=_shapes(flat.weights),
        example=dict(task.example),
        device=str(task.device),
        instructions=[torch.backends.cpu.get_cpu_capability(), instructions()],
        torch=[torch.__version__, torch.version.git_version, torch.version.cuda],
        options=OPTIONS,
    )
    why = (
        f"has not been compiled for this machine: {{folder}} has no program of torch {torch.__version__} and "
        f"{torch.backends.cpu.get_cpu_capability()} for it, and loading compiles only on request.\n"
        "`widepack compile ARTIFACT` fills the cache (-o DIR and load(cache=DIR) for a container image), "
        "load(compile='now') compiles here, and backend='eager' needs no compiler."
    )
    place, record = stored(task, key, why, lambda folder: compile_into(task, flat, folder))
    try:
        variants = [
            _open(place / _named(v["file"], record), flat.weights, v, task) for v in record["variants"]
        ]
    except (KeyError, TypeError, ValueError, RuntimeError, ArtifactError) as e:
        raise ArtifactError(
            f"{place}: this compiled program cannot be used ({str(e).splitlines()[0] if str(e) else e!r}); "
            "remove the folder and compile again: `widepack compile`"
        ) from e
    flagged = is_flagged(flat.program)
    return Checked(task, flat.shape, variants, place, flagged=flagged, flat=flat)


def _shapes(weights: Sequence[torch.Tensor]) -> list[list[Any]]:
    return [[str(w.dtype), list(w.shape), list(w.stride())] for w in weights]


# ---------------------------------------------------------------- loading


def _open(path: Path, weights: Sequence[torch.Tensor], row: Mapping[str, Any], task: Task) -> Variant:
    """Loads a package and binds its weights.

    Raises: ArtifactError, RuntimeError and others for a package that cannot be used.
    """
    if row["weights"] != _shapes(weights):
        raise ArtifactError("it was compiled for weights of other shapes")
    for condition in row["conditions"]:
        check_condition(condition, task.dims)
    loader = _loader(path)
    names = {f"w{i}": w for i, w in enumerate(weights)}
    needed = loader.get_constant_fqns()
    if missing := sorted(set(needed) - set(names)):
        raise ArtifactError(f"it needs the constants {some(missing, 3)}")
    loader.load_constants({n: names[n] for n in needed}, False, True, True)
    run = loader.boxed_run if hasattr(loader, "boxed_run") else loader.run
    return Variant(run, row["conditions"], {str(d): int(n) for d, n in row["least"].items()})


def _named(file: str, record: Mapping[str, Any]) -> str:
    """The name of a package's file. Raises: ArtifactError if the record has no hash of it."""
    if file not in record["files"]:
        raise ArtifactError(f"its record names the file {str(file)[:60]!r} without a hash")
    return file


def _loader(path: Path) -> Any:
    kind = package_loader()
    if kind is not None:
        with contextlib.suppress(TypeError):  # another version of torch with other arguments
            return kind(str(path), "model", False, 1, -1)
    return torch._inductor.aoti_load_package(str(path)).loader


# ---------------------------------------------------------------- compiling


def compile_into(task: Task, flat: Flat, folder: Path) -> dict[str, Any]:
    """Compiles variants until all trial sizes are covered, and checks each against the flat graph.

    Returns: the record. Raises: LoweringError.
    """
    shapes = _shapes(flat.weights)

    def compile_at(number: int, example: Sizes) -> Variant:
        path = folder / _file(number)
        made = _compile(task, flat, example, path)
        row = {"weights": shapes, "conditions": made.conditions(), "least": {}}
        return replace(_open(path, flat.weights, row, task), fixed=bool(made.fixed))

    rows = [
        {
            "file": _file(number),
            "weights": shapes,
            "conditions": list(variant.conditions),
            "least": dict(variant.least or {}),
            "example": dict(variant.example or {}),
        }
        for number, variant in enumerate(covering(task, flat, compile_at))
    ]
    return {
        "form": _FORM,
        "title": task.title,
        "torch": torch.__version__,
        "content": task.content,
        "variants": rows,
    }


def _file(number: int) -> str:
    return f"program-{number}.pt2"


def _compile(task: Task, flat: Flat, example: Sizes, path: Path) -> TracedGraph:
    """Compiles one package. Returns: what the compiler was given. Raises: LoweringError."""
    from torch._inductor.package.package import package_aoti

    def compile_(made: TracedGraph) -> None:
        if 0 < task.most_nodes < (many := len(made.module.graph.nodes)):
            raise LoweringError(
                f"{task.title} has {many} nodes for the compiler, and the limit is {task.most_nodes}: "
                "compiling would take long"
            )
        files: Any = torch._inductor.aot_compile(made.module, tuple(made.inputs), options=dict(OPTIONS))
        package_aoti(str(path), files)

    return compiled_at(task, flat, example, "AOTInductor", compile_)[1]
