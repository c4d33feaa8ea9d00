"""What `deploy/` says is what kvpool understands: each command line, setting, port and path."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
import yaml

from kvpool import config, registry
from kvpool.cli import run as commands
from kvpool.cli import shared
from kvpool.cli.app import app
from kvpool.config import Config, check_bind, parse_transport
from kvpool.units import parse_size

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
POD_IP = "10.1.2.3"


def settings_of(
    words: list[str], environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> Config:
    """What the command `kvpool *words` would run with: its own parser, its own settings."""
    seen: list[Config] = []

    def load(*args: Any) -> Config:
        seen.append(config.load(args[0], environment, args[2]))
        return seen[-1]

    def stop(main: Coroutine[Any, Any, object], *_: object) -> NoReturn:
        main.close()
        raise typer.Exit(0)

    monkeypatch.setattr(shared, "load", load)
    monkeypatch.setattr(commands, "run", stop)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    group = typer.main.get_command(app)
    group.main(words, standalone_mode=False)
    (found,) = seen
    return found


def check(found: Config) -> None:
    """What a master or server looks at before it listens, without listening."""
    asked = bool(found.secret_file)
    check_bind(found.master.bind, found.master.insecure or asked)
    for page in filter(None, (found.master.http, found.server.http)):
        check_bind(page, asked)
    transports = registry.installed(registry.TRANSPORTS)
    for address in (parse_transport(text).address for text in found.server.listen):
        scheme, _, rest = address.partition("://")
        assert scheme in transports, address
        if rest:
            check_bind(address, found.server.insecure or (asked and scheme != "ucx"))


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def ports(found: Config) -> dict[str, int]:
    """Of a server, by scheme."""
    addresses = (parse_transport(text).address for text in found.server.listen)
    listen = (address.partition("://") for address in addresses)
    return {scheme: port(rest) for scheme, _, rest in listen if rest}


def ucx_settings(specs: list[str]) -> dict[str, str]:
    """Of the transport ucx among these."""
    (spec,) = (one for one in map(parse_transport, specs) if one.scheme == "ucx")
    return spec.settings


# --- systemd -------------------------------------------------------------------------------


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """A unit file: section, setting, values."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            section.setdefault(name, []).append(value)
    return sections


