"""Make data of every group, encode Tinker's request, and write down what is in its bytes."""

import json
import sys
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from tinker.proto import tinker_public_pb2
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest
from tugline_tinker import make_data, make_datum

from tugline.errors import UsageError
from tugline.stream import GroupStream

with GroupStream("tinker", follow=False) as stream:
    groups = list(stream)
request = ForwardBackwardRequest(
    model_id="m",
    forward_backward_input=ForwardBackwardInput(
        data=make_data(groups), loss_fn="importance_sampling"
    ),
)
message = forward_backward_request_to_proto(request)
message = type(message).FromString(message.SerializeToString())
TYPES = {tinker_public_pb2.DTYPE_INT64: np.int64, tinker_public_pb2.DTYPE_FLOAT32: np.float32}
data = [
    {"input": np.frombuffer(one.model_input[0].encoded_text.tokens, np.int32).tolist()}
    | {
        name: np.frombuffer(tensor.dense, TYPES[tensor.dtype]).tolist()
        for name, tensor in one.loss_fn_inputs.items()
    }
    for one in message.data
]
sample = groups[0].samples[0]
refused = ""
try:
    make_datum(replace(sample, temperatures=sample.temperatures * np.float32(0.5)))
except UsageError as error:
    refused = str(error)
groups[0].__dict__["samples"] = [replace(sample, experts=np.zeros((1, 1, 1), np.uint8))]
try:
    make_data(groups)
except UsageError as error:
    refused += str(error)
assert len(make_data(groups, experts=False)) == 1
Path(sys.argv[1]).write_text(json.dumps({"data": data, "refused": refused}))
