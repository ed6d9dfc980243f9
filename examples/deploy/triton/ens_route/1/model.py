"""A model of Triton's Python backend: loads an artifact, and answers each row by the member that it names.

`x` has one row for each answer, and `member` has the number of a member for each row, [rows, 1].
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton_python_backend_utils as pb_utils
from torch.utils.dlpack import from_dlpack, to_dlpack

import widepack


class TritonPythonModel:
    """What Triton starts. The inputs of the artifact and its output have the names of config.pbtxt."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the artifact that the parameter `artifact` of config.pbtxt names."""
        config = json.loads(args["model_config"])
        self._ens = widepack.load(config["parameters"]["artifact"]["string_value"])
        self._inputs = [i["name"] for i in config["input"] if i["name"] != "member"]
        self._output = config["output"][0]["name"]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers the requests of a batch in one call. A request that fails does so alone."""
        if len(requests) > 1:
            try:
                return self._answers(requests)
            except widepack.WidepackError:
                pass  # one of them is wrong: each runs alone
        return [self._alone(request) for request in requests]

    def finalize(self) -> None:
        """Releases the artifact."""
        self._ens.close()

    def _alone(self, request: Any) -> Any:
        try:
            return self._answers([request])[0]
        except widepack.WidepackError as e:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(e)))

    def _answers(self, requests: list[Any]) -> list[Any]:
        """Returns one response for each request. Raises: WidepackError if the call is refused."""
        members = [_tensor(r, "member").reshape(-1) for r in requests]
        inputs = {name: torch.cat([_tensor(r, name) for r in requests]) for name in self._inputs}
        answer = self._ens.route(**inputs, member=torch.cat(members))
        leaf = answer[self._output] if isinstance(answer, dict) else answer
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack(self._output, to_dlpack(part))])
            for part in leaf.split([len(m) for m in members])
        ]


def _tensor(request: Any, name: str) -> torch.Tensor:
    return from_dlpack(pb_utils.get_input_tensor_by_name(request, name).to_dlpack())
