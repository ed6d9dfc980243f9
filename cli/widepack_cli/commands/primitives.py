"""`widepack primitives`: lists the ops that run wide and their strategies."""

from __future__ import annotations

import click

from ..shared.failures import Refusal
from ..shared.options import emit, example, json_option


@click.command(
    epilog=example("widepack primitives", "widepack primitives conv", "widepack primitives --json")
)
@click.argument("names", metavar="[NAME]...", nargs=-1)
@json_option
def command(names: tuple[str, ...], as_json: bool) -> None:
    """List the ops that run wide, by primitive, with their strategies in the order in which they are tried.

    NAME is a primitive (linear, conv, pointwise), an op (aten.linear.default, max.dim) or an alias
    (LayerNorm, conv2d, attention). Each strategy is a value of `widepack build --strategy`. The last section,
    `sequential`, lists the ops that run once for each member, with the reason.
    """
    import widepack.primitives  # noqa: F401  # fills the registry
    from widepack.ir.ops import full_name
    from widepack.lowering.interpreter import once_a_member
    from widepack.primitives import find
    from widepack.registry.registry import families

    requested = {p.op for n in names for p in find(n)}

    def alone(op: str) -> bool:
        return not names or "sequential" in names or op in names or op in {full_name(n) for n in names}

    found = [
        (family, kept)
        for family, ops in families()
        if (kept := [p for p in ops if not names or family in names or p.op in requested])
    ]
    once = {
        why: listed for why, ops in once_a_member().items() if (listed := [op for op in ops if alone(op)])
    }
    if not found and not once:
        raise Refusal(
            f"there is no primitive or op called {' or '.join(map(repr, names))}; primitives: "
            f"{', '.join(f for f, _ in families())}"
        )
    if as_json:
        alone_of = (
            {
                "sequential": {
                    op: [{"strategy": "sequential", "note": why}] for why, ops in once.items() for op in ops
                }
            }
            if once
            else {}
        )
        emit(
            {
                family: {
                    p.op: [{"strategy": s.name, "note": s.note} for s in p.strategies.values()] for p in ops
                }
                for family, ops in found
            }
            | alone_of
        )
        return
    for index, (family, ops) in enumerate(found):
        click.echo(("\n" if index else "") + family)
        groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for primitive in ops:
            groups.setdefault(tuple((s.name, s.note) for s in primitive.strategies.values()), []).append(
                _short(primitive.op)
            )
        for strategies, short in groups.items():
            click.echo(
                click.wrap_text(", ".join(short), width=118, initial_indent="  ", subsequent_indent="  ")
            )
            for name, note in strategies:
                click.echo(f"      {name:<16} {note}".rstrip())
    if once:
        click.echo(("\n" if found else "") + "sequential (once for each member)")
    for why, listed in once.items():
        click.echo(
            click.wrap_text(
                ", ".join(map(_short, listed)), width=118, initial_indent="  ", subsequent_indent="  "
            )
        )
        click.echo(f"      {why}")


def _short(op: str) -> str:
    return op.removeprefix("aten.").removesuffix(".default")
