"""Finds out why a member gives other answers from run to run."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from ..ir.random_ops import random_nodes, without_randomness
from .module_run import run_module
from .subject import Subject

_KEEP = (
    'dropout="on" (--dropout on) keeps draws and dropout on in eval mode, with a draw for each member '
    "and call"
)


def why_unsteady(subject: Subject, i: int) -> str:
    """Returns why member i gives other answers from run to run, and the way out.

    A cause is named only if it is seen: a draw in the program, or a generator that a run of the module moves.
    """
    node = next(random_nodes(subject.program(i)), None)
    if node is not None:
        at = f" at {node.source}" if node.source else ""
        way = "Make" if without_randomness(subject.program(i)) is None else f"{_KEEP}; or make"
        return (
            f"it draws random numbers by {node.op.removesuffix('.default')}{at}. {way} forward "
            "deterministic, or make what it draws an input"
        )
    moved = _moved(subject, i)
    if moved:
        way = "Make what it draws an input" + ("" if "torch" in moved else ", or draw with torch")
        return (
            f"it draws from the generator of {' and '.join(moved)}, and its captured program does not. {way}"
        )
    return (
        "no random number of torch, Python's random or numpy.random is drawn, so it stores something between "
        "calls, or draws from a generator of its own. Make it deterministic, or make what changes an input"
    )


def _moved(subject: Subject, i: int) -> list[str]:
    """Returns the generators whose state a run of the member's module changes."""
    if subject.module is None:
        return []
    module = subject.module(i)
    (inputs,) = subject.draw(subject.sizes, 3, "shared", 1)
    before = generator_states()
    run_module(module, subject, inputs)
    return moved_since(before)


def moved_since(before: dict[str, Any]) -> list[str]:
    """Returns the generators whose state is another one now. before: what `generator_states` returned."""
    return [name for name, state in generator_states().items() if state != before.get(name)]


def generator_states() -> dict[str, Any]:
    """Returns the states of the generators that a member may draw from."""
    states: dict[str, Any] = {
        "Python's random": random.getstate(),
        "torch": bytes(torch.get_rng_state().numpy()),
    }
    if "numpy.random" in sys.modules:  # else no member can have used it
        kind, keys, *rest = sys.modules["numpy.random"].get_state()
        states["numpy.random"] = (kind, bytes(keys), *rest)
    return states
