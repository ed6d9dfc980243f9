"""Tests the choice among ways to run a program: by sums of times, within the forms that a weight may have."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widepack.planning import way_choice
from widepack.planning.strategy_times import WeightForm
from widepack.planning.way_choice import STORED, Form, Option, Way, WayClass, chosen_classes

BATCHES = (1, 4, 16, 64)


def form(name: str, size: int = 100) -> Form:
    return frozenset([WeightForm(name, (size,), (1,), size)])


TURNED, PACKED, LOOPED = form("turned"), form("packed"), form("looped")


def way(loop: bool, rest: Sequence[float], **nodes: Mapping[str, tuple[Sequence[float], Form]]) -> Way:
    """Returns a way. nodes: for each the strategies, with seconds at all batches and their form."""
    at = [
        {
            name: tuple(Option(s, seconds[i], form) for s, (seconds, form) in options.items())
            for name, options in nodes.items()
        }
        for i in range(len(BATCHES))
    ]
    return Way(loop, tuple(at), tuple(rest))


def flat(seconds: float) -> list[float]:
    return [seconds] * len(BATCHES)


def summary(found: Sequence[WayClass]) -> list[tuple[bool, int, int | None, dict[str, str]]]:
    return [(c.way.loop, c.least, c.most, dict(c.strategies)) for c in found]


def test_one_way_that_is_always_fastest_serves_every_batch() -> None:
    found = chosen_classes([way(False, flat(1.0)), way(True, flat(1.1))], BATCHES)
    assert summary(found) == [(False, 1, None, {})]


def test_the_next_way_begins_where_both_take_the_same_time() -> None:
    wide, loop = way(False, [1.0, 2.0, 8.0, 32.0]), way(True, [4.0, 4.0, 4.0, 8.0])
    found = chosen_classes([wide, loop], BATCHES)
    # between the batches 4 and 16 the ratio goes from 1/2 to 2: it is 1 in the middle, at 8
    assert summary(found) == [(False, 1, 8, {}), (True, 9, None, {})]
    assert found[0].seconds == (1.0, 2.0, 8.0, 32.0)


def test_a_node_takes_its_fastest_strategy_at_each_batch() -> None:
    options = {"bmm": ([1.0, 4.0, 16.0, 64.0], STORED), "turned": ([2.0, 2.0, 2.0, 2.0], TURNED)}
    found = chosen_classes([way(False, flat(0.0), layer=options)], BATCHES)
    assert summary(found) == [(False, 1, 2, {"layer": "bmm"}), (False, 3, None, {"layer": "turned"})]


def test_a_gain_of_few_percent_makes_no_class_and_no_form() -> None:
    options = {"bmm": (flat(1.0), STORED), "turned": (flat(0.99), TURNED)}
    assert summary(chosen_classes([way(False, flat(0.0), layer=options)], BATCHES)) == [
        (False, 1, None, {"layer": "bmm"})
    ]
    options = {"bmm": ([1.0, 1.0, 1.0, 1.0], STORED), "gemm": ([1.01, 0.99, 1.01, 0.99], STORED)}
    assert len(chosen_classes([way(False, flat(0.0), layer=options)], BATCHES)) == 1


def test_each_class_makes_its_own_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes that read a packed weight hold it twice."""
    monkeypatch.setattr(way_choice, "FEW_BYTES", 0)
    packed: Mapping[str, tuple[Sequence[float], Form]] = {
        "bmm": (flat(4.0), STORED),
        "packed": (flat(1.0), PACKED),
    }
    wide = way(False, [1.0, 1.0, 40.0, 160.0], layer=packed)
    loop = way(True, [10.0, 10.0, 10.0, 10.0], layer=packed)
    for limit, plans in ((200, {"packed"}), (199, {"bmm"})):
        monkeypatch.setattr(way_choice, "MOST_BYTES", limit)
        found = chosen_classes([wide, loop], BATCHES)
        assert len(found) == 2 and {c.strategies["layer"] for c in found} == plans


