"""Writes the results of every backend over architectures of public packages."""

from __future__ import annotations

from results import read

_TITLES = {"graph": "eager, with the tests' stand-in for CUDA graphs"}


def table() -> str:
    """Returns how many pairs of an architecture and a backend ran, and each that did not, with its reason."""
    document = read("backends")
    share = 100 * document["pairs_that_run"] / max(1, document["pairs"])
    lines = ["| backend | right | wrong | refused | crashed |", "|---|---|---|---|---|"]
    for name, counts in document["counts"].items():
        if any(counts.values()):
            cells = " | ".join(str(counts[o]) for o in ("ok", "wrong", "refused", "crashed"))
            lines.append(f"| {_TITLES.get(name, f'`{name}`')} | {cells} |")
    lines += [
        "",
        f"Of {document['pairs']} pairs of another backend and an architecture that `eager` takes, "
        f"{document['pairs_that_run']} ran ({share:.1f}%).",
    ]
    if document["others"] or document["not_built"]:
        lines += ["", "| architecture | backend | what came |", "|---|---|---|"]
        lines += [f"| `{name}` | build | {_cell(said)} |" for name, said in document["not_built"].items()]
        lines += [
            f"| `{r['name']}` | `{r['backend']}` | {r['outcome']}: {_cell(r['said'])} |"
            for r in document["others"]
        ]
    return "\n".join([*lines, "", f"torch {document['torch']}, one thread."])


def _cell(text: str) -> str:
    """Returns the reason of a message as one cell of a table, without the place of the artifact."""
    words = text.splitlines()[0].partition(".wide: ")[2] or text.splitlines()[0]
    return words.replace("|", "\\|")[:220]
