"""Writes the results of architectures of public packages."""

from __future__ import annotations

from results import read


def zoo() -> str:
    """Returns the results of 237 architectures of public packages."""
    document, again = read("zoo-cpu"), read("zoo-cpu")["sample_of_60"]
    summary = document["summary"]
    lines = [
        f"- {summary['entries']} architectures that export with a dynamic batch were tried, "
        "with 3 members each. "
        f"{summary['right_shared']} are right with shared inputs and {summary['right_each']} "
        "with one input for each member.",
        *(f"- `{name}` is not: {why}." for name, why in document["failed"].items()),
        f"- Silently wrong: {summary['silently_wrong']}.",
        f"- In {summary['wide_share_at_least_98']}, at least 98% of the nodes that read "
        "members' own weights run wide.",
        f"- Kernels of the wide program over one member's: {summary['kernels_median']:.2f} in the median, "
        f"{summary['kernels_p90']:.2f} at the 90th percentile.",
        f"- A build on one thread takes {again['build_s_median']:.1f} s in the median and "
        f"{again['build_s_p90']:.0f} s at the "
        "90th percentile (a seeded sample of 60).",
        f"- Isolation in that sample: {again['isolation']}.",
        "",
        f"{document['machine'].split(';')[0]}, torch {document['torch']}, python {document['python']}.",
    ]
    return "\n".join(lines)


def unseen() -> str:
    document = read("unseen-cpu")
    commits = list(document["summary"].items())
    tried, right = (sum(c[key] for _, c in commits[1:]) for key in ("tried", "right"))
    (_, first), *_ = commits
    return (
        "Architectures that were in no list before, tried once as they come: first "
        f"{first['right']} of {first['tried']} "
        f"were right. After that list was worked on, {right} of {tried} others, again tried once, were right."
    )


def zoo_onnx() -> str:
    summary = read("zoo-onnx")["summary"]
    return (
        f"Of a seeded sample of {summary['entries']}, torch's own exporter takes "
        f"{summary['torch_exporter_takes']} single "
        f"members with a dynamic batch. Of these, {summary['widepack_right_of_those']} "
        "answer in ONNX Runtime as wide programs "
        f"within float32 rounding ({summary['torch_right_of_those']} as torch writes them "
        f"alone). Of all {summary['entries']}, "
        f"{summary['widepack_right']} do; one has complex numbers inside."
    )


def zoo_default() -> str:
    """Returns the speed of artifacts as built, over the eager loop."""
    document = read("zoo-default-cpu")
    lines = [
        "| threads | architectures | rows | geometric mean | least | below 0.95 |",
        "|---|---|---|---|---|---|",
    ]
    for threads, part in document["summary"].items():
        below = ", ".join(
            f"{b['entry']} at batch {b['batch']}, {b['pattern']} ({b['ratio']:.2f})" for b in part["below"]
        )
        lines.append(
            f"| {threads} | {part['entries']} | {part['rows']} | {part['geometric_mean']:.2f} "
            f"| {part['least']:.2f} | {below or 'none'} |"
        )
    environment = document["environment"]
    versions = environment["versions"]
    last = f"{environment['date']}, {environment['device']}, torch {versions['torch']}."
    return "\n".join([*lines, "", last])


def zoo_rows() -> str:
    """Returns for how many architectures the rows of a batch are independent, and which mix them."""
    document = read("zoo-rows")
    summary = document["summary"]
    lines = [
        f"Of {summary['captured']} architectures with a dynamic batch, {summary['proved']} are proved to "
        f"have independent rows, {summary['tried']} pass the trials only, and {summary['mixed']} do neither:",
        "",
        "| architecture | reason |",
        "|---|---|",
    ]
    for row in document["entries"]:
        if row["outcome"] == "mix":
            lines.append(f"| {row['entry']} | {row['reason'].replace('|', ' ')} |")
    environment = document["environment"]
    return "\n".join([*lines, "", f"{environment['date']}, torch {environment['versions']['torch']}."])