THREE: Mapping[str, tuple[Sequence[float], Form]] = {
    "bmm": (flat(10.0), STORED),
    "turned": ([1.0, 5.0, 9.0, 9.0], TURNED),
    "packed": ([9.0, 2.0, 1.0, 1.0], PACKED),
}


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (way_choice.FEW_BYTES // 2, {"turned", "packed"}),
        (way_choice.FEW_BYTES // 2 + 1, {"packed"}),
        (way_choice.MOST_BYTES, {"packed"}),
        (way_choice.MOST_BYTES + 1, {"bmm"}),
    ],
)
def test_large_weights_have_fewer_forms(size: int, names: set[str]) -> None:
    """Two forms beside the stored one, one, or none."""
    forms = {TURNED: form("turned", size), PACKED: form("packed", size), STORED: STORED}
    options = {name: (seconds, forms[own]) for name, (seconds, own) in THREE.items()}
    found = chosen_classes([way(False, flat(0.0), layer=options)], BATCHES)
    assert {c.strategies["layer"] for c in found} - {"bmm"} == names - {"bmm"}
    assert ("bmm" in names) == (len(names) == 1 and "bmm" in {c.strategies["layer"] for c in found})


def test_a_loop_and_one_op_do_not_both_read_large_weights_in_forms_of_their_own() -> None:
    size = way_choice.FEW_BYTES
    wide = way(
        False,
        [1.0, 1.0, 9.0, 9.0],
        layer={"bmm": (flat(3.0), STORED), "packed": (flat(1.0), form("packed", size))},
    )
    loop = way(
        True,
        [9.0, 9.0, 1.0, 1.0],
        layer={"": (flat(3.0), STORED), "packed": (flat(2.5), form("looped", size))},
    )
    found = chosen_classes([wide, loop], BATCHES)
    assert [c.way.loop for c in found] == [False, True]
    assert [c.strategies["layer"] for c in found] == ["packed", ""]


def test_no_way_is_taken_whose_form_is_too_large() -> None:
    packed = way(False, flat(0.0), conv={"packed": (flat(1.0), form("packed", way_choice.MOST_BYTES + 1))})
    stored = way(False, flat(0.0), conv={"grouped": (flat(9.0), STORED)})
    assert summary(chosen_classes([packed, stored], BATCHES)) == [(False, 1, None, {"conv": "grouped"})]


times = st.floats(1e-6, 1e-3)
FORMS = (STORED, TURNED, PACKED, LOOPED)


@st.composite
def ways(draw: st.DrawFn) -> list[Way]:
    def options() -> tuple[Option, ...]:
        more = draw(st.lists(st.sampled_from(FORMS[1:]), max_size=2, unique=True))
        forms = [STORED, *more]
        return tuple(Option(str(k), draw(times), f) for k, f in enumerate(forms))

    found = []
    for loop in (False, True):
        at = tuple({name: options() for name in "ab"} for _ in BATCHES)
        found.append(Way(loop, at, tuple(draw(times) for _ in BATCHES)))
    return found


@given(ways())
def test_classes_cover_all_batches_in_order_and_read_no_more_forms_than_allowed(found: list[Way]) -> None:
    classes = chosen_classes(found, BATCHES)
    assert classes[0].least == 1 and classes[-1].most is None
    assert all(a.most is not None and b.least == a.most + 1 for a, b in itertools.pairwise(classes))
    assert [i for c in classes for i in c.numbers] == list(range(len(BATCHES)))
    for name in "ab":
        used = {
            next(o.form for o in c.way.at[i][name] if o.strategy == c.strategies[name])
            for c in classes
            for i in c.numbers
        }
        assert len(used - {STORED}) <= 2
    loops = [c.way.loop for c in classes]
    assert sum(a != b for a, b in itertools.pairwise(loops)) <= 1
