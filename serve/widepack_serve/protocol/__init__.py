"""The Open Inference Protocol, version 2: bytes become tensors, and tensors become bytes.

| in | out | start reading |
|---|---|---|
| the body of a request | `InferRequest` with tensors | `request.py` |
| tensors | the body of an answer | `response.py` |

| file | what it does |
|---|---|
| `body.py` | Unpacks the body of a request: gzip and deflate within a limit |
| `datatypes.py` | The datatypes of the protocol, and torch's dtypes |
| `growing.py` | Joins pieces of a body, in memory of its own |
| `json_data.py` | Finds the lists of numbers in a large JSON text, without reading them |
| `json_numbers.py` | Reads and writes long lists of numbers in pieces |
| `parameters.py` | Reads parameters, and refuses those that would have no effect |
| `request.py` | Reads a request for an inference: JSON, and binary tensors after it |
| `response.py` | Writes the answer to an inference |
| `shortest.py` | Finds the shortest decimal numbers that read back as the same numbers |
| `shown.py` | Shows values of a client in messages |
| `tensors.py` | Converts tensors from and to the forms of the protocol |
| `work.py` | Work in steps, which can be ended |
"""
