"""The life of a server: load, warm up, serve, reload, swap members, drain.

| file | what it does |
|---|---|
| `documents.py` | Describes what a server serves and has done |
| `loading.py` | Loads artifacts and runs a first batch of each model |
| `reload.py` | Loads an artifact again when another one was published at its path |
| `service.py` | Answers requests, for REST and gRPC: the catalog, the batcher, the metrics |
| `swaps.py` | Replaces a member by a checkpoint of one folder |
| `time_limit.py` | Limits the time in which what a client sends must arrive |
| `tokens.py` | Checks the token of a request |
"""
