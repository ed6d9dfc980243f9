"""The REST interface: an ASGI app on Starlette. No other room imports Starlette.

| file | what it does |
|---|---|
| `access.py` | Checks the token of each request |
| `app.py` | Makes the app: its routes, and its start and end |
| `inference.py` | Answers requests for inferences |
| `models.py` | Answers requests about one model: metadata, readiness, statistics, inferences |
| `receive.py` | Reads bodies within limits of size and time |
| `send.py` | Sends answers |
| `uploads.py` | Receives the checkpoint of a swap as a body, into a file |
"""
