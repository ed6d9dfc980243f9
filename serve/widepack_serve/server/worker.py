"""One of several processes: `python -m widepack_serve.server.worker DOCUMENT`. `Workers` starts it."""

from __future__ import annotations

import json
import os
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from widepack.errors import WidepackError

from ..lifecycle.service import Service
from ..lifecycle.swaps import SwapOrder
from ..settings import Settings
from .logs import set_up_logs
from .run import READY, end_on_signals, serve_here
from .swap_coordinator import received
from .swap_participant import SwapParticipant


def main(text: str) -> int:
    """Serves on the socket that the document names. Returns: the exit code."""
    end_on_signals()
    document = json.loads(text)
    options = document["options"]
    set_up_logs(as_json=options["json_log"])
    os.set_inheritable(document["coordinator"], False)
    coordinator = Connection(document["coordinator"])
    made = received(coordinator) or {"made": []}
    try:
        service = Service(Settings.from_json(document["settings"]))
        for order in made["made"]:
            service.swap_again(SwapOrder(**order))
    except WidepackError as e:
        print(f"Error: {e}", file=sys.stderr)
        return e.exit_code
    most = options["max_connections"]
    listener = socket.socket(fileno=document["socket"])
    participant = SwapParticipant(service, coordinator)

    def started() -> None:
        participant.start()
        (Path(document["ready"]) / f"{READY}{os.getpid()}").touch()

    serve_here(service, listener, started, most)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
