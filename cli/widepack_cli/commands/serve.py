"""`widepack serve`: answers inference requests over HTTP and gRPC, batched over all members."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from widepack.errors import Unavailable, UsageError

from ..shared.failures import Refusal
from ..shared.option_groups import GroupedCommand
from ..shared.options import example, weights_options

_PACKAGES = ("starlette", "uvicorn", "orjson", "prometheus_client", "httptools", "uvloop")
_RPC_PACKAGES = ("grpc", "google.protobuf")
_SHOWN = 600
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(us|ms|s|m)?\Z", re.ASCII)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}


def seconds(value: Any) -> float:
    """A click type: returns the seconds of `5s`, `200ms`, or a number of seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    found = _TIME.match(str(value).strip())
    if found is None:
        raise click.BadParameter(f"{value!r} is not a time, such as 5s or 200ms")
    return float(found[1]) * _UNITS[found[2] or "s"]


def size(value: Any) -> int:
    """A click type: returns the bytes of `64MB`, or a number of bytes."""
    from widepack.spec.config import parse_size

    try:
        return parse_size(value)
    except UsageError as e:
        raise click.BadParameter(str(e)) from None


def worker_count(value: Any) -> int:
    """A click type: returns a number of processes; 0 for `auto`."""
    if str(value) == "auto":
        return 0
    try:
        return int(click.IntRange(min=1).convert(value, None, None))
    except click.BadParameter as e:
        raise click.BadParameter(f"{e.message} Or auto.") from None


def _names(_ctx: click.Context, _param: click.Parameter, value: Any) -> tuple[str, ...]:
    """A click callback: reads `y.mean,y.std`."""
    words = value if isinstance(value, (list, tuple)) else (value or "").split(",")
    return tuple(w.strip() for w in words if str(w).strip())


GROUPS = {
    "Address": ("host", "port", "uds", "grpc_port"),
    "Requests and answers": ("tokenizer", "outputs", "of", "dim", "calibrated", "members"),
    "Batches": ("max_batch", "max_delay", "inline", "workers"),
    "Where it runs": ("threads", "device", "backend", "dtype", "memory", "weights", "max_error", "graph"),
    "Who may ask": ("cors", "token_file", "admin_token_file", "swap_from"),
    "Limits": (
        *("max_queue", "max_rows", "max_values", "max_answer", "max_sending", "send_timeout", "max_body"),
        *("max_receiving", "receive_timeout", "max_connections", "timeout"),
    ),
    "Start, reload and stop": ("check", "reload", "drain", "hang", "metrics_by_member", "json_log"),
}


