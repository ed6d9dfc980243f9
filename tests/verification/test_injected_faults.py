"""Tests that the comparison of a build refuses faults in wide programs, and accepts right programs."""

from __future__ import annotations

import random
import secrets

import pytest
from fault_networks import NETWORKS
from faults import KINDS, Prepared, injected

from widepack.verification.calls import OFFSETS

FAULTS = 12  # of the default run
EACH = 4  # of them, at most so many in one network
QUICK = [n for n, network in NETWORKS.items() if network.shape not in ((3, 8, 8), (2, 4, 4, 4))]


def test_a_dozen_faults_are_refused() -> None:
    """The seed is another one in each run, and is printed."""
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    counted: list[str] = []
    for network in draw.sample(QUICK, 6):
        if len(counted) >= FAULTS:
            break
        prepared = Prepared(network, seed)
        assert prepared.refused(prepared.program) == "", f"right program of {network}, seed {seed}"
        found = [injected(prepared, network, kind, seed) for kind in draw.sample(list(KINDS), EACH + 1)]
        for outcome in found:
            if outcome is not None and outcome.counts:
                counted.append(outcome.kind)
                assert outcome.refused, f"{outcome.kind} in {network}, seed {seed}, off by {outcome.off:.3g}"
    assert len(counted) >= FAULTS // 2, f"seed {seed}: {counted}"


def test_a_fault_that_six_rows_hide_at_the_smaller_offset_is_refused() -> None:
    """A norm over whole rows loses digits in one number a row."""
    prepared = Prepared("group_norm_first", 104)
    assert prepared.refused(prepared.program) == ""
    outcome = injected(prepared, "group_norm_first", "one-pass variance", 104)
    assert outcome is not None and outcome.counts
    assert f"inputs + {max(OFFSETS):g} x their spread" in outcome.refused


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_eight_seeds_of_every_network(network: str) -> None:
    """Right programs are accepted, and every fault that counts is refused."""
    for seed in range(100, 108):
        prepared = Prepared(network, seed)
        assert prepared.refused(prepared.program) == "", f"seed {seed}"
        for kind in KINDS:
            outcome = injected(prepared, network, kind, seed)
            if outcome is not None and outcome.counts:
                assert outcome.refused, f"{kind}, seed {seed}, off by {outcome.off:.3g}"
