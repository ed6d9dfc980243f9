"""Binds a program to its weights on a device, and runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any

import torch

from widepack_artifacts.program import Program, Ref, refs

from ..ir.torch_internals import inference_guard
from ..system.autocast import autocast_off
from .graph_module import Function, graph_module
from .prologue import split


class Executable:
    """A program that is bound to its weights on a device.

    `run(inputs)` returns the values of its outputs.

    Args:
        program: The program.
        weights: A value for each source name of a weight: a tensor, or a list of N for a Ragged one.
        device: Where it runs.
        prologue: Whether the nodes that depend on weights alone run once, now.
        workers: The number of members that a loop runs at once; 0 for one after the other.
        lazy: Whether weights are taken, and the prologue runs, when the program first runs on `eager`, or
            something reads `given`.
        bound: Is called with this object when that is done.

    Attributes:
        main, given: The program after the prologue, and the values of its weights. Backends compile these.
        prologue, names: The program that computed `given`, or None, and the names of its results.
        call: The function that runs, from inputs to outputs; at first `eager`. A backend replaces it.
        exchanges: How often values of `given` were replaced. Memory that is written in place does not count.
    """

    given: list[Any]
    program: Program
    weights: list[Any]
    forward: Function

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Any],
        device: torch.device,
        *,
        prologue: bool = True,
        workers: int = 0,
        lazy: bool = False,
        bound: Callable[[Executable], None] | None = None,
    ) -> None:
        self.prologue: Program | None = None
        self.names = tuple(s.name for s in program.weights)
        self._stored, self._sources, self._bound = weights, [s.source for s in program.weights], bound
        if prologue:
            parts = split(program)
            program, self.prologue, self.names = parts.main, parts.prologue, parts.names
        self.device, self.device_type = device, device.type
        self.main, self.workers = program, workers
        self.exchanges = 0
        self._streamed: dict[tuple[str, int], Function] = {}
        self._owned: frozenset[int] = frozenset()
        self._binding = threading.RLock()
        self.call: Function = self._eager if lazy else self.eager

    def __getattr__(self, name: str) -> Any:
        """Binds the weights when something reads what depends on them."""
        if name not in ("given", "program", "weights", "forward"):
            raise AttributeError(name)
        with self._binding:
            if name not in self.__dict__:
                self._bind()
        return self.__dict__[name]

    def _bind(self) -> None:
        given = self.derived(self._stored)
        program, weights = _lists(self.main, given)
        graph = graph_module(program, self.device, self.workers, in_place=True, direct=True)
        forward: Function = graph.forward
        self.__dict__.update(given=given, program=program, weights=weights, forward=forward)
        self._own()
        if self.device.type == "cuda":
            # other threads call on other streams, which do not wait for copies on this stream
            torch.cuda.current_stream(self.device).synchronize()
        if self._bound is not None:
            self._bound(self)

    def derived(self, weights: Mapping[str, Any]) -> list[Any]:
        """The values of the main program's weights. weights: as of `__init__`."""
        given = [weights[source] for source in self._sources]
        if self.prologue is None:
            return given
        with torch.inference_mode(), autocast_off():
            return list(graph_module(self.prologue, self.device).forward(*given))

    def _eager(self, *inputs: Any) -> Any:
        return self.forward(*self.weights, *inputs)

    def _own(self) -> None:
        self._owned = frozenset(
            {storage(t) for w in self.weights for t in (w if isinstance(w, (list, tuple)) else [w])} - {0}
        )

    @cached_property
    def reads(self) -> tuple[frozenset[str], ...]:
        """For each value of `given` the names of the weights that it depends on."""
        sources = [s.source for s in (self.prologue or self.main).weights]
        found = {s.name: 1 << i for i, s in enumerate((self.prologue or self.main).weights)}  # sets of bits
        for node in self.prologue.nodes if self.prologue else ():
            found[node.name] = reduce(or_, (found[r] for r in refs((node.args, node.kwargs))), 0)
        sets = {
            bits: frozenset(source for i, source in enumerate(sources) if bits >> i & 1)
            for bits in {found[name] for name in self.names}
        }
        return tuple(sets[found[name]] for name in self.names)

    @property
    def eager(self) -> Function:
        """The flat graph over its weights: a function from inputs to outputs."""
        return partial(self.forward, *self.weights)

    def exchange(self, values: Mapping[int, Any]) -> None:
        """Other values in the place of some of `given`, for the flat graph from the next call on."""
        self.exchanges += 1
        for number, value in values.items():
            self.given[number] = value
        self.weights = _lists(self.main, self.given)[1]
        self.call = self.eager
        self._own()

    def run(self, *inputs: Any) -> list[Any]:
        """The outputs, in memory that the caller may write into. Under autocast dtypes are as without it."""
        if torch.is_autocast_enabled(self.device_type):
            with autocast_off():
                return self.run(*inputs)
        with inference_guard(True):
            found = list(self.call(*inputs))
            given = [x.untyped_storage().data_ptr() for x in inputs]
            for i, value in enumerate(found):
                if (
                    type(value) is not torch.Tensor
                    or (at := value.untyped_storage().data_ptr()) in self._owned
                    or at in given
                ):
                    found[i] = _free(value, {*self._owned, *given})
        return found

    def stream(self, result: tuple[str, int], take: Function, *inputs: Any) -> None:
        """Runs the program, and passes one result of a loop on instead of collecting it.

        result: the name of the loop and the number of its result. take: called with each member's number and
        its part of the result, from the threads of the loop.
        """
        if torch.is_autocast_enabled(self.device_type):
            with autocast_off():
                return self.stream(result, take, *inputs)
        forward = self._streamed.get(result)
        if forward is None:
            graph = graph_module(
                self.program, self.device, self.workers, in_place=True, direct=True, streamed=result
            )
            forward = self._streamed[result] = graph.forward
        with inference_guard(True):
            forward(take, *self.weights, *inputs)

    def run_for_autograd(self, *inputs: Any) -> list[Any]:
        """The same, in tensors that a later call with gradients may read."""
        with torch.no_grad():
            taken = {*self._owned, *(x.untyped_storage().data_ptr() for x in inputs)}
            return [_free(value, taken) for value in self.call(*inputs)]