@click.command(
    cls=GroupedCommand,
    groups=GROUPS,
    epilog=example(
        "widepack serve ens.wide",
        "widepack serve eu=eu.wide us=us.wide --port 9000 --outputs logits.mean,logits.std --of softmax",
        "widepack serve ens.wide --host 0.0.0.0 --token-file token --reload 2s",
        "widepack serve ens.wide --grpc-port 9000",
        "widepack serve ens.wide --check",
    ),
    context_settings={"auto_envvar_prefix": "WIDEPACK_SERVE"},
)
@click.argument("artifacts", metavar="[NAME=]ARTIFACT...", nargs=-1, required=True)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 for all."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="The port; 0 for a free one.",
)
@click.option(
    "--uds",
    type=click.Path(),
    metavar="PATH",
    help="Listen on a Unix socket at this path, in the place of --host and --port.",
)
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    help="Also answer gRPC on this port; 0 for a free one. Default: no gRPC.",
)
@click.option(
    "--outputs",
    callback=_names,
    metavar="NAMES",
    help="The outputs if a client requests none, separated by commas, such as "
    "logits.mean,logits.std. Default: the members' answers.",
)
@click.option(
    "--of",
    type=click.Choice(["softmax", "sigmoid", "probabilities"]),
    help="What figures such as logits.mean are computed of. Default: the answers themselves.",
)
@click.option(
    "--dim", type=int, default=-1, show_default=True, help="The dim of the classes in a member's answer."
)
@click.option(
    "--calibrated",
    is_flag=True,
    help="Apply the calibration that widepack evaluate --save recorded to figures, unless a request says "
    "calibrated: false.",
)
@click.option(
    "--members/--no-members",
    default=True,
    show_default=True,
    help="Whether each member is a model of its own, such as ens.fold3.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="The most rows of a batch. 1: no request shares a batch, so that its answer has always the "
    "same bits.",
)
@click.option(
    "--max-delay",
    type=seconds,
    metavar="TIME",
    default="0",
    show_default=True,
    help="For how long a batch that is not full waits for more requests.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="The most rows that wait. Requests beyond get 503, except for clients that have less than "
    "their share waiting. A request of more rows than a batch counts as one batch.",
)
@click.option(
    "--max-rows",
    type=click.IntRange(min=1),
    default=65536,
    show_default=True,
    help="The most rows of a request. Larger ones get 413.",
)
@click.option(
    "--max-values",
    type=click.IntRange(min=1),
    default=16777216,
    show_default=True,
    help="The most numbers of all inputs of a request. Larger ones get 413.",
)
@click.option(
    "--max-answer",
    type=size,
    metavar="SIZE",
    default="64MB",
    show_default=True,
    help="The most bytes of an answer. A request with a larger one gets 413.",
)
@click.option(
    "--max-sending",
    type=size,
    metavar="SIZE",
    help="The most bytes of all large answers that clients have not read. Beyond, the client that has most "
    "of them loses a connection. Default: twice --max-answer.",
)
@click.option(
    "--send-timeout",
    type=seconds,
    metavar="TIME",
    default="30s",
    show_default=True,
    help="In which time a client must read some of its answer. Then its connection is closed.",
)
@click.option(
    "--max-body",
    type=size,
    metavar="SIZE",
    default="64MB",
    show_default=True,
    help="The most bytes of a request, also once unpacked.",
)
@click.option(
    "--max-receiving",
    type=size,
    metavar="SIZE",
    help="The most bytes of all requests that have arrived and are not read. Beyond, those that go on get "
    "503, except for clients that have less than their share. Default: four times --max-body.",
)
@click.option(
    "--receive-timeout",
    type=seconds,
    metavar="TIME",
    default="60s",
    show_default=True,
    help="In which time the head of a request must arrive, and after it the body. Then the client gets 408.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="The most open connections, and the most calls of gRPC at once, which clients share. Others get "
    "503, or UNAVAILABLE.",
)
@click.option(
    "--timeout",
    type=seconds,
    metavar="TIME",
    default="30s",
    show_default=True,
    help="For how long a request waits for its batches. Then it gets 504.",
)
@click.option(
    "--inline",
    type=seconds,
    metavar="TIME",
    default="500us",
    show_default=True,
    help="Batches up to this time run on the thread of the event loop; 0 for none.",
)
@click.option(
    "--workers",
    type=worker_count,
    metavar="N|auto",
    default="1",
    show_default=True,
    help="Processes. Each loads the artifacts; mapped weights share memory. auto: one for each core that "
    "may be used, with one thread, or for --threads cores; one process on a GPU and with --grpc-port.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads inside an op. Default: torch's number.")
