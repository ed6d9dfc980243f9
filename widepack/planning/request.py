"""Parses the strategies that a user requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import UsageError
from ..registry.registry import WHOLE, strategy_names


@dataclass(frozen=True, slots=True)
class StrategyRequest:
    """The strategies that a user requests.

    `whole` is a strategy of whole regions: `auto`, `wide` or `loop`. `preferred` are strategies of ops, in
    order of preference. `plain` forbids packed weights that nobody requested. `training` says that the plans
    are of a program with gradients.
    """

    whole: str = "auto"
    preferred: tuple[str, ...] = ()
    plain: bool = False
    training: bool = False

    @classmethod
    def parse(cls, strategies: str | Iterable[str]) -> StrategyRequest:
        """Parses the values of `--strategy`. Raises: UsageError, which names the known strategies."""
        names = [strategies] if isinstance(strategies, str) else list(strategies)
        known = strategy_names()
        unknown = [n for n in names if n not in known]
        if unknown:
            raise UsageError(
                f"unknown strategy {', '.join(map(repr, unknown))}; known: {', '.join(sorted(known))} "
                "(`widepack primitives` says what each does)"
            )
        whole = [n for n in names if n in WHOLE]
        if len(set(whole)) > 1:
            raise UsageError(
                f"strategies {' and '.join(map(repr, whole))} exclude each other: "
                f"give one of {', '.join(WHOLE)}"
            )
        return cls(whole[0] if whole else "auto", tuple(n for n in names if n not in WHOLE))
