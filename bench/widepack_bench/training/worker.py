"""Trains each member in its own process, on the processors of this one."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor, nn

from .task import RATE, TrainingTask

READY_S = 300.0  # Seconds that a process may take to start.


class MemberProcesses:
    """N processes, each with one member. Calling it trains all members by one step."""

    def __init__(self, task: TrainingTask) -> None:
        context = multiprocessing.get_context("spawn")
        threads = torch.get_num_threads()
        self._ends: list[Connection] = []
        processes: list[BaseProcess] = []
        weakref.finalize(self, _stop, self._ends, processes)
        for i, module in enumerate(task.fresh_modules()):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=train, args=(theirs, module, *task.data(i), threads), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            processes.append(process)
        for end in self._ends:
            if not end.poll(READY_S):
                raise RuntimeError(f"a process did not start within {READY_S:.0f} s")
            end.recv()

    def __call__(self) -> list[float]:
        for end in self._ends:
            end.send(True)
        return [end.recv() for end in self._ends]


def step_in_processes(task: TrainingTask) -> Callable[[], Any]:
    """Starts a process for each member. Returns the step of all."""
    return MemberProcesses(task)


def _stop(ends: list[Connection], processes: list[BaseProcess]) -> None:
    for end in ends:
        with suppress(OSError):  # The process has ended.
            end.send(False)
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.kill()


def train(end: Connection, module: nn.Module, x: Tensor, labels: Tensor, threads: int) -> None:
    """Trains one member by one step for each message that is true. Sends the loss before the step."""
    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):  # All processes share what one process of a measurement has.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)
    end.send(True)
    while end.recv():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        end.send(loss.item())
