"""Tasks for backends, of programs that are in no artifact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from widepack.backends.task import Task
from widepack_artifacts.program import Program


def task_of(program: Program, eager: Callable[..., Any], **others: Any) -> Task:
    """A task of a program without named dims."""
    return Task(
        **{
            "program": program,
            "weights": list,
            "device": torch.device("cpu"),
            "content": "a program",
            "pattern": "shared",
            "title": "the program",
            "eager": eager,
            "dims": {},
            "example": {},
            "guards": (),
            "inputs": lambda sizes: [],
            "differ": lambda found, want: "",
            "compile": True,
            "cache": None,
            **others,
        }
    )
