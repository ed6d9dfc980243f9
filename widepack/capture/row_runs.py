"""Checks a program that was captured as if masks select rows (`patches/row_branches.py`).

The program and the member run on changed inputs. The program holds if all answers are equal and every
selection was empty in one of the runs.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .explain import user_frame

_RUNS = 12
_RTOL, _ATOL = 1e-3, 1e-5  # a wrong branch changes whole rows


class _Selections(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which selections were empty. empty: (line, how many selections came before it there)."""

    def __init__(self, lines: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines = lines
        self.seen: dict[str, int] = defaultdict(int)
        self.empty: set[tuple[str, int]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.dynamic_output_shape in func.tags:
            line = user_frame(traceback.extract_stack()[:-1])
            if line in self.lines:
                if any(t.numel() == 0 for t in pytree.tree_leaves(result) if isinstance(t, Tensor)):
                    self.empty.add((line, self.seen[line]))
                self.seen[line] += 1
        return result


def same_without_rows(
    member: Callable[..., Any], program: Callable[..., Any], lines: set[str], inputs: Any
) -> bool:
    """Whether a program gives the member's answers also where a selection has no rows.

    False too if a selection was never empty.

    Args:
        member, program: The two to call.
        lines: The user's lines that select rows.
        inputs: (args, kwargs) of the example.
    """
    places: set[tuple[str, int]] = set()
    empty: set[tuple[str, int]] = set()
    for run in range(_RUNS):
        args, kwargs = pytree.tree_map(lambda x, run=run: _changed(x, run), inputs)
        selections = _Selections(lines)
        try:
            with selections:
                expected = member(*args, **kwargs)
        except Exception:  # noqa: BLE001  # the member need not take every changed input
            continue
        args, kwargs = pytree.tree_map(lambda x, run=run: _changed(x, run), inputs)
        try:
            for mine, own in zip(
                pytree.tree_leaves(program(*args, **kwargs)), pytree.tree_leaves(expected), strict=True
            ):
                torch.testing.assert_close(mine, own, rtol=_RTOL, atol=_ATOL, equal_nan=True)
        except Exception:  # noqa: BLE001  # another answer, or an error where the member has none
            return False
        places |= {(line, k) for line, count in selections.seen.items() for k in range(count)}
        empty |= selections.empty
    return {line for line, _ in places} == lines and places <= empty


def _changed(value: Any, run: int) -> Any:
    """Returns an input for the run of this number: integers and booleans become equal to one of them, and
    numbers are moved, reflected or set to one of them.
    """
    if not isinstance(value, Tensor) or value.numel() == 0:
        return value
    if value.is_floating_point() or value.is_complex():
        return (value.clone(), -value, value.flatten()[0].expand_as(value).clone(), value.roll(1, 0))[
            run % 4 if value.ndim else 0
        ]
    if run == 0:
        return value.clone()
    distinct: Tensor = value.unique()  # type: ignore[no-untyped-call]
    return torch.full_like(value, distinct[run % len(distinct)].item())
