"""Predicts the time of a chain's layers as separate nodes, by the strategies that a plan chose for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from widepack_artifacts.program import Kind, Node, Output, Program, Ref, Slot

from ..ir import ops
from ..kernel_times.call_time import NOTHING, CallTime
from ..kernel_times.cuda import CudaModel
from ..kernels.triton_kernels.predictions import PredictedTimes
from .plan import NodeChoice
from .strategy_times import TimedWriter, walk


class SeparateLayers:
    """The layers of a chain and their activations, as a program of their own.

    Args:
        nodes: The layers and the activations, in order.
        found: The kinds of the values that they read.
        choices: The strategies of a plan. Nodes without one take their first strategy.
        members: N.
        widths: The inputs of the first layer, then the outputs of each layer.
        dtype: Of the weights.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        found: Mapping[str, Kind],
        choices: Mapping[str, NodeChoice],
        members: int,
        widths: Sequence[int],
        dtype: str,
    ) -> None:
        layers = [b for n in nodes if "weight" in (b := ops.bind(n.op, n.args, n.kwargs))]
        types: dict[str, str] = {}
        for layer, (inputs, outputs) in zip(layers, pairwise(widths)):
            types[layer["weight"].name] = f"{dtype}[{outputs},{inputs}]"
            if layer.get("bias") is not None:
                types[layer["bias"].name] = f"{dtype}[{outputs}]"
        x = layers[0]["input"].name
        self._program = Program(
            tuple(Slot(name, name, found[name], type_) for name, type_ in types.items()),
            (Slot(x, x, found[x], f"{dtype}[R,{widths[0]}]"),),
            tuple(nodes),
            (Output(Ref(nodes[-1].name), "stacked"),),
        )
        self._slots = {name: found[name] for name in (*types, x)}
        self._fixed = {n.name: choices[n.name].strategy for n in nodes if n.name in choices}
        self._writer = TimedWriter(members, CudaModel())

    def at(self, rows: int) -> CallTime | None:
        """Returns the time at a number of rows of a member; None where it cannot be predicted."""
        try:
            times = walk(
                self._program,
                self._slots,
                {"R": rows},
                self._writer,
                self._fixed,
                lambda node, runs: next(iter(runs.times)),
            )
        except Exception:  # noqa: BLE001  # a strategy that does not run on meta tensors
            return None
        return sum((node.time for node in times.nodes.values()), NOTHING)

    def compared(self, times: PredictedTimes, rows: int) -> PredictedTimes:
        """Returns the times with those of these strategies in the place of plain torch."""
        separate = self.at(rows)
        if separate is None:
            return times
        return replace(times, plain=separate.device, plain_eager=separate.seconds)
