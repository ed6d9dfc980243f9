"""Checks a request against its model before it waits in the queue, so that it fails alone."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from widepack.errors import UsageError, WidepackError
from widepack.inference.call_check import NoRows
from widepack.inference.routing.member_numbers import member_numbers
from widepack.spec.names import names_in, text_of_names
from widepack_artifacts.errors import some

from ..errors import RequestError, TooLarge
from ..protocol.datatypes import BYTES
from ..protocol.parameters import FEATURES
from ..protocol.request import InferRequest, InputHead, Value
from ..protocol.tensors import datatype_of, wire_name
from .outputs import Defaults, Wanted, wanted_output
from .served import EACH, ONE, ServedModel
from .texts import TEXT, TextInput

MEMBER = "member"
"""The input that chooses the member of each row."""
SEEN = 1024
"""How many shapes of calls are remembered as checked."""


Group = tuple[int, bool, int]
"""The number of a form and its sizes, whether rows are routed, and the number of the outputs."""


@dataclass(frozen=True, slots=True)
class Call:
    """A checked call of a model.

    Attributes:
        model: The model.
        tensors: One for each input of the entry, on the device of the model.
        numbers: The member of each row; None if all members answer.
        rows: How many rows it has. 1 if it cannot share a batch.
        wanted: The outputs.
        group: Calls of equal groups can share a batch; None if this one runs alone.
    """

    model: ServedModel
    tensors: Sequence[torch.Tensor]
    numbers: Sequence[int] | None
    rows: int
    wanted: Wanted
    group: Group | None


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How large a request may be, however its dims are chosen.

    Attributes:
        rows: The most rows.
        values: The most numbers of all inputs.
    """

    rows: int = 1 << 16
    values: int = 1 << 24


