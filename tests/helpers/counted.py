"""Counts the FLOP of a call with torch's own counter, and measures the peak of a run with its allocator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from widepack.building.captures import spec_call
from widepack.capture.call import MemberCall
from widepack.ir.torch_internals import without_fast_path
from widepack.spec.input_spec import parse_inputs
from widepack_artifacts.costs import Costs


def call_at(module: nn.Module, inputs: Sequence[str], sizes: Mapping[str, int]) -> MemberCall:
    """Returns a call of a module with inputs of these sizes."""
    specs, _ = parse_inputs(inputs, "forward", ["forward"])
    return spec_call(module, specs, sizes, "forward")


def torch_flops(make: Callable[[], nn.Module], inputs: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Returns what `FlopCounterMode` counts. It sees attention only if that runs as products of matrices."""
    module = make().eval()
    call = call_at(module, inputs, sizes)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), without_fast_path(), counter:
        module(*call.args, **call.kwargs)
    return int(counter.get_total_flops())


def flops(costs: Costs, sizes: Mapping[str, int], members: int = 1) -> Any:
    """Returns the FLOP of a call by the formulas."""
    return costs.at(costs.values(sizes, members=members))["flops"]


def allocated_peak(run: Callable[[], object]) -> int:
    """Returns the most bytes that a run has allocated at one time, by torch's profiler."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    found = profiled.profiler.kineto_results.events()
    now = most = 0
    for event in sorted((e for e in found if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del result
    return most