@click.option("--device", help="Where to run, for example cuda:0. Default: cpu.")
@click.option(
    "--backend",
    default="auto",
    show_default=True,
    help="What runs the programs: auto, eager, compile, aot, onnxruntime.",
)
@click.option("--dtype", help="Another dtype of the weights, for example bf16.")
@click.option(
    "--memory",
    type=click.Choice(["auto", "least", "most"]),
    default="auto",
    show_default=True,
    help="Whether whole weights of a fleet's members are computed: if a call is faster with them (auto), "
    "never (least), or at the load (most).",
)
@weights_options
@click.option(
    "--graph",
    type=click.Choice(["auto", "on", "off"]),
    default="off",
    show_default=True,
    help="Whether batches run by CUDA graphs: always where a graph can (on, which needs a GPU), where a "
    "graph is measured to be faster (auto), or never (off).",
)
@click.option(
    "--token-file",
    type=click.Path(),
    help="A file with a token. Requests need the header (gRPC: metadata) Authorization: Bearer TOKEN, "
    "except those of /v2/health.",
)
@click.option("--admin-token-file", type=click.Path(), help="A file with the token for swaps of members.")
@click.option(
    "--swap-from",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="The only folder of checkpoints that swaps may name. Without it a swap sends its checkpoint.",
)
@click.option(
    "--tokenizer",
    type=click.Path(),
    metavar="FOLDER",
    help="A tokenizer of transformers. Requests may then have the input `text` (BYTES), of which it makes "
    "input_ids, attention_mask and other inputs of the model.",
)
@click.option(
    "--cors",
    callback=_names,
    metavar="ORIGINS",
    help="Origins whose pages may call the server from a browser, separated by commas, such as "
    "https://app.example.org; * for any.",
)
@click.option(
    "--reload",
    type=seconds,
    metavar="TIME",
    default="0",
    show_default=True,
    help="How often to look for a new artifact at each path; 0 for never. SIGHUP looks at once.",
)
@click.option(
    "--drain",
    type=seconds,
    metavar="TIME",
    default="5s",
    show_default=True,
    help="For how long the server still answers after SIGTERM, while it says that it is not ready.",
)
@click.option(
    "--hang",
    type=seconds,
    metavar="TIME",
    default="60s",
    show_default=True,
    help="After this time without progress the server says that it is not alive.",
)
@click.option(
    "--metrics-by-member/--no-metrics-by-member",
    default=None,
    help="Whether members are labels of metrics. Default: if there are at most 100.",
)
@click.option("--json-log", is_flag=True, help="Write log lines as JSON.")
@click.option("--check", is_flag=True, help="Load, run one request of each model, list the models, and exit.")
def command(artifacts: tuple[str, ...], **options: Any) -> None:
    """Serve artifacts over HTTP and gRPC with the Open Inference Protocol, version 2.

    ARTIFACT is served as the model NAME (default: the name of its folder) for all members, NAME.MEMBER for
    each member, and NAME.ENTRY for other entries. Requests of all members share batches. The input `member`
    chooses a member for each row. GET /v2/models/NAME describes a model, and GET /metrics has metrics for
    Prometheus.

    Options can also be environment variables, such as WIDEPACK_SERVE_PORT, or keys of the table [serve] in
    widepack.toml in the working folder. The command line goes first, then the environment, then the file.
    """
    _require_packages()
    _require_temporary_folder()
    options = {**options, **_of_toml(set(options))}
    from widepack_serve.settings import named_artifacts

    paths = named_artifacts(list(artifacts))
    host, port, uds = options.pop("host"), options.pop("port"), options.pop("uds")
    grpc_port, workers = options.pop("grpc_port"), options.pop("workers")
    if uds is not None:
        _refuse_address()
    if not workers:
        one = grpc_port is not None or (options["device"] or "cpu") != "cpu"
        workers, options["threads"] = (1, options["threads"]) if one else _by_cores(options["threads"])
    max_connections, json_log = options.pop("max_connections"), options.pop("json_log")
    only_check = options.pop("check")
    options["graph"] = {"on": True, "off": False}.get(options["graph"], "auto")
    if grpc_port is not None:
        _require_rpc(grpc_port, workers)
    from widepack_serve.server.logs import set_up_logs
    from widepack_serve.settings import Settings

    set_up_logs(as_json=json_log)
    settings = Settings({name: str(Path(path).absolute()) for name, path in paths.items()}, **options)
    if only_check:
        _check(settings)
        return
    _serve(settings, host, port, uds, workers, max_connections, json_log, grpc_port)


def _refuse_address() -> None:
    """Raises: Refusal if the command line has another address beside --uds."""
    context = click.get_current_context()
    given = [n for n in ("host", "port") if context.get_parameter_source(n) == ParameterSource.COMMANDLINE]
    if given and not (given == ["host"] and context.params["grpc_port"] is not None):
        raise Refusal(f"--uds with --{given[0]}: the server listens on one of them; leave one out")