def environment_of(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
@pytest.mark.parametrize("several", [False, True], ids=["one host", "several hosts"])
def test_units_run_what_kvpool_understands(
    path: Path, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = unit(path)["Service"]
    program, *words = shlex.split(service["ExecStart"][0])
    assert Path(program).name == "kvpool"
    environment = dict(line.split("=", 1) for line in service["Environment"])
    assert environment["KVPOOL_CONFIG"] == "/etc/kvpool/pool.yaml"
    environment["KVPOOL_CONFIG"] = str(DEPLOY / "systemd/pool.yaml")
    assert service["EnvironmentFile"] == ["-/etc/kvpool/env"]
    if several:
        environment |= environment_of(DEPLOY / "systemd/env.example")
    found = settings_of(words, environment, monkeypatch)
    check(found)
    assert found.server.insecure is bool(found.secret_file) is several
    assert not found.master.insecure
    assert (port(found.master.http), port(found.server.http)) == (7452, 7453)
    assert found.master.bind in found.server.masters
    assert found.server.masters == found.client.masters
    assert ports(found) == {"tcp": 7460, "ucx": 7461}


def test_units_are_hardened_and_can_pin_memory() -> None:
    for path in UNITS:
        service = unit(path)["Service"]
        assert service["User"] == ["kvpool"], path
        for setting in ("NoNewPrivileges", "ProtectHome", "RestrictNamespaces", "LockPersonality"):
            assert service[setting] == ["yes"], (path, setting)
        assert service["ProtectSystem"] == ["strict"]
        assert service["CapabilityBoundingSet"] == [""]
    server = unit(DEPLOY / "systemd/kvpool-server.service")["Service"]
    assert server["LimitMEMLOCK"] == ["infinity"]
    assert "PrivateNetwork" not in server  # shm
    assert "PrivateDevices" not in server  # RDMA


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_understands_the_units(path: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: units are checked by kvpool's parsers only")
    # It looks for the program, and for the user that runs it.
    text = path.read_text().replace("/opt/kvpool/bin/kvpool", "/bin/true")
    for name in (path.name, "kvpool-master.service"):
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", tmp_path / path.name],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    said = done.stdout + done.stderr
    if "Failed to" in said and path.name not in said:
        pytest.skip(f"systemd-analyze does not work here: {said.splitlines()[0]}")
    complaints = [line for line in said.splitlines() if path.name in line or "Unknown" in line]
    assert not complaints, said


# --- docker --------------------------------------------------------------------------------


def compose(environment: Mapping[str, str]) -> dict[str, Any]:
    """The compose file with its variables filled in."""

    def fill(found: re.Match[str]) -> str:
        return environment.get(found[1], found[2])

    text = (DEPLOY / "docker/compose.yaml").read_text()
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", fill, text)
    assert "${" not in text
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


HOST = {
    "KVPOOL_ADDRESS": "10.0.0.1",
    "KVPOOL_MASTERS": "10.0.0.1:7450,10.0.0.2:7450",
    "KVPOOL_CAPACITY": "64GiB",
    "KVPOOL_LISTEN": "shm://,ucx://10.0.0.1:7461?tls=rc,self,tcp://10.0.0.1:7460",
    "KVPOOL_SECRET": "/etc/kvpool/secret",
    "KVPOOL_SECRET_FILE": "/run/secrets/kvpool",
    "KVPOOL_INSECURE": "yes",
}


@pytest.mark.parametrize("environment", [{}, HOST], ids=["loopback", "several hosts"])
@pytest.mark.parametrize("name", ["master", "server"])
def test_compose_runs_what_kvpool_understands(
    name: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = compose(environment)
    service = loaded["services"][name]
    assert service["network_mode"] == "host"
    assert service["command"][0] == name
    told = service.get("environment", {})
    assert all(isinstance(value, str) for value in told.values())
    found = settings_of(service["command"], told, monkeypatch)
    check(found)
    if name == "server":
        assert ports(found) == {"tcp": 7460, "ucx": 7461}
        assert service["ulimits"]["memlock"] == -1
        assert ucx_settings(found.server.listen) == ({"tls": "rc,self"} if environment else {})
        assert f"'http://{found.server.http}/ready'" in service["healthcheck"]["test"][-1]
    else:
        assert f"'http://{found.master.http}/health'" in service["healthcheck"]["test"][-1]
    (mount,) = service["volumes"]
    assert mount.split(":")[1] == (found.secret_file or "/run/secrets/kvpool")


def test_nobody_listens_beyond_loopback_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address and a secret are not enough: that UCX does not ask for it must be said, too."""
    service = compose({**HOST, "KVPOOL_INSECURE": "no"})["services"]["server"]
    found = settings_of(service["command"], service["environment"], monkeypatch)
    with pytest.raises(config.ConfigError, match="--insecure"):
        check(found)


def test_the_image_has_all_that_is_packaged() -> None:
    lines = (DEPLOY / "docker/Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    project = (ROOT / "pyproject.toml").read_text()
    wheel = project.partition("[tool.hatch.build.targets.wheel]")[2].partition("\n\n")[0]
    for package in re.findall(r'"([\w/]+)"', wheel):
        assert package.partition("/")[0] in copied, package
    assert "ENTRYPOINT" in lines[-1]
    assert '["kvpool"]' in lines[-1]


# --- Kubernetes ----------------------------------------------------------------------------


def manifests() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            assert {"apiVersion", "kind"} <= set(document), path
            yield document


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [document for document in manifests() if document["kind"] == kind]
    return found


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def pod_settings(
    workload: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Config:
    """What the only container of a workload would run with."""
    one = container(workload)
    fields = {"status.podIP": POD_IP, "spec.nodeName": "node-7", "metadata.name": "engine-1"}
    environment = {
        variable["name"]: variable.get("value")
        or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        for variable in one["env"]
    }
    (mount,) = [m for m in one["volumeMounts"] if m["name"] == "config"]
    assert environment["KVPOOL_CONFIG"] == f"{mount['mountPath']}/pool.yaml"
    (volume,) = [
        v for v in workload["spec"]["template"]["spec"]["volumes"] if v["name"] == "config"
    ]
    assert volume["configMap"]["name"] == of_kind("ConfigMap")["metadata"]["name"]
    file = tmp_path / "pool.yaml"
    file.write_text(of_kind("ConfigMap")["data"]["pool.yaml"])
    environment["KVPOOL_CONFIG"] = str(file)
    words = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], word) for word in one["args"]]
    ours = {name: value for name, value in environment.items() if name.startswith("KVPOOL_")}
    return settings_of(words, ours, monkeypatch)


def test_a_master_has_the_memory_for_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full map refuses blocks and says so; a container that is killed does not."""
    master = of_kind("Deployment")
    memory = container(master)["resources"]["limits"]["memory"]
    found = pod_settings(master, tmp_path, monkeypatch)
    assert 150 * found.master.blocks_max + (200 << 20) <= parse_size(f"{memory}B")


def test_manifests_are_all_applied() -> None:
    kustomization = of_kind("Kustomization")
    files = {path.name for path in MANIFESTS} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files
    assert kustomization["namespace"] == of_kind("Namespace")["metadata"]["name"]


EXAMPLES = sorted((DEPLOY / "kubernetes/examples").glob("*.yaml"))


@pytest.mark.parametrize("path", [*MANIFESTS, *EXAMPLES], ids=lambda path: path.stem)
def test_manifests_are_what_kubernetes_takes(path: Path) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="a package of the group test")
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] != "Kustomization":  # it never reaches a cluster
            validator.validate(document, "1.37", strict=True)


def test_a_server_has_the_time_to_hand_its_blocks_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = of_kind("DaemonSet")
    found = pod_settings(servers, tmp_path, monkeypatch).server
    granted = servers["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert 60 <= found.drain_s < found.drain_s + found.flush_s < granted


def test_the_engine_and_its_sidecar_run_what_kvpool_understands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (deployment,) = yaml.safe_load_all((DEPLOY / "kubernetes/examples/engine.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (sidecar,), (engine,) = pod["initContainers"], pod["containers"]
    assert sidecar["restartPolicy"] == "Always", "an init container that ends"
    with_sidecar = {"spec": {"template": {"spec": {**pod, "containers": [sidecar]}}}}
    found = pod_settings(with_sidecar, tmp_path, monkeypatch)
    check(found)
    assert ports(found) == {"tcp": 7460}
    assert found.server.drain_s + found.server.flush_s < pod["terminationGracePeriodSeconds"]
    given = json.loads(engine["args"][engine["args"].index("--kv-transfer-config") + 1])
    extra = given["kv_connector_extra_config"]
    assert extra["masters"] == found.client.masters
    assert extra["secret_file"] == found.secret_file
    mounts = {one["name"]: one["mountPath"] for one in engine["volumeMounts"]}
    assert extra["secret_file"].startswith(mounts["secret"])
    volumes = {one["name"] for one in pod["volumes"]}
    assert {m["name"] for c in (sidecar, engine) for m in c["volumeMounts"]} <= volumes


def test_the_master_is_where_everybody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment, service = of_kind("Deployment"), of_kind("Service")
    found = pod_settings(deployment, tmp_path, monkeypatch)
    check(found)
    assert found.master.bind == f"{POD_IP}:7450"
    namespace = of_kind("Namespace")["metadata"]["name"]
    name = f"{service['metadata']['name']}.{namespace}.svc.cluster.local"
    door, streams = service["spec"]["ports"]
    assert found.server.masters == found.client.masters == [f"{name}:{door['port']}"]
    assert service["spec"]["clusterIP"] == "None"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    named = {p["name"]: p["containerPort"] for p in container(deployment)["ports"]}
    assert named == {
        door["targetPort"]: door["port"],
        streams["targetPort"]: streams["port"],
        "http": port(found.master.http),
    }
    assert streams["port"] == found.master.stream_port
    policy = of_kind("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    open_ = {rule["port"] for rule in policy["ingress"][0]["ports"]}
    assert open_ == {p["containerPort"] for p in container(deployment)["ports"]}


def test_servers_have_the_memory_and_devices_they_ask_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemons = of_kind("DaemonSet")
    found = pod_settings(daemons, tmp_path, monkeypatch)
    check(found)
    one = container(daemons)
    assert found.server.id == "node-7"
    http = {"http": port(found.server.http)}
    assert {p["name"]: p["containerPort"] for p in one["ports"]} == ports(found) | http
    limits, requests = one["resources"]["limits"], one["resources"]["requests"]
    assert parse_size(limits["hugepages-2Mi"] + "B") == found.server.capacity
    assert parse_size(limits["memory"] + "B") >= parse_size("2GiB")
    for resource, amount in limits.items():
        assert requests[resource] == amount
    assert any(name.startswith("rdma/") for name in limits)
    pod = daemons["spec"]["template"]["spec"]
    labels = daemons["spec"]["template"]["metadata"]["labels"]
    assert daemons["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pod["hostNetwork"]
    assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    same = ucx_settings(found.server.listen)
    assert same == ucx_settings(found.client.transports) == {"tls": "rc,self", "rails": "2"}


@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet"])
def test_pods_are_probed_and_harmless(kind: str) -> None:
    workload = of_kind(kind)
    one, pod = container(workload), workload["spec"]["template"]["spec"]
    assert "http" in {p["name"] for p in one["ports"]}
    paths = {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}
    for probe, path in paths.items():
        assert one[probe]["httpGet"] == {"path": path, "port": "http"}
    secret = of_kind("Kustomization")["secretGenerator"]
    assert [made["name"] for made in secret] == [
        volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume
    ]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not one["securityContext"]["allowPrivilegeEscalation"]
    assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {m["name"] for m in one["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    # Kubernetes would set KVPOOL_MASTER_PORT, and kvpool refuses settings that it does not know.
    assert pod["enableServiceLinks"] is False


def test_the_same_user_everywhere() -> None:
    """Shared memory is for one user alone."""
    users = {of_kind(kind)["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
             for kind in ("Deployment", "DaemonSet")}  # fmt: skip
    assert re.findall(r"--uid (\d+)", (DEPLOY / "docker/Dockerfile").read_text()) == [
        str(user) for user in users
    ]