def _free(value: Any, taken: Set[int]) -> Any:
    """An output that the caller may write into: a copy if it shares memory with a weight or an input."""
    if isinstance(value, list):
        return [_free(v, taken) for v in value]
    return _copy(value) if isinstance(value, torch.Tensor) and storage(value) in taken else value


def _copy(value: torch.Tensor) -> torch.Tensor:
    """A copy.

    On the CPU `cat` is faster than `clone`, whose time for megabytes depends on the distance of the two
    addresses.
    """
    return (
        torch.cat((value,))
        if value.device.type == "cpu" and value.ndim and value.is_contiguous()
        else value.clone()
    )


def storage(value: Any) -> int:
    """The address of a tensor's memory; 0 for other values, and for tensors without readable memory
    (prepacked weights).
    """
    return (
        value.untyped_storage().data_ptr()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
        else 0
    )


def _lists(program: Program, given: list[Any]) -> tuple[Program, list[Any]]:
    """The program with a list of members for each Stacked weight that a loop splits: it is split once, not at
    every call.
    """
    at = {s.name: i for i, s in enumerate(program.weights)}
    slots, values, nodes = list(program.weights), list(given), []
    for node in program.nodes:
        if node.body is None:
            nodes.append(node)
            continue
        args = list(node.args)
        for k, (slot, arg) in enumerate(zip(node.body.inputs, args)):
            if slot.kind == "stacked" and isinstance(arg, Ref) and arg.name in at:
                name = f"{arg.name}__members"
                if name not in at:
                    at[name] = len(slots)
                    slots.append(replace(program.weights[at[arg.name]], name=name))
                    values.append(list(values[at[arg.name]].unbind(0)))
                args[k] = Ref(name)
        nodes.append(replace(node, args=tuple(args)))
    return replace(program, weights=tuple(slots), nodes=tuple(nodes)), values
