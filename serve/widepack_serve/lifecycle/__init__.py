"""The life of a server: load, warm up, serve, reload, swap members, drain.

| file | what it does |
|---|---|
| `collector.py` | Keeps the collector of garbage from what lives as long as the process |
| `desk.py` | Reads large requests and writes large answers on threads |
| `documents.py` | Describes what a server serves and has done |
| `loading.py` | Loads artifacts, at the start and again, and runs first calls of each entry |
| `receiving.py` | Limits the bytes of all bodies that have arrived and are not read |
| `sending.py` | Limits the bytes of all answers that clients have not read |
| `service.py` | Answers requests, for REST and gRPC: the catalog, the batcher, the metrics |
| `swaps.py` | Describes a swap, and finds its checkpoint in one folder |
| `threads.py` | Runs functions on threads that do not delay the end of the server |
| `time_limit.py` | Limits the time in which what a client sends must arrive |
| `tokens.py` | Checks the token of a request |
"""
