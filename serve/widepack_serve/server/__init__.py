"""Runs the app in processes of its own, with uvicorn: `widepack serve`.

| file | what it does |
|---|---|
| `check.py` | Runs one request of each kind without a socket: `widepack serve --check` |
| `connections.py` | Counts connections, and divides their limit among clients |
| `http_protocol.py` | Limits connections, and the time in which the head of a request must arrive |
| `logs.py` | Formats log lines, as text or JSON |
| `listener.py` | Closes a listening socket without losing a connection that a client has opened |
| `run.py` | Opens the socket, and runs one process or several |
| `swap_coordinator.py` | Replaces a member in all processes or in none: the part of the first process |
| `swap_participant.py` | The same: the part of the others |
| `uvicorn_server.py` | A uvicorn server that drains after SIGTERM and reloads after SIGHUP |
| `worker.py` | One of several processes |
"""
