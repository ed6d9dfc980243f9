"""Writes the results of `widepack.predict` from bench/results/predict-cpu.json."""

from __future__ import annotations

from results import read, where
from widepack_bench.text import interval


def predict() -> str:
    """Returns the ratio to a loop in memory for each format, the run of all rows, and the killed runs."""
    document = read("predict-cpu")
    lines = [
        "| input | rows | rows/s | loop in memory, rows/s | ratio | ratio of CPU time |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        ratio = interval(row["ratio"]) + ("" if row["quiet"] else " (noisy)")
        lines.append(
            f"| .{row['format']}, {row['file_mb']:.1f} MB | {row['rows']:,} | {row['rows_per_s']:,.0f} "
            f"| {row['loop_rows_per_s']:,.0f} | {ratio} | {row['cpu_ratio']:.2f} |"
        )
    whole, kills = document["whole"], document["kills"]
    lines += [
        "",
        f"- {document['members']} members, {document['network']}, batches of {document['batch']} rows, mean "
        "and std to .parquet.",
        f"- {whole['rows']:,} rows of .parquet ({whole['source_mb']:.0f} MB) take {whole['seconds']:.0f} s, "
        f"and {whole['over_model_mb']:.0f} MB of private memory over that of the loaded model.",
        f"- Runs that were killed: {kills['killed']}. Outputs that they left: {kills['outputs_left']}. "
        f"Files that the next run did not remove: {kills['files_left_by_the_next_run']}.",
        "",
        where(document["environment"]),
    ]
    return "\n".join(lines)
