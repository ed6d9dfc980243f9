"""Opens plain files of untrusted folders: once, and without waiting for a writer."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def opened_once(path: str, status: os.stat_result) -> Iterator[str]:
    """Opens a plain file once, and yields a path by which it can be opened again inside a with block.

    That path leads to the open file, also if another file takes the place of `path` meanwhile. Where the
    system has no such paths, it is `path`.

    status: of the file that was looked at. Raises: RefusedFile if another file is there now; OSError.
    """
    with open_plain(path) as file:
        now = os.fstat(file.fileno())
        if (now.st_dev, now.st_ino) != (status.st_dev, status.st_ino):
            raise RefusedFile("was replaced by another file while it was read")
        again = f"/proc/self/fd/{file.fileno()}"
        yield again if os.path.exists(again) else path


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
