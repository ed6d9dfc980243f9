"""Imports pyarrow. No other module does, so that only Parquet, Arrow and CSV files need it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import InputError, Unavailable


def arrow() -> Any:
    """Returns the package pyarrow, with its submodules. Raises: Unavailable if it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as e:
        raise Unavailable(
            f"Parquet, Arrow and CSV files need pyarrow ({e}): pip install 'widepack[predict]'. "
            "Files of .npy and .safetensors need nothing more"
        ) from None
    return pyarrow


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what pyarrow raises about the content of a file into InputError."""
    pa = arrow()
    try:
        yield
    except pa.lib.ArrowMemoryError:
        raise
    except (pa.lib.ArrowException, OSError, UnicodeDecodeError) as e:
        if isinstance(e, OSError) and e.filename is not None:
            raise
        lines = str(e).strip().splitlines()
        raise InputError(f"{path}: {lines[0][:300] if lines else type(e).__name__}") from e


@contextmanager
def writable(path: Path) -> Iterator[None]:
    """Names the file in an error of the system that pyarrow raises while it writes."""
    pa = arrow()
    try:
        yield
    except OSError as e:
        if e.filename is None:
            raise OSError(e.errno, str(e), str(path)) from e
        raise
    except pa.lib.ArrowException as e:
        lines = str(e).strip().splitlines()
        raise InputError(f"{path} cannot hold these columns: {lines[0][:300] if lines else e}") from e
