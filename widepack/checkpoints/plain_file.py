"""Opens plain files of untrusted folders: once, and without waiting for a writer."""

from __future__ import annotations

import os
import stat
from typing import IO

from .state_dict import RefusedFile

_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_plain(path: str) -> IO[bytes]:
    """Opens a plain file, which a link may lead to: a cache of Hugging Face has links.

    A named pipe is opened without waiting, and refused as other special files are.

    Raises: RefusedFile; OSError.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device may do something
        raise RefusedFile("is not a plain file")
    handle = os.open(path, _OPEN)
    file = open(handle, "rb")  # noqa: SIM115  # the caller closes it
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise RefusedFile("is not a plain file")
    return file


def read_plain(path: str, most: int) -> bytes:
    """Returns the content of a small plain file.

    Raises: RefusedFile, also for more bytes than `most`; OSError.
    """
    with open_plain(path) as file:
        data = file.read(most + 1)
        if len(data) > most:
            size = os.fstat(file.fileno()).st_size
            raise RefusedFile(f"has {size:,} bytes; at most {most:,} are read")
    return data
