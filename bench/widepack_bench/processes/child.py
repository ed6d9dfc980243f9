"""Runs one contestant in its own process: `python -m widepack_bench.processes.child SPEC BEGIN`.

`contestant.py` starts it and reads what it prints. SPEC is a JSON object: artifact, entry, pattern, device,
threads, pin, inputs (a file), mode `memory` or `start`, and what to run: backend, level, or baseline with
factory and checkpoints. BEGIN is the monotonic clock, in nanoseconds, at the start of the process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO, Any


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    begin = int(sys.argv[2])
    written, sys.stdout = sys.stdout, sys.stderr  # A model may print, which is not the result.
    if spec["mode"] == "start":
        print(json.dumps(start(spec, begin)), file=written)
    else:
        memory(spec, written)


def start(spec: dict[str, Any], begin: int) -> dict[str, float]:
    """Measures milliseconds from `begin` to the first answer, as a user's script would get there.

    `import torch` and the reading of inputs are not counted.
    """
    before = time.monotonic_ns()
    import torch

    torch_ns = time.monotonic_ns() - before
    torch.set_num_threads(spec["threads"])
    before = time.monotonic_ns()
    args, kwargs = torch.load(spec["inputs"], map_location=spec["device"])
    inputs_ns = time.monotonic_ns() - before
    each = spec["pattern"] == "each"
    with torch.inference_mode():
        run = _own_loop(spec, each) if "baseline" in spec else _ours(spec)
        run(*args, **kwargs)
        if spec["device"].startswith("cuda"):
            torch.cuda.synchronize()
    spent = time.monotonic_ns() - begin - torch_ns - inputs_ns
    return {"start_ms": spent / 1e6, "torch_ms": torch_ns / 1e6}


def memory(spec: dict[str, Any], out: IO[str]) -> None:
    """Prints the memory of the imports after the first answer, then goes on calling while the parent
    measures.
    """
    import gc

    import torch
    from torch.utils._pytree import tree_leaves

    from ..baselines import table  # The memory of the measurement itself is not counted.
    from ..measure.processors import quiet
    from .contestant import resident

    private, mapped = resident()
    cuda = spec["device"].startswith("cuda")
    each = spec["pattern"] == "each"
    args, kwargs = torch.load(spec["inputs"], map_location=spec["device"])
    with quiet(spec["threads"], spec["pin"]), torch.inference_mode():
        run: Any = (
            table.BASELINES[spec["baseline"]](_members(spec, args, kwargs), each)
            if "baseline" in spec
            else _ours(spec)
        )
        if (
            spec.get("baseline") == "onnxruntime"
        ):  # A user of sessions has ONNX files, and no modules or exporter.
            with tempfile.TemporaryDirectory(prefix="widepack-onnx-") as folder:
                opened = run.from_files(folder, args, kwargs)
                run = None
                gc.collect()
                _hand_back()
                private, mapped = resident()
                sessions, tensors = (
                    opened(),
                    [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)],
                )

            def run(*_: Any, **__: Any) -> Any:
                return sessions.run(tensors)

        for _ in range(2):
            run(*args, **kwargs)
        gc.collect()
        _hand_back()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        print(json.dumps({"private": private, "mapped": mapped}), file=out, flush=True)
        end, count = time.monotonic() + 0.5, 0
        while count < 5 or time.monotonic() < end:
            run(*args, **kwargs)
            count += 1
        result = {"private_bytes": float(torch.cuda.max_memory_allocated())} if cuda else {}
    print(json.dumps(result), file=out, flush=True)


def _hand_back() -> None:
    """Returns freed memory to the system, where the C library can. It was the compiler's memory."""
    import ctypes

    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return


def _ours(spec: dict[str, Any]) -> Callable[..., Any]:
    if "level" in spec:
        from ..measure.levels import load_level

        ens: Any = load_level(spec["artifact"], spec["device"], spec["level"])
    else:
        from ..measure.loading import load_on

        ens = load_on(spec["artifact"], spec["device"], spec["backend"])
    entry = ens if spec["entry"] == "forward" else ens.entry(spec["entry"])
    run: Callable[..., Any] = entry.each if spec["pattern"] == "each" else entry
    return run


def _members(spec: dict[str, Any], args: Any, kwargs: Any) -> list[Any]:
    """Returns the members of the race: the user's modules with the artifact's weights, or its member
    programs. args, kwargs: the inputs of the call.
    """
    import widepack

    from ..baselines.derivatives import for_inference
    from ..baselines.member_programs import flat_members
    from ..baselines.members import called, named_factory, own_module
    from ..measure.answers import members_of

    ens = widepack.load(spec["artifact"], device=spec["device"], warmup=False)
    if not spec["factory"]:
        return flat_members(ens if spec["entry"] == "forward" else ens.entry(spec["entry"]))
    factory = named_factory(spec["factory"], spec["factory_args"], ens)
    made = [
        called(own_module(factory, ens.state_dict(i), name), spec["entry"])
        for i, name in enumerate(ens.members)
    ]
    made = [m.to(spec["device"]).eval() for m in made]
    if spec["pattern"] == "each":
        args, kwargs = members_of(args, 0), members_of(kwargs, 0)
    return for_inference(made, args, kwargs)


def _own_loop(spec: dict[str, Any], each: bool) -> Callable[..., Any]:
    """Runs the loop as a script without widepack does: the user's module with mapped checkpoints."""
    import inspect

    import torch

    factory = _factory(spec["factory"])
    takes = "state_dict" in inspect.signature(factory).parameters
    modules = []
    for path in spec["checkpoints"]:
        state = torch.load(path, mmap=True, weights_only=True, map_location=spec["device"])
        module = factory(**spec["factory_args"], **({"state_dict": state} if takes else {})).eval()
        expected = module.state_dict()
        module.load_state_dict({k: state[k] for k in expected}, assign=True)
        modules.append(module.to(spec["device"]))

    def run(*args: Any, **kwargs: Any) -> list[Any]:
        if each:
            from ..measure.answers import members_of

            return [m(*members_of(args, i), **members_of(kwargs, i)) for i, m in enumerate(modules)]
        return [m(*args, **kwargs) for m in modules]

    return run


def _factory(name: str) -> Callable[..., Any]:
    """Finds `pkg.mod:factory` or `file.py:factory` without widepack: a loop does not need its imports."""
    import os
    from importlib import import_module, util

    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        spec = util.spec_from_file_location(os.path.basename(where)[:-3], where)
        assert spec is not None and spec.loader is not None
        module = util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = import_module(where)
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
