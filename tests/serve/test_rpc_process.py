"""Tests `widepack serve --grpc-port`: the start, the end under load, and what is refused."""

from __future__ import annotations

import gc
import importlib.util
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import grpc
import pytest
import torch
from click.testing import CliRunner, Result
from command_server import command, command_server
from rpc_client import infer_message, tensors
from support import Artifacts

import widepack
from widepack_cli.main import cli
from widepack_serve.errors import AddressInUse
from widepack_serve.lifecycle.service import Service
from widepack_serve.rpc.messages import CLASSES
from widepack_serve.rpc.schema import SERVICE
from widepack_serve.rpc.server import RpcServer
from widepack_serve.server.run import listening, serve_here
from widepack_serve.settings import Settings

X = torch.ones(1, 64)


def serve(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["serve", *map(str, words)], prog_name="widepack")


@pytest.mark.extended
def test_the_end_of_a_server_fails_no_accepted_call(artifacts: Artifacts) -> None:
    """Calls after the end fail with UNAVAILABLE, and no call fails otherwise."""
    path = artifacts("mlp")
    expected = widepack.load(path)(X)
    data = infer_message("auto", ("input", X)).SerializeToString()
    answers: list[bytes] = []
    codes: list[grpc.StatusCode] = []

    def calls(address: str) -> None:
        with grpc.insecure_channel(address) as channel:
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            while True:
                try:
                    answers.append(infer(data, timeout=20))
                except grpc.RpcError as e:
                    codes.append(e.code())
                    return

    with command_server(path, "--grpc-port", "0", "--drain", "3") as server:
        threads = [threading.Thread(target=calls, args=(server.grpc,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.7)
        with grpc.insecure_channel(server.grpc) as channel:
            ready = channel.unary_unary(f"/{SERVICE}/ServerReady")
            assert CLASSES["ServerReadyResponse"].FromString(ready(b"")).ready
            server.process.send_signal(signal.SIGTERM)
            start = time.monotonic()
            while CLASSES["ServerReadyResponse"].FromString(ready(b"")).ready:
                assert time.monotonic() - start < 2
            before = len(answers)
            while len(answers) == before:  # it still answers
                assert time.monotonic() - start < 2.5 and not codes
                time.sleep(0.01)
        assert server.process.wait(20) == 0
        for thread in threads:
            thread.join(20)
    assert set(codes) == {grpc.StatusCode.UNAVAILABLE} and len(codes) == 3
    for answer in answers:
        (found,) = tensors(CLASSES["ModelInferResponse"].FromString(answer)).values()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.extended
def test_an_interrupt_ends_the_server_at_once(artifacts: Artifacts) -> None:
    with command_server(artifacts("mlp"), "--grpc-port", "0", "--drain", "60") as server:
        assert server.grpc.startswith("127.0.0.1:") and not server.grpc.endswith(":0")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("option", ["--grpc-port", "--port"])
def test_a_port_in_use_is_an_error(option: str, artifacts: Artifacts) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            command(artifacts("mlp"), "--port", "0", option, str(port)),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1  # the command line is right
    words = f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another {option} or --host"
    assert done.stderr == f"Error: {words}\n"


def test_a_port_that_is_taken_while_artifacts_load_is_an_error(artifacts: Artifacts) -> None:
    service = Service(Settings({"ens": str(artifacts("mlp"))}))
    with socket.socket() as taken, listening("127.0.0.1", 0) as listener:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started: list[int] = []
        with pytest.raises(AddressInUse, match=f"cannot listen on 127.0.0.1:{port} for gRPC; choose another"):
            serve_here(
                service, listener, lambda: started.append(1), None, RpcServer(service, "127.0.0.1", port)
            )
    gc.unfreeze()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert not started and service.batcher.idle


def test_several_processes_are_refused(artifacts: Artifacts) -> None:
    found = serve(artifacts("mlp"), "--grpc-port", "0", "--workers", "2")
    assert found.exit_code == 2
    assert "only one process can listen on the port of gRPC" in found.stderr


def test_without_the_packages_the_extra_is_named(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "grpc" else real(name))
    found = serve(artifacts("mlp"), "--grpc-port", "0")
    assert found.exit_code != 0
    assert "gRPC needs grpcio and protobuf: pip install 'widepack[serve,grpc]'" in found.stderr
