"""Runs single members by sessions of their own, over the packed weights that the session of all members maps.

A session is opened when its member is first needed. It has the member's nodes of the session of all members,
so its answers are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..system.compiled_cache import CompiledCache
from .member_loops import FlatOutput
from .onnx_binding import Binding, Share
from .onnx_packed import MEMBERS, opened_part
from .onnx_parts import SessionFile
from .task import Function, Task
from .variants import Checked, Variant

MOST_THREADS = 64
"""The most threads of all sessions of single members. With more members, each session has one."""


class MemberSessions:
    """The sessions of single members of one binding.

    Args:
        task: The program that was bound.
        binding: How sessions run it.
        cache: Where the entries are.
        onnxruntime: The package.
        before: Those of what was bound before; None for a first bind.

    Attributes:
        shares: The share, with an entry of the cache, that has each member's part.
        opened: The open sessions, by member.
    """

    def __init__(
        self,
        task: Task,
        binding: Binding,
        cache: CompiledCache,
        onnxruntime: Any,
        before: MemberSessions | None = None,
    ) -> None:
        self._task, self._cache, self._onnxruntime = task, cache, onnxruntime
        self.binding = binding
        self._lock = threading.Lock()
        self._files: dict[Path, SessionFile] = {}
        self.opened: dict[int, Checked] = {}
        self.shares: dict[int, Share] = {}
        if not binding.apart:
            return
        for share in binding.shares:
            if share.entry:
                self.shares.update(dict.fromkeys(share.members, share))
        if before is not None and before.binding.graph == binding.graph:  # members with the same weights
            known = {m: s for m, s in before.shares.items() if m != task.member}
            self.shares = {**known, **self.shares}
            self.opened = {m: run for m, run in before.opened.items() if m in known}

    def open(self, member: int, wrong: Callable[[Function], str]) -> bool:
        """Opens the session of a member, unless it is open.

        wrong: Returns what is wrong with its answers, or "". A session that is wrong, or that cannot be
        opened, is not tried again. Returns: whether it is open. Raises: OSError if its file is gone; what
        ONNX Runtime raises.
        """
        with self._lock:
            share = None if member in self.opened else self.shares.pop(member, None)
            if share is not None:
                run = self._opened(member, share)
                if not wrong(run):
                    self.opened[member], self.shares[member] = run, share
        return member in self.opened

    def run(self, member: int, inputs: Sequence[torch.Tensor]) -> list[Any] | None:
        """Runs an open session.

        inputs: the member's own, in the order of the program's inputs. Returns: the outputs of the member;
        None if the session is not open, or if the flat graph must run these inputs.
        """
        run = self.opened.get(member)
        return None if run is None else run(*inputs)

    def _opened(self, member: int, share: Share) -> Checked:
        binding = self.binding
        if (entry := self._cache.find(share.entry)) is None:
            raise FileNotFoundError(f"{self._cache.folder}: the entry {share.entry} is not there any more")
        place = entry[0]
        if place not in self._files:
            self._files[place] = SessionFile((place / MEMBERS).read_bytes())
        file, own = self._files[place], member - share.start
        inputs, at = [], 0
        for i in binding.inputs:
            inputs.append(file.inputs[at + own if i.each else at])
            at += len(share.members) if i.each else 1
        whole = binding.outputs_of(share)
        apart = [k for k in whole if binding.has_parts(k)]
        if len(file.outputs) != len(whole) + len(apart) * len(share.members):
            raise ValueError("the outputs are not those of the record")
        names: dict[int, str] = {}
        for k, name in zip(whole, file.outputs):
            if binding.outputs[k] in (-1, member):
                names[k] = name
        for number, k in enumerate(apart):
            names[k] = file.outputs[len(whole) + own * len(apart) + number]
        numbers = list(names)
        booleans = [binding.booleans[k] for k in numbers]
        threads = 0 if len(self.shares) * torch.get_num_threads() <= MOST_THREADS else 1
        content = file.part(inputs, [*names.values()])
        session = opened_part(content, place, f"member {own}", booleans, threads, self._onnxruntime)

        def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return session([given[i.number] for i in binding.inputs])

        slots = tuple(replace(s, kind="shared") for s in self._task.program.inputs)
        task = replace(self._task, program=replace(self._task.program, inputs=slots), eager=lambda *_: None)
        shape = [_of_member(s, member, numbers) for s in binding.shape]
        return Checked(task, shape, [Variant(run, (), binding.least)], flagged=binding.flagged)


def _of_member(shape: Any, member: int, numbers: Sequence[int]) -> FlatOutput:
    """The place of a member's output among those of its session."""
    found = shape if isinstance(shape, FlatOutput) else shape[member]
    return FlatOutput(numbers.index(found.number))