def _by_cores(threads: int | None) -> tuple[int, int]:
    """Returns how many processes fill the cores that this one may use, and the threads of each."""
    from widepack.system.cores import usable_cores

    return max(usable_cores() // (threads or 1), 1), threads or 1


def _require_packages() -> None:
    """Raises: Unavailable without the packages of the extra."""
    from importlib.util import find_spec

    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise Unavailable(f"serving needs {', '.join(missing)}: pip install 'widepack[serve]'")


def _require_rpc(port: int, workers: int) -> None:
    """Raises: Unavailable without the packages of the extra; Refusal with several processes."""
    from importlib.util import find_spec

    if any(find_spec(name.partition(".")[0]) is None or find_spec(name) is None for name in _RPC_PACKAGES):
        raise Unavailable("gRPC needs grpcio and protobuf: pip install 'widepack[serve,grpc]'")
    if workers > 1:
        raise Refusal(
            f"--grpc-port {port} with --workers {workers}: only one process can listen on the port of gRPC; "
            "start one server with --workers 1 for each port, or use HTTP"
        )


def _require_temporary_folder() -> None:
    """Raises: Refusal if no temporary folder can be written, which torch needs."""
    import tempfile

    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise Refusal(
            "there is no temporary folder that can be written, and torch needs one: name one in TMPDIR, or "
            "mount one at /tmp"
        ) from None


def _of_toml(known: set[str]) -> dict[str, Any]:
    """Returns the options of the table [serve] that neither the command line nor the environment has."""
    from widepack.spec.config import SERVE_TABLE, read_table

    found = read_table(Path(), SERVE_TABLE)
    context = click.get_current_context()
    options: dict[str, Any] = {}
    parameters = {p.name: p for p in context.command.params}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in known:
            raise Refusal(
                f"widepack.toml: [serve] has no key {key!r}; its keys are the options of widepack serve"
            )
        if context.get_parameter_source(name) == ParameterSource.DEFAULT:
            options[name] = parameters[name].process_value(context, value)
    return options


def _check(settings: Any) -> None:
    from widepack_serve.lifecycle.service import Service
    from widepack_serve.server.check import check

    for line in check(Service(settings)):
        click.echo(line)


def _serve(
    settings: Any,
    host: str,
    port: int,
    uds: str | None,
    workers: int,
    max_connections: int,
    json_log: bool,
    grpc_port: int | None,
) -> None:
    from widepack_serve.server.run import (
        Workers,
        address_of,
        end_on_signals,
        listening,
        listening_at,
        serve_here,
    )

    if grpc_port is not None:
        # An error before the artifacts are loaded. gRPC opens the port itself, afterwards.
        listening(host, grpc_port, "--grpc-port").close()
    with contextlib.ExitStack() as at_end:
        if uds is None:
            listener = at_end.enter_context(listening(host, port, shared=workers > 1))
        else:
            listener = at_end.enter_context(listening_at(uds))
            at_end.callback(Path(uds).unlink, missing_ok=True)
        address = address_of(listener)
        names = ", ".join(settings.artifacts)
        if workers > 1:
            options = {"max_connections": max_connections, "json_log": json_log}
            code = Workers(settings, listener, workers, options).run(
                lambda: click.echo(f"serving {names} on {address} with {workers} processes", err=True)
            )
            sys.exit(code)
        end_on_signals()
        from widepack_serve.lifecycle.service import Service  # imports torch
        from widepack_serve.server.check import curl

        service = Service(settings)
        line = curl(address, next(iter(service.catalog)))  # a catalog has at least one model
        example_line = f"; try: {line}" if len(line) <= _SHOWN else ""
        rpc = None
        if grpc_port is not None:
            from widepack_serve.rpc.server import RpcServer

            rpc = RpcServer(service, host if uds else listener.getsockname()[0], grpc_port, max_connections)
        serve_here(
            service,
            listener,
            lambda: click.echo(
                f"serving {names} on {address}{'' if rpc is None else f' and gRPC on {rpc.address}'}"
                f"{example_line}",
                err=True,
            ),
            max_connections,
            rpc,
            at_end.close,
        )
