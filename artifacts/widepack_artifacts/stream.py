"""Writes one file of an artifact and hashes its content at the same time. No torch is imported."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from .errors import ArtifactError
from .folder import CHUNK_BYTES

_LARGE_BYTES = 2**20


class Stream:
    """A file that is being written.

    Attributes: name: The name in the artifact. It is empty until the file is closed, because it contains the
        content's hash. bytes: The number of bytes written so far.
    """

    def __init__(self, file: BinaryIO, error: Callable[[OSError], ArtifactError]) -> None:
        self.name = ""
        self.bytes = 0
        self._file = file
        self._error = error
        self._hash = hashlib.sha256()
        self._hashing: ThreadPoolExecutor | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Writes bytes and returns their number. Raises: ArtifactError."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else view
        try:
            for start in range(0, view.nbytes, CHUNK_BYTES):
                part = view[start : start + CHUNK_BYTES]
                if part.nbytes < _LARGE_BYTES:
                    self._hash.update(part)
                    self._file.write(part)
                else:  # in parallel, since both release the interpreter's lock
                    self._hashing = self._hashing or ThreadPoolExecutor(1)
                    hashed = self._hashing.submit(self._hash.update, part)
                    try:
                        self._file.write(part)
                    finally:
                        hashed.result()
                self.bytes += part.nbytes
        except OSError as e:
            raise self._error(e) from e
        return view.nbytes

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        """Does nothing: closing the stream flushes it to the disk."""

    def seekable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def finish(self) -> str:
        """Flushes the file to the disk and closes it. Returns the SHA-256. Raises: OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        """Closes the file and ends the thread. Raises: OSError."""
        if self._hashing is not None:
            self._hashing.shutdown()
        self._file.close()
