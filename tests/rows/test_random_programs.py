"""Tests random programs: what the walk says of each value is compared with runs on other batches."""

from __future__ import annotations

import pytest
from row_programs import grown, smaller, wrong

SOME, MANY = 12, 1200
OPS = 7


def check(seed: int) -> None:
    found = grown(seed, OPS)
    if wrong(found):
        less = smaller(found)
        nodes = "\n".join(f"{n.name} = {n.op} {n.args} {n.kwargs}" for n in less.nodes)
        raise AssertionError(f"seed {seed}: {wrong(less)}\n{nodes}")


@pytest.mark.extended(keep=2)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about ops that it will change
@pytest.mark.parametrize("seed", range(SOME))
def test_values_of_random_programs_are_as_the_walk_says(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("first", range(SOME, MANY, 99))
def test_values_of_many_random_programs_are_as_the_walk_says(first: int) -> None:
    for seed in range(first, first + 99):
        check(seed)


def test_random_programs_have_rows() -> None:
    """Otherwise the comparison would say nothing."""
    programs = [grown(seed, OPS) for seed in range(6)]
    used = {n.op for p in programs for n in p.nodes}
    assert len(used) > 15 and all(any(p.layouts.values()) for p in programs)
