"""Writes the results of architectures of public packages, of torch's test databases, and of versions."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from results import part, rows_of, table

BACKENDS = {"graph": "eager, with the tests' stand-in for CUDA graphs"}
REASONS = 12  # rows of the table of reasons
OUTCOMES = ("right", "refused", "wrong", "crash", "apart")


@part("backends", "backends", "scripts/measure/backends.py")
def backends(document: Any) -> str:
    """Returns how many pairs of an architecture and a backend ran, and each that did not, with its reason."""
    counts = (
        (BACKENDS.get(name, f"`{name}`"), *(found[o] for o in ("ok", "wrong", "refused", "crashed")))
        for name, found in document["counts"].items()
        if any(found.values())
    )
    share = 100 * document["pairs_that_run"] / max(1, document["pairs"])
    text = (
        f"{table('backend | right | wrong | refused | crashed', counts)}\n\n"
        f"Of {document['pairs']} pairs of another backend and an architecture that `eager` takes, "
        f"{document['pairs_that_run']} ran ({share:.1f}%)."
    )
    others = [(f"`{name}`", "build", _cell(said)) for name, said in document["not_built"].items()]
    others += [
        (f"`{r['name']}`", f"`{r['backend']}`", f"{r['outcome']}: {_cell(r['said'])}")
        for r in document["others"]
    ]
    return f"{text}\n\n{table('architecture | backend | what came', others)}" if others else text


def _cell(text: str) -> str:
    """Returns the reason of a message as one cell of a table, without the place of the artifact."""
    words = text.splitlines()[0].partition(".wide: ")[2] or text.splitlines()[0]
    return words.replace("|", "\\|")[:220]


@part("torch-databases", "torch-databases", "scripts/stress/torch_databases.py")
def databases(document: Any) -> str:
    """Returns the counts by database and way, and the most frequent reasons of refusals."""
    total: Counter[str] = Counter()
    for row in document["counts"].values():
        total.update(row)
    groups = {**document["counts"], "all": total}
    rows = ((group, *(f"{row[name]:,}" for name in OUTCOMES)) for group, row in groups.items())
    compared = sum(total[name] for name in OUTCOMES[:-1])
    reasons = Counter(map(reason, document["refused"].values())).most_common()
    rest = sum(count for _, count in reasons[REASONS:])
    return (
        f"{table('database, way | right | refused | wrong | crash | not counted', rows)}\n\n"
        f"{total['refused'] / compared:.1%} of the {compared:,} cases that count are refused.\n\n"
        + table("refused because | cases", [*reasons[:REASONS], *([("other reasons", rest)] if rest else [])])
    )


def reason(message: str) -> str:
    """Returns the class of a refusal, in words without names and numbers."""
    known = {
        "an op that widepack does not know": "the format has no such op",
        "draws random numbers": "a random op that no wide program can have",
        "change from run to run": "a random answer, which a build cannot verify",
        "cannot be exported by torch.export": "torch.export fails in the form that widepack needs",
        "branches on the values": "the code branches on values",
        "is a number": "the answer is a number, not a tensor",
        "was fixed to": "an op fixes the batch",
        "side effect": "a side effect in forward",
        "the gradient of": "a gradient differs from torch's own",
        "cannot be compared": "the members refuse drawn inputs",
        "is wrong": "a verification stopped the program",
        "does not give the members' own answers": "a verification stopped the capture",
        "drawn from one seed": "random numbers of another source",
    }
    found = next((words for fragment, words in known.items() if fragment in message), "")
    return found or re.sub(r"[^A-Za-z ].*", "", message.partition(": ")[2])[:60].strip()


@part("versions", "versions", "scripts/measure/versions.py", place=False)
def versions(document: Any) -> str:
    """Returns a row for each pair of versions of Python and torch."""

    def key(version: str) -> tuple[int, ...]:
        return tuple(int(n) for n in version.partition("+")[0].split("."))

    found = sorted(rows_of(document), key=lambda r: (key(r["torch"]), key(r["python"])))
    rows = (
        (
            *(row[name] for name in ("python", "torch", "tests")),
            f"{row['passed']:,}",
            ", ".join(f"`{case.rpartition('::')[2]}`" for case in row["failed"]) or "0",
        )
        for row in found
    )
    where = document["environment"]
    return f"{table('Python | torch | tests | passed | failed', rows)}\n\n{where['date']}, {where['device']}."


@part("zoo", "zoo-cpu", place=False)
def zoo(document: Any) -> str:
    """Returns the results of 237 architectures of public packages."""
    again, summary = document["sample_of_60"], document["summary"]
    failed = "".join(f"- `{name}` is not: {why}.\n" for name, why in document["failed"].items())
    return (
        f"- {summary['entries']} architectures that export with a dynamic batch were tried, with 3 members "
        f"each. {summary['right_shared']} are right with shared inputs and {summary['right_each']} with one "
        "input for each member.\n"
        f"{failed}- Silently wrong: {summary['silently_wrong']}.\n"
        f"- In {summary['wide_share_at_least_98']}, at least 98% of the nodes that read members' own weights "
        "run wide.\n"
        f"- Kernels of the wide program over one member's: {summary['kernels_median']:.2f} in the median, "
        f"{summary['kernels_p90']:.2f} at the 90th percentile.\n"
        f"- A build on one thread takes {again['build_s_median']:.1f} s in the median and "
        f"{again['build_s_p90']:.0f} s at the 90th percentile (a seeded sample of 60).\n"
        f"- Isolation in that sample: {again['isolation']}.\n\n"
        f"{document['machine'].split(';')[0]}, torch {document['torch']}, python {document['python']}."
    )


@part("unseen", "unseen-cpu", place=False)
def unseen(document: Any) -> str:
    first, *later = document["summary"].values()
    tried, right = (sum(c[key] for c in later) for key in ("tried", "right"))
    return (
        f"Architectures that were in no list before, tried once as they come: first {first['right']} of "
        f"{first['tried']} were right. After that list was worked on, {right} of {tried} others, again tried "
        "once, were right."
    )


@part("zoo-onnx", "zoo-onnx", place=False)
def zoo_onnx(document: Any) -> str:
    s = document["summary"]
    return (
        f"Of a seeded sample of {s['entries']}, torch's own exporter takes {s['torch_exporter_takes']} "
        f"single members with a dynamic batch. Of these, {s['widepack_right_of_those']} answer in ONNX "
        f"Runtime as wide programs within float32 rounding ({s['torch_right_of_those']} as torch writes them "
        f"alone). Of all {s['entries']}, {s['widepack_right']} do; one has complex numbers inside."
    )


@part("zoo-default", "zoo-default-cpu", place=False)
def zoo_default(document: Any) -> str:
    """Returns the speed of artifacts as built, over the eager loop."""
    rows = []
    for threads, found in document["summary"].items():
        below = ", ".join(
            f"{b['entry']} at batch {b['batch']}, {b['pattern']} ({b['ratio']:.2f})" for b in found["below"]
        )
        ratios = (f"{found['geometric_mean']:.2f}", f"{found['least']:.2f}")
        rows.append((threads, found["entries"], found["rows"], *ratios, below or "none"))
    where = document["environment"]
    return (
        f"{table('threads | architectures | rows | geometric mean | least | below 0.95', rows)}\n\n"
        f"{where['date']}, {where['device']}, torch {where['versions']['torch']}."
    )


@part("zoo-rows", "zoo-rows", place=False)
def zoo_rows(document: Any) -> str:
    """Returns for how many architectures the rows of a batch are independent, and which mix them."""
    s, where = document["summary"], document["environment"]
    mixed = (
        (r["entry"], r["reason"].replace("|", " ")) for r in document["entries"] if r["outcome"] == "mix"
    )
    return (
        f"Of {s['captured']} architectures with a dynamic batch, {s['proved']} are proved to have "
        f"independent rows, {s['tried']} pass the trials only, and {s['mixed']} do neither:\n\n"
        f"{table('architecture | reason', mixed)}\n\n"
        f"{where['date']}, torch {where['versions']['torch']}."
    )
