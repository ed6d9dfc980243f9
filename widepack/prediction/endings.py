"""Says by the ending of a name which format a file has, and which files an input has."""

from __future__ import annotations

from pathlib import Path

from ..errors import UsageError

CSV = (".csv", ".tsv")
LINES = (".jsonl", ".ndjson")
"""Files with one JSON object in each line, which are read, not written."""
ARROW = (".parquet", ".arrow", ".feather", *CSV)
TENSORS = (".npy", ".safetensors")
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Endings of compressed texts that are read, with the names of their codecs."""
_COMPRESSED = (*PACKED, ".xz", ".zip")


def text_suffix(path: Path) -> str:
    """Returns the ending of a path in lower case, without that of a compression that is read."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if suffix in PACKED and inner in (*CSV, *LINES) else suffix


def suffix_of(path: Path, what: str) -> str:
    """Returns the ending of a path in lower case, or `.parquet` for an input that is a folder.

    what: `input` or `output`, for messages too.

    Raises:
        UsageError: The format is not known.
    """
    reads = what == "input"
    if path.is_dir() and reads:
        return ".parquet"
    suffix = text_suffix(path) if reads else path.suffix.lower()
    known = (*ARROW, *LINES, *TENSORS) if reads else (*ARROW, *TENSORS)
    if suffix in known:
        return suffix
    if suffix in _COMPRESSED:
        raise UsageError(
            f"{what} {path}: the file is compressed as a whole; {what} takes {path.stem}, unpacked"
            + (f". Of compressed files it reads .csv and .jsonl with {', '.join(PACKED)}" if reads else "")
        )
    if suffix == ".npz":
        raise UsageError(
            f"{what} {path}: a .npz file has several arrays; save the one of the inputs as .npy, or all as "
            ".safetensors"
        )
    if path.is_dir():
        raise UsageError(f"{what} {path}: is a folder; give the path of a file")
    raise UsageError(
        f"{what} {path}: the ending {suffix or 'is missing, and'} names no known format; known: "
        f"{', '.join(known)}"
    )


def files_of(path: Path) -> list[Path]:
    """Returns the files of an input: its own path, or the files in a folder and below, in the order of their
    paths. Names that begin with a dot or an underline are notes of other programs, and left out.
    """
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.is_file())
    return [p for p in found if not any(n[0] in "._" for n in p.relative_to(path).parts)]
