"""Chooses a compiled program that is in the cache, where it was measured to be faster than `eager`.

`widepack compile` and `load(compile="now")` race each compiled program against the same plan on `eager`: with
one thread, and with the current number of threads. If the compiled one is faster by `GAIN`, a note says so in
the folder of compiled programs. A load without a backend takes the compiled program then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from widepack_artifacts import strict_json

from ..errors import UsageError
from ..system.compiled_cache import CompiledCache, default_folder
from ..system.machine import name_of
from ..system.timing import LEAST_ROUNDS, race, ratio, waited
from .bound_program import BoundProgram, StoredProgram
from .open_artifact import OpenArtifact

GAIN = 0.95
RACE_S, MOST_S = 0.2, 5.0


class CompiledChoice:
    """The notes on compiled programs of one artifact.

    artifact: the open artifact, whose options name the folder of compiled programs.
    """

    def __init__(self, artifact: OpenArtifact) -> None:
        self.artifact = artifact
        self._cache = CompiledCache(artifact.options.backend.cache or default_folder())

    def backend(self, pattern: str, stored: StoredProgram) -> str:
        """Returns the backend that was measured to be faster for a program; "" without a note."""
        if not self._cache.folder.is_dir():
            return ""
        try:
            return self._cache.note(self._key(pattern, stored, torch.get_num_threads()))
        except UsageError:  # other users may write in the folder: nothing in it is used
            return ""

    def measure(
        self,
        pattern: str,
        stored: StoredProgram,
        compiled: BoundProgram,
        eager: BoundProgram,
        inputs: Sequence[Tensor],
    ) -> None:
        """Races a compiled program against the plan on `eager`, and notes where it is faster.

        Args:
            pattern: The pattern of inputs.
            stored: The program of the artifact.
            compiled: The program on its backend.
            eager: The program on `eager`.
            inputs: The inputs of one call. If the program refuses them, for example an index out of range,
                nothing is noted.
        """
        try:
            eager.run(*inputs)
        except (IndexError, RuntimeError, ValueError):
            return
        current = torch.get_num_threads()
        try:
            for threads in sorted({1, current}):
                torch.set_num_threads(threads)
                calls = {
                    "compiled": waited(lambda: compiled.run(*inputs), self.artifact.device),
                    "eager": waited(lambda: eager.run(*inputs), self.artifact.device),
                }
                times = race(calls, RACE_S, LEAST_ROUNDS, limit_s=MOST_S)
                faster = ratio(times, "compiled", "eager") <= GAIN
                self._cache.write_note(
                    self._key(pattern, stored, threads), compiled.backend if faster else ""
                )
        finally:
            torch.set_num_threads(current)

    def _key(self, pattern: str, stored: StoredProgram, threads: int) -> str:
        content = stored.content or strict_json.digest(stored.program.to_json())
        machine = name_of(str(self.artifact.device))
        return strict_json.digest([content, pattern, threads, machine, torch.__version__])
