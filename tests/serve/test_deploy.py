"""Tests the Dockerfile and compose.yaml of examples/deploy: what they say, and that their commands run as a
user without rights where all folders are read-only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deploy_files import DEPLOY, documents, instructions, last_stage, seconds_to_end, served
from loaded import save_members
from torch import nn

import widepack

DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
STAGE = last_stage(DOCKERFILE)
ENS = documents("compose.yaml")[0]["services"]["ens"]
LIMIT_S = 60

READ_ONLY = r"""
set -e
mount -o remount,bind,ro /
mount -t tmpfs -o mode=0700,uid=65532,gid=65532 tmpfs "$1"
shift
exec setpriv --reuid=65532 --regid=65532 --clear-groups --no-new-privs \
    --bounding-set=-all --inh-caps=-all "$@"
"""
"""Makes all folders read-only except one, and runs a command as the user of the image."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(x)}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Yields a folder that every user can read, with the artifact ens.wide, compiled/ and cache/.

    `tmp_path` is of one user only.
    """
    with tempfile.TemporaryDirectory(prefix="widepack-deploy-") as name:
        path = Path(name)
        widepack.build(
            save_members(Net, path), path / "ens.wide", model=Net, inputs=["x=float32[B,64]"], budget=0
        )
        for made in ("compiled", "cache"):
            (path / made).mkdir()
        subprocess.run(["chmod", "-R", "a+rX", path], check=True)  # as the Dockerfile does
        yield path


def placed(word: str, folder: Path) -> str:
    """Returns a word of the Dockerfile with the paths of this machine."""
    for there, here in {
        "/opt/widepack/bin": str(Path(sys.executable).parent),
        "/models/ens.wide": str(folder / "ens.wide"),
        "/compiled": str(folder / "compiled"),
        "/cache": str(folder / "cache"),
    }.items():
        word = word.replace(there, here)
    return word


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of a container, which has no HOME. It listens on a free port of loopback.

    The writable folder `cache` is that of /cache and that of /tmp.
    """
    env = {k: placed(v, folder).replace("${PATH}", os.defpath) for k, v in STAGE.env.items()}
    env |= {"WIDEPACK_SERVE_HOST": "127.0.0.1", "WIDEPACK_SERVE_PORT": "0"}
    return {**env, "TMPDIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}


def contained(folder: Path, *words: str) -> list[str]:
    """Returns a command line that runs a command as in a container."""
    unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY, "sh"]
    return [*unshare, str(folder / "cache"), *(placed(w, folder) for w in words)]


