"""Traces a model before any build: `widepack trace --model M --input S`, and `trace -m BLOCK`.

Unlike `trace.py`, this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from widepack_artifacts.program import Node, Program, refs
from widepack_bench.text import plural

from ..shared.failures import Refusal

if TYPE_CHECKING:
    from widepack.building.preview import Preview

    from ..shared.trace_rows import Step


@dataclass(frozen=True, slots=True)
class Shaped:
    """A node of the member program: the types that it reads (`takes`) and the type of its result (`out`)."""

    node: str
    op: str
    takes: tuple[str, ...]
    out: str
    source: str


@dataclass(frozen=True, slots=True)
class ModelTrace:
    """The trace of a model.

    Attributes:
        inputs, outputs: (name, type) of each.
        sizes: The size of each dynamic dim in the example.
        steps: One for each node; empty if no number of members was given.
        plan: The plan as JSON; None if no number of members was given.
    """

    name: str
    entry: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    sizes: dict[str, int]
    shapes: tuple[Shaped, ...]
    steps: tuple[Step, ...] = ()
    plan: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        of = {s.node: s for s in self.steps}
        return {
            "model": self.name,
            "entry": self.entry,
            "inputs": [{"name": n, "type": t} for n, t in self.inputs],
            "outputs": [{"name": n, "type": t} for n, t in self.outputs],
            "sizes": self.sizes,
            "batch": list(self.plan["batch"]) if self.plan else None,
            "steps": [{**(asdict(of[s.node]) if s.node in of else {}), **asdict(s)} for s in self.shapes],
        }


def block(name: str) -> tuple[str, Callable[[], Any], tuple[str, ...]]:
    """Returns the title, the factory and the inputs of a reference block. Raises: Refusal for an unknown
    name.
    """
    from difflib import get_close_matches

    from widepack_bench.models.blocks import BLOCKS

    if name not in BLOCKS:
        near = get_close_matches(name, BLOCKS, n=1)
        raise Refusal(
            "there is no reference block "
            f"{name!r}{f', did you mean {near[0]}?' if near else ''}; there are {', '.join(BLOCKS)}"
        )
    found = BLOCKS[name]
    return f"{name}, {found.doc}", found.make, found.inputs


def blocks() -> list[list[str]]:
    """Returns name, description and inputs of each reference block."""
    from widepack_bench.models.blocks import BLOCKS

    return [[name, b.doc, " ".join(b.inputs)] for name, b in BLOCKS.items()]


def factory(model: str, given: Sequence[str]) -> Callable[[], Any]:
    """Returns the factory that `--model` names. Raises: Refusal, UsageError."""
    from widepack.checkpoints.named_factory import find_factory
    from widepack.spec.config import parse_model_args

    if model == "hf":
        raise Refusal(
            "--model hf needs the config.json beside a checkpoint, and `trace` reads no checkpoint: "
            "give a factory, package.module:function or path/file.py:function"
        )
    made = find_factory(model, parse_model_args(given))
    if made.takes_state_dict:
        raise Refusal(
            f"the factory {model} needs a checkpoint's weights (its argument state_dict), and `trace` "
            "reads no checkpoint: `widepack build --dry-run` with the checkpoints shows strategies, "
            "too"
        )
    return made


def trace(
    name: str,
    make: Callable[[], Any],
    inputs: Sequence[str],
    entry: str,
    members: int | None,
    pattern: str,
    device: str,
    batch: int | None,
) -> ModelTrace:
    """Traces the member program and, for N members, what would run. Raises: CaptureError, LoweringError,
    UsageError.
    """
    from widepack import primitives  # noqa: F401  # fills the registry
    from widepack.building.preview import Preview

    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise Refusal(f"plans are for cpu and cuda, not for {device}")
    entry = entry or "forward"
    model = Preview(make, inputs, entry=entry)
    found = ModelTrace(
        name,
        entry,
        tuple((leaf.name, leaf.type) for leaf in model.captured.inputs),
        tuple((out or "0", type_) for out, type_ in model.captured.outputs),
        model.sizes,
        tuple(_shaped(model.program)),
    )
    return found if members is None else _planned(found, model, members, pattern, device, batch)


def _planned(
    found: ModelTrace, model: Preview, members: int, pattern: str, device: str, batch: int | None
) -> ModelTrace:
    """Adds kinds, strategies and reasons."""
    from dataclasses import replace

    from widepack.lowering.wide_programs import filled_plan

    from ..shared.trace_rows import steps

    wide = model.of(members, pattern)
    sizes = {**wide.sizes, wide.batch: batch} if batch is not None and wide.batch else wide.sizes
    plan = wide.plan(device.partition(":")[0], sizes=sizes)
    lowered = wide.lower(plan)
    filled = filled_plan(plan, lowered, wide.program).to_json()
    return replace(
        found,
        steps=tuple(steps(model.program, lowered.program, filled)),
        plan=filled | {"batch": list(plan.batch)},
    )


def _shaped(program: Program) -> list[Shaped]:
    """Returns every node with the types that it reads and makes."""
    types = {s.name: s.type for s in (*program.weights, *program.inputs)} | {
        n.name: n.out for n in program.nodes
    }
    return [Shaped(n.name, n.op, _takes(n, types), n.out, n.source) for n in program.nodes]


def _takes(node: Node, types: dict[str, str]) -> tuple[str, ...]:
    return tuple(types[r] for r in dict.fromkeys(refs((node.args, node.kwargs))))


def title(found: ModelTrace, members: int | None, device: str, pattern: str) -> str:
    """Returns a title line, and a line with the member's inputs and outputs."""
    who = plural(len(found.shapes), "node") + " of the member program"
    if found.plan is not None and members is not None:
        least, most = found.plan["batch"]
        who = (
            f"{plural(members, 'member')}, {device}, {pattern}, batch {least} to "
            f"{'any' if most is None else most}, predicted: {who}"
        )
    named = "" if found.entry == "forward" else f"entry {found.entry}, "
    given = ", ".join(f"{n} {t}" for n, t in found.inputs)
    made = ", ".join(t for _, t in found.outputs)
    return f"{found.name}: {named}{who}\n{given or '()'} -> {made}"
