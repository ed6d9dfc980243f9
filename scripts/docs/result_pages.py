"""Writes the numbers of README.md and docs/, and the first chart, from bench/results/*.json.

    python scripts/docs/result_pages.py            # writes them into the pages
    python scripts/docs/result_pages.py --check    # exit code 1 if a page is not up to date

A page marks the place of a generated part with its name:

    <!-- generated: suite -->
    ...
    <!-- end of generated -->

The other files of this folder have one function for each name (`results.part`). Nobody types a measured
number into a page.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

import architecture_results as architecture_results
import as_built_chart
import device_results as device_results
import fleet_results as fleet_results
import network_results as network_results
import service_results as service_results

from results import PARTS, ROOT, read

PAGES = (
    "docs/how-to/reduce.md",
    "README.md",
    "docs/index.md",
    "docs/results/networks.md",
    "docs/results/layers.md",
    "docs/results/architectures.md",
    "docs/results/service.md",
    "docs/results/fleets.md",
    "docs/results/costs.md",
    "docs/results/training.md",
    "docs/results/devices.md",
    "docs/explanation/publishing.md",
)
MARK = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end of generated -->)", re.DOTALL)


def filled(text: str) -> str:
    """Returns the text of a page with all generated parts updated."""
    return MARK.sub(lambda m: f"{m[1]}{PARTS[m[2]]().rstrip()}\n{m[4]}", text)


def changed() -> dict[str, str]:
    """Returns the new text of each page, and of the chart, that differs from bench/results."""
    new = {page: filled((ROOT / page).read_text(encoding="utf-8")) for page in PAGES}
    new[str(as_built_chart.CHART.relative_to(ROOT))] = as_built_chart.chart(read("as-built-cpu"))
    return {page: text for page, text in new.items() if text != _text(page)}


def _text(page: str) -> str:
    path = ROOT / page
    return path.read_text(encoding="utf-8") if path.exists() else ""


def stale() -> list[str]:
    """Returns the pages and pictures that differ from bench/results."""
    return list(changed())


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or checks the pages. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a page is not up to date"
    )
    check = parser.parse_args(arguments).check
    pages = changed()
    for page, text in pages.items():
        print(f"{page}: {'not up to date; run scripts/docs/result_pages.py' if check else 'written'}")
        if not check:
            (ROOT / page).write_text(text, encoding="utf-8")
    return int(check and bool(pages))


if __name__ == "__main__":
    sys.exit(main())