class CallChecker:
    """Makes calls of requests.

    Args:
        defaults: What the server was started with.
        limits: How large a request may be.
        texts: Makes inputs of texts; None if the server has no tokenizer.
    """

    def __init__(
        self, defaults: Defaults, limits: RequestLimits | None = None, texts: TextInput | None = None
    ) -> None:
        self._defaults, self.texts = defaults, texts
        self._limits = limits or RequestLimits()
        self._seen: dict[Hashable, tuple[int, int | None]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._next = count()

    def call(self, model: ServedModel, request: InferRequest) -> Call:
        """Checks a request.

        Args:
            model: The model that it names.
            request: The request.

        Raises:
            RequestError: The request does not match the model.
        """
        tensors, member = self._inputs(model, request.inputs)
        _check_features(model, request)
        wanted = self._wanted(model, request, routed=member is not None)
        if model.layout.only_binary:
            _check_binary(model, request, wanted)
        self._check_amount(model, tensors)
        try:
            rows, sizes = self._sizes(model, tensors)
            numbers = self._members(model, member, request, rows)
        except RequestError:
            raise
        except WidepackError as e:
            raise RequestError(str(e)) from None
        group = None if sizes is None else (sizes, numbers is not None, self._number(wanted))
        return Call(model, tensors, numbers, rows, wanted, group)

    def with_tokens(self, model: ServedModel, request: InferRequest) -> InferRequest:
        """Returns a request with tokens in the place of its texts.

        Args:
            model: The model that it names.
            request: The request.

        Raises:
            RequestError: The model takes no texts, or not these.
        """
        texts = request.inputs.get(TEXT)
        if texts is None or self.texts is None or not self.texts.reads(model.layout):
            return request
        if model.kind == EACH:
            raise RequestError(f"model {model.name} takes no texts, since each member has rows of its own")
        if not isinstance(texts, list) or request.shapes[TEXT] != [len(texts)]:
            raise RequestError('input text is a list of texts: "datatype": "BYTES", "shape": [ROWS]')
        tokens = self.texts.tokens(model.layout, texts, self._limits.values)
        if twice := [name for name in tokens if name in request.inputs]:
            raise RequestError(f"the request has text and {twice[0]}, which is made of it; leave one out")
        others = {name: value for name, value in request.inputs.items() if name != TEXT}
        return replace(request, inputs={**others, **tokens})

    def check_heads(self, model: ServedModel, heads: Sequence[InputHead]) -> None:
        """Compares what a large request says of its inputs with the model, before their values are read.

        Raises:
            RequestError: They do not match.
            TooLarge: They have too many rows or numbers.
        """
        values: dict[str, Value] = {}
        text = next((one for one in heads if one.name == TEXT), None)
        if text is not None and self.texts is not None and self.texts.reads(model.layout):
            if (rows := math.prod(text.shape)) > self._limits.rows:
                raise self._too_many_rows(rows)
            return  # the other inputs are compared when there are tokens
        for one in heads:
            if one.datatype == BYTES:
                values[one.name] = []
            else:
                datatype = datatype_of(one.title, one.datatype)
                # on the device of the model: a copy to it would have the memory of all its numbers
                zero = torch.zeros((), dtype=datatype.dtype, device=model.artifact.model.device)
                values[one.name] = zero.expand(one.shape)
            if one.name == MEMBER and math.prod(one.shape) > self._limits.rows:
                raise self._too_many_rows(math.prod(one.shape))
        tensors, _ = self._inputs(model, values)
        self._check_amount(model, tensors)
        try:
            self._sizes(model, tensors)
        except WidepackError as e:
            raise e if isinstance(e, RequestError) else RequestError(str(e)) from None

    def _check_amount(self, model: ServedModel, tensors: Sequence[torch.Tensor]) -> None:
        """Checks how many rows and numbers inputs have. Raises: TooLarge."""
        values = sum(t.numel() for t in tensors)
        if values > self._limits.values:
            raise TooLarge(
                f"the inputs have {values} numbers, and the limit of a request is {self._limits.values} "
                "(--max-values); send them in several requests"
            )
        stacked = model.kind == EACH
        for described, tensor in zip(model.layout.inputs, tensors):
            axis = described.rows
            if axis is None or tensor.dim() <= axis.dim + stacked:
                continue
            rows = tensor.shape[axis.dim + stacked] // (axis.before * axis.after)
            if rows > self._limits.rows:
                raise self._too_many_rows(rows)

    def _too_many_rows(self, rows: int) -> TooLarge:
        return TooLarge(
            f"the request has {rows} rows, and the limit of a request is {self._limits.rows} (--max-rows); "
            "send them in several requests"
        )

    def _number(self, key: Hashable) -> int:
        """Returns the number of a key. A number is never used again, so that forgotten keys stay apart."""
        found = self._numbers.get(key)
        if found is None:
            if len(self._numbers) >= SEEN:
                self._numbers.clear()
            found = self._numbers[key] = next(self._next)
        return found

    def _inputs(
        self, model: ServedModel, inputs: Mapping[str, Value]
    ) -> tuple[list[torch.Tensor], Value | None]:
        """Returns the tensors of the entry, and the input `member`. Raises: RequestError."""
        given = dict(inputs)
        known = {i.name for i in model.layout.inputs}
        member = given.pop(MEMBER, None) if model.routes else None
        if unknown := [n for n in given if n not in known]:
            raise RequestError(
                f"model {model.name} has no input {', '.join(unknown)[:80]}; its inputs are "
                f"{', '.join(i.name for i in model.layout.inputs)}{_why_no_member(model, unknown)}"
            )
        device = model.artifact.model.device
        tensors = []
        for described in model.layout.inputs:
            if described.name not in given:
                raise RequestError(
                    f"input {described.name} is missing; model {model.name} takes {', '.join(sorted(known))}"
                )
            value = given[described.name]
            if not isinstance(value, torch.Tensor):
                raise RequestError(
                    f"input {described.name} is BYTES; the model takes {described.datatype.name}"
                )
            if value.dtype != described.datatype.dtype:
                raise RequestError(
                    f"input {described.name} is {wire_name(value.dtype)}; "
                    f"the model takes {described.datatype.name}"
                )
            tensors.append(value if value.device == device else value.to(device))
        return tensors, member

    def _wanted(self, model: ServedModel, request: InferRequest, *, routed: bool) -> Wanted:
        """Returns the outputs of a request. Raises: RequestError."""
        alone = model.kind in (EACH, ONE) or routed
        if not request.outputs:
            artifact, name = model.artifact, model.layout.entry.name
            return artifact.answers[name] if alone else artifact.defaults[name]
        return tuple(
            wanted_output(model.layout, o.name, o.options, self._defaults, figures=not alone)
            for o in request.outputs
        )

    def _sizes(self, model: ServedModel, tensors: Sequence[torch.Tensor]) -> tuple[int, int | None]:
        """Checks tensors against the entry.

        Returns:
            The number of rows, and the number of what calls in one batch have in common: the entry, whether
            members have their own rows, and the other sizes; (1, None) if the call runs alone.

        Raises:
            WidepackError: They do not match.
        """
        layout = model.layout
        key = (layout.number, model.kind, *(t.shape for t in tensors))
        if (seen := self._seen.get(key)) is not None:
            return seen
        stacked = model.kind == EACH
        per_member = [False] * len(tensors) if model.kind == ONE else layout.per_member(stacked)
        found: tuple[int, int | None] = (1, None)
        try:
            sizes = dict(layout.entry.tensor_calls.sizes(tensors, per_member))
        except NoRows as e:  # the model answers it alone, or refuses it
            sizes, found = {}, (int(e.letter != layout.batch), None)
        if layout.batch in sizes:
            rows = sizes.pop(layout.batch)
            alone = not rows or any(i.rows is None for i in layout.inputs)
            found = (rows, None if alone else self._number((layout.number, stacked, *sizes.items())))
        if len(self._seen) >= SEEN:
            self._seen.clear()
        self._seen[key] = found
        return found

    def _members(
        self, model: ServedModel, member: Value | None, request: InferRequest, rows: int
    ) -> Sequence[int] | None:
        """Returns the member of each row; None if all members answer. Raises: WidepackError."""
        if model.kind == ONE:
            return [model.member] * rows
        if member is None:
            return None
        shape = request.shapes[MEMBER]
        if shape != [rows]:
            raise RequestError(
                f"input member has the shape {shape}; it has one number or name for each row, [{rows}]"
            )
        return member_numbers(member, model.artifact.members, rows)


def _check_features(model: ServedModel, request: InferRequest) -> None:
    """Compares the names of features in a request with those of the artifact. Raises: RequestError."""
    for name, text in request.features.items():
        recorded = model.artifact.features.get(name)
        if recorded is None:
            raise RequestError(
                f"input {name}: the artifact records no names of features; leave out the parameter features"
            )
        try:
            given = names_in(text if isinstance(text, str) else "", "features")
        except UsageError as e:
            raise RequestError(f"input {name}: {e}") from None
        if given != [n.strip() for n in recorded]:
            raise RequestError(
                f"input {name}: its features are {some(n[:60] for n in recorded)}, in this order; the "
                f"request gives {some(n[:60] for n in given) or 'no text with names'}"
            )


def _check_binary(model: ServedModel, request: InferRequest, wanted: Wanted) -> None:
    """Checks that JSON, or the fields of a message, can carry the outputs that are not requested as bytes.

    Raises: RequestError.
    """
    binary = {o.name: o.binary for o in request.outputs}
    for one in wanted:
        if one.figure or one.leaf not in model.layout.only_binary or binary.get(one.name, request.binary):
            continue
        datatype = model.layout.outputs[one.leaf].datatype.name
        raise RequestError(
            f"output {one.name} is {datatype}, which only binary data can carry; request it with the "
            "parameter binary_data"
        )


def _why_no_member(model: ServedModel, unknown: Sequence[str]) -> str:
    if MEMBER not in unknown:
        return ""
    if model.layout.reason:
        return f". It takes no input member: {model.layout.reason[:200]}"
    return ". The input member is of the model of all members"


def described_inputs(model: ServedModel) -> list[Mapping[str, Any]]:
    """Returns the inputs of a model for its metadata."""
    front = [len(model.artifact.members)]
    rows: list[Mapping[str, Any]] = []
    for one in model.layout.inputs:
        stacked = model.kind == EACH or (one.state and model.kind != ONE)
        row: dict[str, Any] = {
            "name": one.name,
            "datatype": one.datatype.name,
            "shape": [*(front if stacked else []), *one.sizes],
        }
        if names := model.artifact.features.get(one.name):
            row["parameters"] = {FEATURES: text_of_names(names)}
        rows.append(row)
    return rows
