"""Makes the tables of attention with masks and of members with few experts."""

from __future__ import annotations

from typing import Any

from fleet_results import measured


@measured("masked-attention-cpu", "scripts/measure/masked_attention.py")
def masked_attention(document: Any) -> str:
    """Returns the times of attention that skips keys."""
    lines = ["| mask | length | widepack | torch | loop | over torch | over the loop |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for row in document["rows"]:
        ms = row["ms"]
        lines.append(
            f"| {row['mask']} | {row['length']:,} | {ms['blocks']:.1f} ms | {ms['folded']:.1f} ms | "
            f"{ms['loop']:.1f} ms | {row['over_folded']:.2f}x | {row['over_loop']:.2f}x |"
        )
    return "\n".join(lines)


@measured("few-experts-cpu", "scripts/measure/few_experts.py")
def few_experts(document: Any) -> str:
    """Returns the times of members with few experts."""
    lines = ["| batch | tokens | widepack | loop | over the loop |", "|--:|--:|--:|--:|--:|"]
    for row in document["rows"]:
        ms = row["ms"]
        lines.append(
            f"| {row['batch']} | {row['length']} | {ms['built']:.1f} ms | {ms['loop']:.1f} ms | "
            f"{row['over_loop']['value']:.2f}x |"
        )
    return "\n".join(lines)


PARTS = {"masked-attention": masked_attention, "few-experts": few_experts}
