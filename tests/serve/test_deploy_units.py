"""Tests the unit of systemd and the files of Kubernetes and KServe in examples/deploy."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from deploy_files import DEPLOY, documents, last_stage, seconds_to_end, served

UNIT = (DEPLOY / "widepack-serve.service").read_text(encoding="utf-8")
STAGE = last_stage((DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
DEPLOYMENT, SERVICE = documents("kubernetes.yaml")
RUNTIME, INFERENCE = documents("kserve.yaml")
POD: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]
CONTAINERS: dict[str, dict[str, Any]] = {
    "kubernetes": POD["containers"][0],
    "kserve": RUNTIME["spec"]["containers"][0],
}


class Unit(configparser.ConfigParser):
    """A unit file. A key that occurs twice keeps its last value."""

    def __init__(self) -> None:
        super().__init__(strict=False, interpolation=None, delimiters=("=",))

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def service() -> configparser.SectionProxy:
    unit = Unit()
    unit.read_string(UNIT)
    return unit["Service"]


# ---------------------------------------------------------------- systemd


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "widepack-serve.service"
    program = Path(sys.executable).parent / "widepack"
    unit.write_text(UNIT.replace("/opt/widepack/bin/widepack", str(program)), encoding="utf-8")
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    unit.write_text(UNIT.replace("KillMode=mixed", "KillMode=mix"), encoding="utf-8")
    wrong = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, check=False)
    assert "kill mode" in wrong.stderr  # it reads the values


def test_the_unit_drains_reloads_and_has_no_rights() -> None:
    keys = service()
    words = shlex.split(keys["ExecStart"])
    assert words[:2] == ["/opt/widepack/bin/widepack", "serve"]
    assert served(words[2:])["host"] == "127.0.0.1"
    assert int(keys["TimeoutStopSec"].removesuffix("s")) > seconds_to_end(words[2:])
    assert keys["KillMode"] == "mixed"  # workers get SIGTERM once, from the first process
    assert keys["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert keys["DynamicUser"] == "yes" and keys["ProtectSystem"] == "strict"
    assert keys["NoNewPrivileges"] == "yes" and keys["CapabilityBoundingSet"] == ""
    assert keys["MemoryMax"] == "2G"
    assert "Environment=XDG_CACHE_HOME=%C/widepack\n" in UNIT and keys["CacheDirectory"] == "widepack"


# ---------------------------------------------------------------- Kubernetes


def test_kubernetes_accepts_the_files() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for document in (DEPLOYMENT, SERVICE):
        validate.validate(document, "1.30", strict=True)
    for container in CONTAINERS.values():
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "x"},
            "spec": {"containers": [container]},
        }
        validate.validate(pod, "1.30", strict=True)


def test_the_service_reaches_the_pods() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels == SERVICE["spec"]["selector"]
    port = SERVICE["spec"]["ports"][0]["targetPort"]
    assert {p["name"]: p["containerPort"] for p in CONTAINERS["kubernetes"]["ports"]}[port] == 8080
    scraped = DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]
    assert (scraped["prometheus.io/port"], scraped["prometheus.io/path"]) == ("8080", "/metrics")


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_pod_has_no_rights(name: str) -> None:
    container = CONTAINERS[name]
    security = {**(POD["securityContext"] if name == "kubernetes" else {}), **container["securityContext"]}
    assert security["runAsNonRoot"] is True and f"{security['runAsUser']}:" in STAGE.user
    assert security["readOnlyRootFilesystem"] is True and security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["resources"]["limits"] == container["resources"]["requests"]


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_pod_writes_only_where_a_volume_is(name: str) -> None:
    container = CONTAINERS[name]
    volumes = {v["name"]: v for v in (POD if name == "kubernetes" else RUNTIME["spec"])["volumes"]}
    mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
    assert all(m["name"] in volumes for m in mounts.values())
    written = {path for path, m in mounts.items() if not m.get("readOnly")}
    assert written == {STAGE.env["XDG_CACHE_HOME"], "/tmp"}
    assert all("emptyDir" in volumes[mounts[path]["name"]] for path in written)


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_pod_has_time_to_drain(name: str) -> None:
    pod = POD if name == "kubernetes" else INFERENCE["spec"]["predictor"]
    arguments = [w.replace("{{.Name}}", "ens") for w in CONTAINERS[name]["args"]]
    assert pod["terminationGracePeriodSeconds"] > seconds_to_end(arguments)
    assert pod["enableServiceLinks"] is False  # a Service must not set WIDEPACK_SERVE_PORT
    probe = CONTAINERS[name]["readinessProbe"]
    not_ready_s = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert served(arguments)["drain"] > not_ready_s


@pytest.mark.parametrize("name", CONTAINERS)
def test_threads_are_those_of_the_limit(name: str) -> None:
    (threads,) = CONTAINERS[name]["env"]
    assert threads["name"] == "OMP_NUM_THREADS"
    assert threads["valueFrom"] == {"resourceFieldRef": {"resource": "limits.cpu"}}


# ---------------------------------------------------------------- KServe


def test_kserve_finds_the_runtime_and_the_artifact() -> None:
    assert (RUNTIME["apiVersion"], RUNTIME["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    assert (INFERENCE["apiVersion"], INFERENCE["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert set(RUNTIME["spec"]) == {
        "supportedModelFormats",
        "protocolVersions",
        "annotations",
        "containers",
        "volumes",
    }
    assert RUNTIME["spec"]["protocolVersions"] == ["v2", "grpc-v2"]
    model = INFERENCE["spec"]["predictor"]["model"]
    assert model["modelFormat"]["name"] == RUNTIME["spec"]["supportedModelFormats"][0]["name"]
    assert model["runtime"] == RUNTIME["metadata"]["name"]
    assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]
    assert set(model) == {"modelFormat", "protocolVersion", "runtime", "storageUri"}
    container = CONTAINERS["kserve"]
    assert container["name"] == "kserve-container"
    options = served([w.replace("{{.Name}}", INFERENCE["metadata"]["name"]) for w in container["args"]])
    assert options["artifacts"] == ("ens=/mnt/models",)
    assert options["port"] == container["ports"][0]["containerPort"]


def test_the_images_are_those_that_the_dockerfile_names() -> None:
    tags = set(re.findall(r"--tag (\S+)", (DEPLOY / "Dockerfile").read_text(encoding="utf-8")))
    images = {c["image"] for c in CONTAINERS.values()}
    assert tags == images == {documents("compose.yaml")[0]["services"]["ens"]["image"]}
