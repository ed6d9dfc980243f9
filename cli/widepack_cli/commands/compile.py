"""`widepack compile`: an artifact's programs as native code, in the local cache or in a folder for a container image."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from widepack_bench.text import columns, plural, size

from ..shared.options import ARTIFACT, emit, entry_named, entry_option, example, json_option, stdout_kept
from ..shared.progress_bar import Progress

PATTERNS = {"shared": ("shared",), "each": ("each",), "both": ("shared", "each")}


@click.command(
    epilog=example(
        "widepack compile ens.wide",
        "widepack compile ens.wide -o compiled --pattern shared   # then load(cache='compiled'), or WIDEPACK_CACHE=compiled",
        "widepack compile ens.wide --backend onnxruntime --json",
    )
)
@ARTIFACT
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder to fill, for a container image; load(cache=DIR) or WIDEPACK_CACHE points there. Without it: the user's cache.",
)
@click.option(
    "--backend", type=click.Choice(["aot", "onnxruntime"]), default="aot", show_default=True, help="What to compile for: AOTInductor or ONNX Runtime."
)
@click.option(
    "--pattern",
    type=click.Choice(list(PATTERNS)),
    default="both",
    show_default=True,
    help="Programs for inputs that all members share, for one input each, or both.",
)
@entry_option
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the checking calls; what is compiled runs with any number.")
@json_option
def command(artifact: Path, out: Path | None, backend: str, pattern: str, entry: str, threads: int | None, as_json: bool) -> None:
    """Compile ARTIFACT's programs for this machine, so that load(backend="aot") starts at once and needs no compiler.

    What is in the cache already is left as it is. Every program is held to the flat graph at several sizes and to the artifact's probe before it is
    kept. The code is of this processor's instruction set and this build of torch; elsewhere it is not taken.
    """
    from widepack_artifacts.writer import Reader

    entries = Reader(artifact).manifest.entries
    names = [entry_named(entries, entry, "")] if entry else list(entries)
    if out is not None and not out.exists():
        out.mkdir(parents=True)
        out.chmod(0o755)  # whatever the umask says: a folder that a group can write into is not taken
    rows: list[dict[str, Any]] = []
    with stdout_kept(as_json), Progress() as progress:
        import torch

        import widepack

        stages: list[str] = []

        def report(stage: str, done: int, total: int) -> None:
            stages.append(stage)
            progress(stage, done, total)

        ens = widepack.load(artifact, backend=backend, compile="now", cache=out, warmup=False, threads=threads, progress=report)
        for name in names:
            for one in PATTERNS[pattern]:
                begun, start = len(stages), time.monotonic()
                places = ens.entry(name).compiled(one)
                rows.append(
                    {
                        "entry": name,
                        "pattern": one,
                        "programs": len(places),
                        "compiled": len(stages) - begun,
                        "seconds": round(time.monotonic() - start, 3),
                        "bytes": sum(f.stat().st_size for p in set(places) for f in p.iterdir()),
                    }
                )
        from widepack.system.compiled_cache import default_folder

        folder = out or default_folder()
        document = {
            "path": str(artifact),
            "backend": backend,
            "folder": str(folder),
            "torch": torch.__version__,
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "programs": rows,
        }
    if as_json:
        emit(document)
        return
    table = [["entry", "pattern", "programs", "", "size", "seconds"]]
    table += [
        [
            r["entry"],
            r["pattern"],
            str(r["programs"]),
            f"{r['compiled']} compiled" if r["compiled"] else "there already",
            size(r["bytes"]),
            f"{r['seconds']:.1f}",
        ]
        for r in rows
    ]
    click.echo("\n".join(columns(table)))
    click.echo(
        f"{plural(sum(r['programs'] for r in rows), 'program')} for {backend} in {folder}, torch {document['torch']}, {document['instructions']}"
    )
