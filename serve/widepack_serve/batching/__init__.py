"""Joins waiting requests into batches over all members of an artifact, and runs them.

There is one queue for each server, over all artifacts, members and entries. When nothing runs, a batch takes
what waits, up to the limit of rows: there is no timer. Clients and members take turns, and each gets at most
half of a batch while others wait. A call with more rows than a batch takes turns with the others, and all its
parts run on one version of the members. A call that fails in a batch fails alone.

| in | out | start reading |
|---|---|---|
| a checked `Call` | its outputs, or an error | `batcher.py` |

| file | what it does |
|---|---|
| `batcher.py` | Runs batches: on the thread of the event loop where they are short, else on a thread |
| `execution.py` | Runs one batch on its model, and gives each call its part |
| `fair_queue.py` | Holds waiting calls by member, and takes batches in turns |
| `job.py` | Defines a waiting call, and a part of its rows |
| `options.py` | Defines how batches are made, and who is told of them |
| `results.py` | Gives outputs and errors to those that wait for them |
| `shared_limit.py` | Divides a limit among clients |
| `timing.py` | Remembers how long batches take, to predict the next one |
"""
