"""Tests the kernel times of machines: measurement, JSON, the user's cache, and which ones count here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from widepack.errors import UsageError
from widepack.kernel_times import calibration, sources
from widepack.kernel_times.kernel_work import ELEMENTWISE, KernelWork
from widepack.kernel_times.profile import Profile
from widepack.kernel_times.sources import VARIABLE, keep, profile_here, shipped, written
from widepack.system.machine import name_of
from widepack_artifacts.errors import ArtifactError

SHIPPED = shipped()["amd-epyc-avx512"]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "cache").mkdir(mode=0o700)
    sources.forget()
    yield
    sources.forget()


@pytest.mark.extended
def test_measured_times_are_plausible_and_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "BLOCK_S", 1e-5)
    monkeypatch.setattr(calibration, "BLOCKS", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    told: list[tuple[str, int, int]] = []
    try:
        found = calibration.measure(progress=lambda *at: told.append(at))
    finally:
        torch.set_num_threads(before)
    assert all(0 <= s < 1e-1 for s in found.starts.values())
    for kind, times in found.products.items():
        assert all(math.isfinite(v) and v > 0 for _, c in times.by_rows for v in c.values), kind
    big, small = found.products["product"].at(256, 1 << 20), found.products["product"].at(4, 1 << 10)
    assert big > 100 * small  # 65,536 times the work
    again = Profile.from_json(json.loads(written(found)))
    assert written(again) == written(found) and len(written(found)) < 20_000
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert all(done < total for _, done, total in told)
    assert found.machine == name_of("cpu") and found.threads == 1


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_times_are_those_of_a_machine(name: str) -> None:
    profile = shipped()[name]
    assert profile.machine and profile.date >= "2026" and profile.torch and profile.threads == 1
    few, many = (profile.kernel(KernelWork("batched product", 8, r, 512 * 512), 0.0) for r in (1, 64))
    assert 0 < few < many
    small, large = (profile.kernel(KernelWork(ELEMENTWISE, elements=n), 0.0) for n in (10, 1e6))
    assert 0 < small < large


def test_times_of_this_machine_count_before_those_of_others() -> None:
    threads = torch.get_num_threads()
    other = profile_here()
    assert other in shipped().values()
    mine = replace(SHIPPED, machine=name_of("cpu"), threads=threads, date="2026-02-03")
    place = keep(mine)
    assert place.stat().st_mode & 0o777 == 0o600
    assert profile_here().date == "2026-02-03"
    place.chmod(0o666)  # other users could have written it
    sources.forget()
    assert profile_here() is other


def test_damaged_times_do_not_count() -> None:
    mine = replace(SHIPPED, machine=name_of("cpu"), threads=torch.get_num_threads())
    place = keep(mine)
    place.write_text("{", encoding="utf-8")
    sources.forget()
    assert profile_here() in shipped().values()


def test_the_environment_names_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "amd-epyc-avx512")
    assert profile_here() is SHIPPED
    file = tmp_path / "times.json"
    file.write_text(written(replace(SHIPPED, date="2026-03-04")), encoding="utf-8")
    monkeypatch.setenv(VARIABLE, str(file))
    assert profile_here().date == "2026-03-04"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missing.json"))
    with pytest.raises(UsageError, match="no profile of the package. Known: amd-epyc-avx2, amd-epyc-avx512"):
        profile_here()
    file.write_text("[]", encoding="utf-8")
    sources.forget()
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(UsageError, match="calibrate -o FILE"):
        profile_here()


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("format", "other 1", "the format is 'other 1'"),
        ("cold", [[2, 1], [1, 1]], "rising sizes"),
        ("cold", [[1, -1]], "positive numbers"),
        ("products", {}, "products and elementwise kernels are missing"),
        ("products", {"product": []}, "rising numbers of rows"),
        ("others", {}, "products and elementwise kernels are missing"),
        ("starts", 3, "not a profile"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(part: str, value: object, words: str) -> None:
    data = {**json.loads(written(SHIPPED)), part: value}
    with pytest.raises(ArtifactError, match=words):
        Profile.from_json(data)


def test_a_kind_that_was_not_measured_is_like_the_most_similar_one() -> None:
    known = {k: p for k, p in SHIPPED.products.items() if "1x1" not in k and "narrow" not in k}
    less = replace(SHIPPED, products=known, starts={k: SHIPPED.starts[k] for k in known})

    def time(kind: str) -> float:
        return less.kernel(KernelWork(kind, 4, 16, 4096), 0.0)

    assert time("packed grouped 1x1 convolution") == time("packed grouped convolution")
    assert time("narrow turned product") == time("turned product")
    assert time("a kind of the future") == time("product")
