"""Defines the routing of rows to members that a loaded model has, and each of its entries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch


class Routes(ABC):
    """Runs each row of a batch by the member that it is for."""

    @abstractmethod
    def route(self, *args: Any, member: torch.Tensor | Sequence[int | str] | int | str, **kwargs: Any) -> Any:
        """Runs each row of a batch by one member.

        Row b of the answer is what the member `member[b]` answers for row b of the inputs, within the
        recorded bounds, whatever other rows are in the batch. Only members with rows run. Layers whose
        weights all members share run once on all rows.

        A model is routed only if its rows are independent, so that no row changes the answer to another one.
        `build` examines that and records it. `ens(x)` and `ens.each(xs)` do not need it.

        Args:
            *args: The inputs as the member's method takes them, without a member axis. Inputs with the dim of
                the batch have one row for each answer; all rows share the others.
            member: The member of each row: B numbers or names, as a tensor, an array or a list. A single
                number or name is for all rows.
            **kwargs: The inputs by name. An input of the model that is called `member` is given by position.

        Returns:
            The member's own structure, in the order of the rows, without a member axis. A leaf is a list of B
            tensors if the shapes of the answers differ.

        Raises:
            InputError: The inputs do not match the entry, or `member` has no member for each row.
            UsageError: The entry cannot be routed: its rows are not independent, it has states, or it draws
                random numbers. Or a name is unknown, or the model was closed.
            ArtifactError: A program of the file does not match what the manifest says of it: types, or the
                number of rows of an answer.

        Example:
            >>> y = ens.route(x, member=[3, 0, 3])  # x: [3, 8], y: [3, 10]
            >>> y = ens.route(x, member=["rome", "paris", "rome"])
        """
