"""Sets the threads of commands that run many small ops."""

from __future__ import annotations

import os


def use_free_cores() -> None:
    """Sets torch's threads to the cores that this process may use, or to one if other processes use them.

    A number that the user set by OMP_NUM_THREADS or MKL_NUM_THREADS stays.
    """
    if any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return
    import torch

    from widepack.system.cores import free_threads

    torch.set_num_threads(free_threads(torch.get_num_threads()))