@pytest.fixture
def container(folder: Path) -> Path:
    """Skips where this user may not make a mount namespace, or another user cannot read the packages."""
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        pytest.skip("needs root, unshare and setpriv")
    tried = subprocess.run(
        contained(folder, sys.executable, "-c", "import widepack_serve, widepack_cli"),
        env=environment(folder),
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip(f"a user without rights cannot run widepack here: {tried.stderr[-300:]}")
    return folder


def test_the_image_has_no_compiler_and_runs_as_a_number() -> None:
    stages = [rest for name, rest in instructions(DOCKERFILE) if name == "FROM"]
    assert [s.split(" AS ")[1] for s in stages[:-1]] == ["packages", "uncompiled", "compiled", "programs"]
    assert stages[-1] == "python:${PYTHON}-slim"
    assert "g++" in DOCKERFILE and not any(o.startswith("RUN") for o in STAGE.others)
    assert STAGE.user == "65532:65532"
    assert "HEALTHCHECK" in DOCKERFILE and "curl" not in STAGE.health
    assert STAGE.entrypoint == ["widepack", "serve"]
    targets = {words[-1] for words in STAGE.copied}
    assert targets == {"/opt/widepack", "/compiled", "/models/ens.wide"}
    assert STAGE.env["WIDEPACK_CACHE"] in targets
    assert STAGE.env["PATH"].split(":")[0] == "/opt/widepack/bin"
    ignored = (DEPLOY / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert ignored[1:3] == ["*", "!ens.wide"]


def test_the_arguments_of_the_image_are_those_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STAGE.env.items():
        if name.startswith("WIDEPACK_SERVE_"):
            monkeypatch.setenv(name, value)
    options = served(STAGE.arguments)
    assert (options["host"], options["port"]) == ("0.0.0.0", 8080)
    assert options["artifacts"] == ("ens=/models/ens.wide",)


def test_compose_takes_rights_away_and_waits_for_the_drain() -> None:
    assert ENS["read_only"] is True and ENS["cap_drop"] == ["ALL"] and ENS["init"] is True
    assert ENS["security_opt"] == ["no-new-privileges:true"]
    assert {entry.split(":")[0] for entry in ENS["tmpfs"]} == {"/cache", "/tmp"}
    assert "mem_limit" in ENS and int(ENS["environment"]["OMP_NUM_THREADS"]) == ENS["cpus"]
    assert ENS["ports"] == ["127.0.0.1:8080:8080"]
    assert ENS["healthcheck"]["test"] == ["CMD", *STAGE.health]
    assert int(ENS["stop_grace_period"].removesuffix("s")) > seconds_to_end(ENS["command"])


def test_compose_is_read_by_docker_compose() -> None:
    program = shutil.which("docker-compose")
    words = [program] if program else ["docker", "compose"]
    if not program:
        docker = shutil.which("docker")
        if not docker or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
            pytest.skip("needs Docker Compose")
    done = subprocess.run(
        [*words, "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
def test_the_commands_of_the_image_run_read_only_and_without_rights(container: Path) -> None:
    process = subprocess.Popen(
        contained(container, *STAGE.entrypoint, *STAGE.arguments, "--drain", "0"),
        env=environment(container),
        cwd="/",
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = []
        while "serving ens on " not in (line := process.stderr.readline()):
            lines.append(line)
            assert line, f"the server ended: {''.join(lines)}"
        assert lines == []  # no warning
        address = line.split("serving ens on ")[1].split(";")[0].strip()
        user = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        assert "Uid:\t65532" in user and "NoNewPrivs:\t1" in user and "CapEff:\t0000000000000000" in user

        port = address.rsplit(":", 1)[1]
        health = [w.replace("8080", port) for w in STAGE.health]
        assert subprocess.run(contained(container, *health), env=environment(container)).returncode == 0
        for path in probed_paths():
            with urllib.request.urlopen(f"{address}{path}", timeout=LIMIT_S) as answer:
                assert answer.status == 200
        x = torch.randn(1, 64)
        body = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": x.reshape(-1).tolist()}
        request = urllib.request.Request(
            f"{address}/v2/models/ens/infer", json.dumps({"inputs": [body]}).encode()
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            logits = json.load(answer)["outputs"][0]
        assert logits["shape"] == [4, 1, 10]
        alone = widepack.load(container / "ens.wide")(x)["logits"]
        torch.testing.assert_close(torch.tensor(logits["data"]).reshape(4, 1, 10), alone)

        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
        assert subprocess.run(contained(container, *health), env=environment(container)).returncode != 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.extended
def test_a_container_without_a_cache_loads_too(container: Path) -> None:
    """The root folder is read-only, and XDG_CACHE_HOME cannot be made."""
    env = {**environment(container), "XDG_CACHE_HOME": "/cache-that-cannot-be-made"}
    done = subprocess.run(
        contained(container, *STAGE.entrypoint, *STAGE.arguments, "--check"),
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ens: x FP32[?,64] -> logits FP32[4,?,10]\n")


def probed_paths() -> set[str]:
    """Returns the paths of the probes and metrics in the files of Kubernetes and KServe."""
    paths = {"/metrics"}
    for name in ("kubernetes.yaml", "kserve.yaml"):
        first = documents(name)[0]
        spec = first["spec"]["template"]["spec"] if first["kind"] == "Deployment" else first["spec"]
        container = spec["containers"][0]
        probes = [
            container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")
        ]
        assert probes == ["/v2/health/ready", "/v2/health/ready", "/v2/health/live"]
        paths.update(probes)
    return paths
