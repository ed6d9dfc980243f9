"""Describes the service `inference.GRPCInferenceService`: the methods and messages of the Open Inference
Protocol, version 2, and of three extensions of Triton: the configuration of models, the index of the
repository, and statistics.

A field is written as in a .proto file. Names, numbers and types are those of the published protocol, so that
its generated clients can talk to this server. Fields that this server neither reads nor writes are left out;
a message with them can still be read.
"""

from __future__ import annotations

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

METHODS = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "ModelConfig",
    "RepositoryIndex",
    "ModelStatistics",
)
"""The methods. `NAME` takes the message `NAMERequest` and answers with `NAMEResponse`."""

_MODEL = ("string name = 1", "string version = 2")
_PARAMETERS = "map<string, InferParameter> parameters"

MESSAGES: dict[str, tuple[str, ...]] = {
    # -------------------------------------------------------------- health
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("bool live = 1",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("bool ready = 1",),
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": ("bool ready = 1",),
    # -------------------------------------------------------------- metadata
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ("string name = 1", "string version = 2", "repeated string extensions = 3"),
    "ModelMetadataRequest": _MODEL,
    "ModelMetadataResponse": (
        "string name = 1",
        "repeated string versions = 2",
        "string platform = 3",
        "repeated TensorMetadata inputs = 4",
        "repeated TensorMetadata outputs = 5",
    ),
    "ModelMetadataResponse.TensorMetadata": (
        "string name = 1",
        "string datatype = 2",
        "repeated int64 shape = 3",
    ),
    # -------------------------------------------------------------- inferences
    "ModelInferRequest": (
        "string model_name = 1",
        "string model_version = 2",
        "string id = 3",
        f"{_PARAMETERS} = 4",
        "repeated InferInputTensor inputs = 5",
        "repeated InferRequestedOutputTensor outputs = 6",
        "repeated bytes raw_input_contents = 7",
    ),
    "ModelInferRequest.InferInputTensor": (
        "string name = 1",
        "string datatype = 2",
        "repeated int64 shape = 3",
        f"{_PARAMETERS} = 4",
        "InferTensorContents contents = 5",
    ),
    "ModelInferRequest.InferRequestedOutputTensor": ("string name = 1", f"{_PARAMETERS} = 2"),
    "ModelInferResponse": (
        "string model_name = 1",
        "string model_version = 2",
        "string id = 3",
        f"{_PARAMETERS} = 4",
        "repeated InferOutputTensor outputs = 5",
        "repeated bytes raw_output_contents = 6",
    ),
    "ModelInferResponse.InferOutputTensor": (
        "string name = 1",
        "string datatype = 2",
        "repeated int64 shape = 3",
        f"{_PARAMETERS} = 4",
        "InferTensorContents contents = 5",
    ),
    "InferParameter": (
        "oneof parameter_choice: bool bool_param = 1",
        "oneof parameter_choice: int64 int64_param = 2",
        "oneof parameter_choice: string string_param = 3",
        "oneof parameter_choice: double double_param = 4",
        "oneof parameter_choice: uint64 uint64_param = 5",
    ),
    "InferTensorContents": (
        "repeated bool bool_contents = 1",
        "repeated int32 int_contents = 2",
        "repeated int64 int64_contents = 3",
        "repeated uint32 uint_contents = 4",
        "repeated uint64 uint64_contents = 5",
        "repeated float fp32_contents = 6",
        "repeated double fp64_contents = 7",
        "repeated bytes bytes_contents = 8",
    ),
    # -------------------------------------------------------------- extensions
    "ModelConfigRequest": _MODEL,
    "ModelConfigResponse": ("ModelConfig config = 1",),
    "ModelConfig": (
        "string name = 1",
        "string platform = 2",
        "string backend = 17",
        "int32 max_batch_size = 4",
        "repeated ModelInput input = 5",
        "repeated ModelOutput output = 6",
    ),
    "ModelInput": ("string name = 1", "DataType data_type = 2", "repeated int64 dims = 4"),
    "ModelOutput": ("string name = 1", "DataType data_type = 2", "repeated int64 dims = 3"),
    "RepositoryIndexRequest": ("string repository_name = 1", "bool ready = 2"),
    "RepositoryIndexResponse": ("repeated ModelIndex models = 1",),
    "RepositoryIndexResponse.ModelIndex": (
        "string name = 1",
        "string version = 2",
        "string state = 3",
        "string reason = 4",
    ),
    "ModelStatisticsRequest": _MODEL,
    "ModelStatisticsResponse": ("repeated ModelStatistics model_stats = 1",),
    "ModelStatistics": (
        "string name = 1",
        "string version = 2",
        "uint64 last_inference = 3",
        "uint64 inference_count = 4",
        "uint64 execution_count = 5",
        "InferStatistics inference_stats = 6",
    ),
    "InferStatistics": (
        "StatisticDuration success = 1",
        "StatisticDuration fail = 2",
        "StatisticDuration queue = 3",
    ),
    "StatisticDuration": ("uint64 count = 1", "uint64 ns = 2"),
}
"""The fields of each message. `OUTER.NAME` is a message that is defined in another one."""

_TYPES = "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"
ENUMS: dict[str, list[str]] = {"DataType": [f"TYPE_{name}" for name in _TYPES.split()]}
"""The names of each enumeration, numbered from 0."""
