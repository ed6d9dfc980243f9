"""The gRPC interface: the service `inference.GRPCInferenceService`, health and reflection. No other room
imports grpc or google.protobuf.

No code is generated: `schema.py` describes the messages, and their classes are made of it when the room is
imported, so that any version of protobuf does.

| file | what it does |
|---|---|
| `answer.py` | Writes the answer to an inference |
| `arrival.py` | Lets messages arrive in turn, and counts those that arrive slowly |
| `messages.py` | Makes the classes of the messages |
| `methods.py` | Answers the methods of the service |
| `packed.py` | Finds out how a message is packed |
| `raw_inputs.py` | Leaves the bytes of inputs where they are |
| `receive.py` | Reads a request for an inference |
| `schema.py` | Describes the messages and the methods |
| `server.py` | The server: opens the port, starts, ends |
| `standard.py` | Describes the services of gRPC itself: health and reflection |
| `status.py` | Translates errors of a request into status codes |
| `wire.py` | Counts the fields of a message before it is read |
"""
