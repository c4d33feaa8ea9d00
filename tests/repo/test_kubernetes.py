"""What the Helm chart renders is what kvpool and Kubernetes understand, with any values.

`deploy/kubernetes` is what it renders with its default values, and is checked without Helm. Others
need `helm-python-sdk`, which is large and so has a suite of its own: `make test WITH=helm`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvpool
from kvpool.config import Config
from kvpool.master.state.server_table import FORGET_S
from kvpool.units import parse_duration, parse_size
from tests.repo.test_deploy import DEPLOY, ROOT, check, port, ports, settings_of, ucx_settings
from tests.support.programs import module_at

CHART = DEPLOY / "helm/kvpool"
PLAIN = DEPLOY / "kubernetes"
#: The first that the chart takes, one in use, and the last.
KUBERNETES = ("1.27", "1.33", "1.37")
NODE = "n" * 253  # as long as a name may be
FIELDS = {"spec.nodeName": NODE, "metadata.name": "kvpool-server-0"}
ADDRESSES = {"status.podIP": "10.1.2.3"}, {"status.podIP": "fd00::7"}
PODS = {"kind": "StatefulSet"}
RDMA = {"rdma": {"resource": "rdma/hca_shared_devices"}}

#: What `values.yaml` of a user may say.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},  # as the files in deploy/kubernetes
    "default": {},
    "pods": {"servers": {**PODS, "nodeSelector": {"kvpool.io/server": None}}},
    "masters": {"masters": {"replicas": 2, "blocksMax": 50_000_000}},
    "no pages": {"masters": {"http": False}, "servers": {"http": False}},
    "no pages of pods": {"masters": {"http": False}, "servers": {**PODS, "http": False}},
    "disks of nodes": {
        "servers": {
            "disks": [
                {"size": "1TiB", "hostPath": "/mnt/a"},
                {"size": "0.5TiB", "hostPath": "/mnt/b: 1"},
            ],
            "writeMode": "write_back",
            "encrypt": True,
            "drain": "1h",
            "flush": "5m",
        }
    },
    "disks of pods": {
        "servers": {**PODS, "disks": [{"size": "2TiB", "storageClass": "1"}, {"size": "1TiB"}]}
    },
    "rdma": {"servers": {"capacity": "65537MiB", "hugePages": True, **RDMA}},
    "watched": {
        "prometheus": {"podMonitors": True, "rules": True, "labels": {"release": "main"}},
        "grafana": {"dashboard": True},
        "secret": {"generate": True},
    },
    "watched pods": {
        "servers": PODS,
        "prometheus": {"podMonitors": True},
        "networkPolicy": {"users": {"team": "a", "env": "b"}, "nodes": ["fd00::/8"]},
    },
    "bare": {"networkPolicy": {"enabled": False}, "podDisruptionBudgets": False, "servers": PODS},
    "more": {
        "cluster": "two",
        "secret": {"name": "7"},
        "image": {"repository": "[::1]:5000/kvpool", "tag": "1", "pullSecrets": ["1", "b"]},
        "masters": {
            "replicas": 3, "blocksMax": 3 << 30, "priorityClassName": "on", "tolerations": [],
        },
        "servers": {"policy": "lease", "memoryBeside": "6GiB", "cpu": "500m", "capacity": "1.5GiB"},
        "config": {"server": {"connections_max": 4_000_000}, "master": {"timeout_s": "9s"}},
    },
}  # fmt: skip
#: What is refused, and what is said of it: one clear sentence.
WRONG: dict[str, dict[str, Any]] = {
    "additional properties 'server' not allowed": {"server": {"capacity": "1GiB"}},
    "'/servers/capacity': '64GB' does not match": {"servers": {"capacity": "64GB"}},
    "'/servers/drain': '90' does not match": {"servers": {"drain": "90"}},
    "'/servers/kind': value must be one of": {"servers": {"kind": "Deployment"}},
    "'/servers/disks/0': missing property 'size'": {"servers": {"disks": [{"hostPath": "/a"}]}},
    "'/secret/name': '' does not match": {"secret": {"name": ""}},
    "'/masters/replicas': minimum": {"masters": {"replicas": 0}},
    "'/networkPolicy/nodes/0': '10.0.0.0' does not": {"networkPolicy": {"nodes": ["10.0.0.0"]}},
    "'/networkPolicy/users': minProperties": {"networkPolicy": {"users": {"kvpool.io/user": None}}},
    "/config': additional properties 'sever' not": {"config": {"sever": {}}},
}
#: The same, of what a schema cannot say.
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "disks[0]: a server of a DaemonSet has no claim": {"servers": {"disks": [{"size": "1TiB"}]}},
    "disks[0].hostPath: a server of a StatefulSet is not bound": {
        "servers": {**PODS, "disks": [{"size": "1TiB", "hostPath": "/a"}]}
    },
    "servers.rdma.resource: RDMA devices": {"servers": {**PODS, **RDMA}},
    "prometheus.podMonitors: there is nothing to read": {
        "servers": {"http": False},
        "prometheus": {"podMonitors": True},
    },
    "config.server.capacity: the chart sets it, say servers.capacity": {
        "config": {"server": {"capacity": "1GiB"}}
    },
    "config.master.bind: the chart sets it, and ports": {"config": {"master": {"bind": "::"}}},
}


def helm() -> Any:
    return pytest.importorskip("helm_python", reason="make test WITH=helm")


def rendered(values: dict[str, Any], name: str = "kvpool") -> dict[str, str]:
    """The text of each template; raises HelmError."""
    with helm().Chart.load(CHART) as chart:
        texts: dict[str, str] = chart.render(values, name=name, namespace="kvpool")
    return {Path(path).name: text for path, text in texts.items()}


class Unique(yaml.CSafeLoader):
    """A key that stands twice is an error: Kubernetes refuses it, PyYAML takes the last."""


def _unique(loader: Unique, node: yaml.MappingNode) -> dict[Any, Any]:
    names = [loader.construct_object(key) for key, _ in node.value]
    assert len(set(names)) == len(names), names
    return dict(loader.construct_pairs(node, deep=True))


Unique.add_constructor("tag:yaml.org,2002:map", _unique)


def documents(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.load_all(text, Unique) if one]


class Cluster:
    """What would be applied."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.notes = texts.pop("NOTES.txt", "")
        self.all = [one for name in sorted(texts) for one in documents(texts[name])]

    def of_kind(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        return [
            one
            for one in self.all
            if one["kind"] == kind and one["metadata"]["name"].endswith(name)
        ]

    def only(self, kind: str, name: str = "") -> dict[str, Any]:
        (found,) = self.of_kind(kind, name)
        return found

    def workload(self, part: str) -> dict[str, Any]:
        kinds = ("Deployment", "StatefulSet", "DaemonSet")
        (found,) = (one for kind in kinds for one in self.of_kind(kind, f"-{part}"))
        return found

    def settings(
        self, part: str, pod: dict[str, Any], fields: dict[str, str], folder: Path, patch: Any
    ) -> Config:
        """What the only container of a pod would run with."""
        (one,) = pod["containers"]
        fields = {**FIELDS, **fields}
        environment = {
            variable["name"]: variable.get("value")
            or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            for variable in one["env"]
        }
        (mount,) = [m for m in one["volumeMounts"] if m["name"] == "config"]
        assert environment["KVPOOL_CONFIG"] == f"{mount['mountPath']}/pool.yaml"
        (volume,) = [v for v in pod["volumes"] if v["name"] == "config"]
        file = folder / "pool.yaml"
        config = self.only("ConfigMap", volume["configMap"]["name"])
        file.write_text(config["data"]["pool.yaml"])
        environment["KVPOOL_CONFIG"] = str(file)
        words = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], word) for word in one["args"]]
        assert words[0] == part
        ours = {name: value for name, value in environment.items() if name.startswith("KVPOOL_")}
        found = settings_of(words, ours, patch)
        (secret,) = [m for m in one["volumeMounts"] if m["name"] == "secret"]
        assert found.secret_file == f"{secret['mountPath']}/secret"
        return found


@cache
def cluster(case: str) -> Cluster:
    if case == "plain":
        files = sorted(PLAIN.glob("*.yaml"))
        return Cluster({path.name: path.read_text() for path in files})
    return Cluster(rendered(CASES[case]))


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    spec = workload["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


every_case = pytest.mark.parametrize("case", CASES)
every_address = pytest.mark.parametrize("address", ADDRESSES, ids=["IPv4", "IPv6"])


# --- what is rendered ----------------------------------------------------------------------


def validate(document: dict[str, Any], version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="a package of the group test")
    if document["kind"] not in ("Kustomization", "PodMonitor", "PrometheusRule"):
        validator.validate(document, version, strict=True)


@every_case
@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_all_of_it(case: str, version: str) -> None:
    found = cluster(case)
    assert {"ConfigMap", "Service"} <= {one["kind"] for one in found.all}
    for document in found.all:
        validate(document, version)
    names = [(one["kind"], one["metadata"].get("name")) for one in found.all if "metadata" in one]
    assert len(set(names)) == len(names)


@every_case
@every_address
def test_masters_are_where_everybody_looks(
    case: str, address: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = cluster(case)
    master, service = pool.workload("master"), pool.only("Service", "-master")
    found = pool.settings("master", pod_of(master), address, tmp_path, monkeypatch)
    check(found)
    assert port(found.master.bind) == 7450
    assert found.master.bind.rpartition(":")[0].strip("[]") == address["status.podIP"]
    (door,) = service["spec"]["ports"]
    name = f"{service['metadata']['name']}.kvpool.svc:{door['port']}"
    replicas = master["spec"]["replicas"]
    each = [f"{master['metadata']['name']}-{number}.{name}" for number in range(replicas)]
    assert found.server.masters == found.client.masters == (each if replicas > 1 else [name])
    if replicas > 1:
        assert (master["kind"], master["spec"]["serviceName"]) == (
            "StatefulSet",
            service["metadata"]["name"],
        )
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["ipFamilyPolicy"] == "SingleStack"  # pods listen on their first address
    (one,) = pod_of(master)["containers"]
    named = {p["name"]: p["containerPort"] for p in one["ports"]}
    http = {"http": port(found.master.http)} if found.master.http else {}
    assert named == {door["targetPort"]: door["port"]} | http
    # A full map refuses blocks and says so; a container that is killed does not.
    memory = parse_size(f"{one['resources']['limits']['memory']}B")
    assert 0 <= memory - 150 * found.master.blocks_max - (200 << 20) < 2 << 20


@every_case
@every_address
def test_servers_have_the_memory_and_devices_they_ask_for(
    case: str, address: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = cluster(case)
    servers = pool.workload("server")
    pod = pod_of(servers)
    found = pool.settings("server", pod, address, tmp_path, monkeypatch)
    check(found)
    (one,) = pod["containers"]
    on_host = servers["kind"] == "DaemonSet"
    assert pod.get("hostNetwork", False) is on_host
    assert found.server.id == (NODE if on_host else "kvpool-server-0")
    assert ("shm://" in found.server.listen) is on_host
    if on_host:
        assert pod["dnsPolicy"] == "ClusterFirstWithHostNet"
        assert all(p["hostPort"] == p["containerPort"] for p in one["ports"])
    rdma = any(name.startswith("rdma/") for name in one["resources"]["limits"])
    assert found.server.insecure is rdma is ("ucx" in ports(found))
    if rdma:
        same = ucx_settings(found.server.listen)
        assert same == ucx_settings(found.client.transports) == {"tls": "rc,self", "rails": "2"}
    http = {"http": port(found.server.http)} if found.server.http else {}
    assert {p["name"]: p["containerPort"] for p in one["ports"]} == ports(found) | http
    tiers = found.server.tiers or [f"dram:{found.server.capacity}B"]
    sizes = [parse_size(tier.partition("?")[0].rpartition(":")[2]) for tier in tiers]
    limits, requests = one["resources"]["limits"], one["resources"]["requests"]
    assert all(requests[resource] == amount for resource, amount in limits.items())
    beside = parse_size(limits["memory"] + "B")
    if huge := limits.get("hugepages-2Mi"):
        assert parse_size(huge + "B") >= sizes[0]
        assert parse_size(huge + "B") % (2 << 20) == 0
    else:
        beside -= sizes[0]
    assert beside >= (4 << 30) + sum(sizes) // 128
    # Each file lies on a disk of its own, with the room that it takes.
    mounts = {m["mountPath"]: m["name"] for m in one["volumeMounts"]}
    claims = {c["metadata"]["name"]: c for c in servers["spec"].get("volumeClaimTemplates", ())}
    volumes = {v["name"]: v for v in pod["volumes"]}
    for tier, size in zip(tiers[1:], sizes[1:], strict=True):
        name = mounts.pop(str(Path(tier.split(":")[1]).parent))
        if on_host:
            assert volumes[name]["hostPath"]["type"] == "Directory"
        else:
            asked = claims[name]["spec"]["resources"]["requests"]["storage"]
            assert size * 17 / 16 * 1.05 <= parse_size(asked + "B") <= size * 1.2


@every_case
def test_an_upgrade_keeps_the_blocks(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, each with the time to hand over what it has, or to come back with it."""
    pool = cluster(case)
    masters, servers = pool.workload("master"), pool.workload("server")
    found = pool.settings("server", pod_of(servers), ADDRESSES[0], tmp_path, monkeypatch).server
    granted = pod_of(servers)["terminationGracePeriodSeconds"]
    assert 60 <= found.drain_s < found.drain_s + found.flush_s + 30 < granted
    assert (found.back_in_s > 0) is bool(found.tiers)
    assert found.back_in_s < FORGET_S
    assert servers["spec"]["updateStrategy"]["type"] == "RollingUpdate"
    assert servers["spec"]["minReadySeconds"] >= 10
    if servers["kind"] == "DaemonSet":
        assert servers["spec"]["updateStrategy"]["rollingUpdate"] == {"maxUnavailable": 1}
    # Who is one of several is disrupted alone. A budget is not for DaemonSets (it would refuse all
    # evictions), and one master's would keep its node for ever.
    budgets = {one["metadata"]["name"]: one["spec"] for one in pool.of_kind("PodDisruptionBudget")}
    several = {w["metadata"]["name"]: w for w in (masters, servers) if w["kind"] == "StatefulSet"}
    assert budgets.keys() == (several.keys() if case != "bare" else set())
    for name, budget in budgets.items():
        assert budget["maxUnavailable"] == 1
        assert budget["selector"] == several[name]["spec"]["selector"]


@every_case
@pytest.mark.parametrize("part", ["master", "server"])
def test_pods_are_probed_and_harmless(case: str, part: str) -> None:
    pool = cluster(case)
    workload = pool.workload(part)
    pod = pod_of(workload)
    (one,) = pod["containers"]
    names = {p["name"] for p in one["ports"]}
    if "http" in names:
        address = one["args"][one["args"].index("--http") + 1]
        host = {"host": "127.0.0.1"} if address.startswith("127.0.0.1:") else {}
        # The kubelet and a server share a loopback in the host's network only.
        assert bool(host) is (bool(pod.get("hostNetwork")) and not pool.of_kind("PodMonitor"))
        paths = {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}
        for probe, path in paths.items():
            assert one[probe]["httpGet"] == {"path": path, "port": "http", **host}
        # A server that is busy for a while is not killed, which would cost its blocks.
        live = one["livenessProbe"]
        assert live["failureThreshold"] * live["periodSeconds"] >= 60
    else:
        assert {
            one[probe]["tcpSocket"]["port"] for probe in ("startupProbe", "readinessProbe")
        } <= names
        assert "livenessProbe" not in one  # a port opens also when its process hangs
    security = pod["securityContext"]
    assert security["runAsNonRoot"]
    assert security["runAsUser"] == security["fsGroup"] == 7450
    # Otherwise each mount opens the files of a disk for the group.
    assert security["fsGroupChangePolicy"] == "OnRootMismatch"
    assert not one["securityContext"]["allowPrivilegeEscalation"]
    assert one["securityContext"]["readOnlyRootFilesystem"]
    assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    claims = workload["spec"].get("volumeClaimTemplates", ())
    volumes = {v["name"] for v in pod["volumes"]} | {c["metadata"]["name"] for c in claims}
    assert {m["name"] for m in one["volumeMounts"]} == volumes
    # A server keeps its identity there while its container starts again, and UCX wants one.
    assert "/tmp" in {m["mountPath"] for m in one["volumeMounts"]}
    assert not pod["automountServiceAccountToken"]
    # Kubernetes would set KVPOOL_MASTER_PORT, and kvpool refuses settings that it does not know.
    assert pod["enableServiceLinks"] is False
    metadata = workload["spec"]["template"]["metadata"]
    assert metadata["labels"]["sidecar.istio.io/inject"] == "false"
    assert metadata["annotations"]["linkerd.io/inject"] == "disabled"


@every_case
def test_what_selects_finds_its_pods(case: str) -> None:
    pool = cluster(case)
    for part, other in (("master", "server"), ("server", "master")):
        labels, others = (
            pool.workload(one)["spec"]["template"]["metadata"]["labels"] for one in (part, other)
        )
        selectors = [pool.workload(part)["spec"]["selector"]["matchLabels"]]
        for kind in ("Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor"):
            for one in pool.of_kind(kind, f"-{part}"):
                spec = one["spec"]
                selector = spec.get("selector") or spec["podSelector"]
                selectors.append(selector.get("matchLabels", selector))
        for selector in selectors:
            assert selector.items() <= labels.items()
            assert not selector.items() <= others.items()


@every_case
def test_policies_open_what_is_used(case: str) -> None:
    pool = cluster(case)
    policies = pool.of_kind("NetworkPolicy")
    if case == "bare":
        assert policies == []
        return
    workloads = [pool.workload("master"), pool.workload("server")]
    ruled = [w for w in workloads if not pod_of(w).get("hostNetwork")]
    assert {one["metadata"]["name"] for one in policies} == {w["metadata"]["name"] for w in ruled}
    for workload in ruled:
        (policy,) = (p for p in policies if p["metadata"]["name"] == workload["metadata"]["name"])
        (one,) = pod_of(workload)["containers"]
        named = {p["name"]: p["containerPort"] for p in one["ports"]}
        page = {named.pop("http", None)} - {None}
        callers, *watchers = policy["spec"]["ingress"]
        assert {rule["port"] for rule in callers["ports"]} == set(named.values())
        assert {rule["port"] for one in watchers for rule in one["ports"]} == page
        assert {"podSelector": {}} in callers["from"]
        assert any("ipBlock" in who for who in callers["from"])
        # An empty selector would be everybody.
        for who in (*callers["from"], *(who for one in watchers for who in one["from"])):
            assert who.get("namespaceSelector", {"matchLabels": True})["matchLabels"]


@every_case
def test_the_secret_is_the_one_of_the_values(case: str) -> None:
    pool = cluster(case)
    name = CASES[case].get("secret", {}).get("name", "kvpool-secret")
    for part in ("master", "server"):
        volumes = pod_of(pool.workload(part))["volumes"]
        (secret,) = (v["secret"] for v in volumes if "secret" in v)
        assert secret == {"secretName": name, "defaultMode": 0o440}
    made = [one["metadata"]["name"] for one in pool.of_kind("Secret")]
    assert made == ([name] if CASES[case].get("secret", {}).get("generate") else [])


# --- without Helm --------------------------------------------------------------------------


def test_manifests_are_all_applied() -> None:
    pool = cluster("plain")
    (kustomization,) = documents((PLAIN / "kustomization.yaml").read_text())
    files = {path.name for path in PLAIN.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files
    namespace = pool.only("Namespace")["metadata"]
    assert kustomization["namespace"] == namespace["name"] == "kvpool"
    assert namespace["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"
    (made,) = kustomization["secretGenerator"]
    assert made == {"name": "kvpool-secret", "files": ["secret"]}


def test_kubectl_gives_the_secret_its_name_everywhere(tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    folder = shutil.copytree(PLAIN, tmp_path / "pool")
    (folder / "secret").write_text("0123456789abcdef")
    done = subprocess.run(
        [kubectl, "kustomize", folder], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    pool = Cluster({"all": done.stdout})
    name = pool.only("Secret")["metadata"]["name"]
    assert name.startswith("kvpool-secret-")
    assert f"secretName: {name}" in done.stdout
    assert "secretName: kvpool-secret\n" not in done.stdout
    assert {one["metadata"].get("namespace") for one in pool.all if one["kind"] != "Namespace"} == {
        "kvpool"
    }


def test_the_engine_and_its_sidecar_run_what_kvpool_understands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (deployment,) = documents((PLAIN / "examples/engine.yaml").read_text())
    for version in KUBERNETES[1:]:  # sidecars are younger than the first
        validate(deployment, version)
    pod = pod_of(deployment)
    (sidecar,), (engine,) = pod["initContainers"], pod["containers"]
    assert sidecar["restartPolicy"] == "Always", "an init container that ends"
    plain = cluster("plain")
    (server,) = pod_of(plain.workload("server"))["containers"]
    assert sidecar["image"] == server["image"]
    found = plain.settings(
        "server", {**pod, "containers": [sidecar]}, ADDRESSES[0], tmp_path, monkeypatch
    )
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


def test_the_same_user_everywhere() -> None:
    """Shared memory is for one user alone."""
    users = {
        pod_of(cluster("plain").workload(part))["securityContext"]["runAsUser"]
        for part in ("master", "server")
    }
    assert re.findall(r"--uid (\d+)", (DEPLOY / "docker/Dockerfile").read_text()) == [
        str(user) for user in users
    ]


def test_the_chart_is_of_this_version_and_copies_nothing() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == kvpool.__version__
    files = {path.name: path.resolve() for path in (CHART / "files").iterdir()}
    assert files == {
        "dashboard.json": DEPLOY / "grafana/kvpool.json",
        "alerts.yml": DEPLOY / "prometheus/alerts.yml",
    }


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value and path[-1:] not in (("nodeSelector",), ("labels",)):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path


def test_the_schema_knows_each_value_and_no_other() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="a package of the group test")
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(values)
    for path in leaves(values):
        inner, *rest = schema, *path
        inner = schema
        for name in rest:
            inner = inner["properties"].get(name, inner) if "properties" in inner else inner
        assert inner is not schema, path
    assert set(schema["properties"]) - {"global"} == set(values)
    for section in ("image", "masters", "servers", "networkPolicy", "prometheus", "grafana"):
        assert set(schema["properties"][section]["properties"]) == set(values[section]), section
    for case in CASES.values():
        validator.validate(case)
    for why, wrong in WRONG.items():
        if None not in (value for one in wrong.values() for value in one.get("users", {}).values()):
            assert not validator.is_valid(wrong), why
    sections = set(schema["properties"]["config"]["properties"])
    assert sections == set(Config.__struct_fields__)


def test_a_pod_is_made_anew_when_its_configuration_is_another() -> None:
    """Also without Helm: who changes config.yaml by hand forgets this."""
    (config,) = yaml.safe_load_all((PLAIN / "config.yaml").read_text())
    settings = yaml.safe_load(config["data"]["pool.yaml"])
    for part, other in (("master", "server"), ("server", "master")):
        own = {name: value for name, value in settings.items() if name not in (other, "client")}
        text = json.dumps(own, sort_keys=True, separators=(",", ":"))
        checksum = hashlib.sha256(text.encode()).hexdigest()
        assert f"checksum/config: {checksum}\n" in (PLAIN / f"{part}.yaml").read_text(), part


# --- with Helm -----------------------------------------------------------------------------


def test_the_manifests_are_what_the_chart_renders() -> None:
    helm()
    made = module_at(CHART.parent / "manifests.py").manifests()
    assert {name: (PLAIN / name).read_text() for name in made} == made, (
        "run: python deploy/helm/manifests.py"
    )
    assert made.keys() == {path.name for path in PLAIN.glob("*.yaml")} - {
        "kustomization.yaml",
        "namespace.yaml",
    }


@every_case
def test_helm_finds_nothing_to_say(case: str) -> None:
    report = helm().lint(CHART, CASES[case], strict=True, namespace="kvpool")
    assert report["errors"] == []
    assert [one for one in report["messages"] if one["severity"] > 1] == []


@pytest.mark.parametrize("why", [*WRONG, *IMPOSSIBLE])
def test_a_wrong_value_is_one_clear_error(why: str) -> None:
    with pytest.raises(helm().HelmError) as error:
        rendered((WRONG | IMPOSSIBLE)[why])
    said = str(error.value)
    assert why in said
    assert said.count("- at ") <= 1, said


@pytest.mark.parametrize("case", [case for case in CASES if case != "plain"])
def test_the_notes_have_the_line_for_an_engine(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = cluster(case)
    (line,) = re.findall(r"vllm serve MODEL --kv-transfer-config '(.*)'\n", pool.notes)
    extra = json.loads(line)["kv_connector_extra_config"]
    pod = pod_of(pool.workload("master"))
    found = pool.settings("master", pod, ADDRESSES[0], tmp_path, monkeypatch)
    assert extra == {"masters": found.client.masters, "secret_file": found.secret_file}
    master = pool.workload("master")
    assert f"exec {master['kind'].lower()}/{master['metadata']['name']} -- kvpool" in pool.notes
    assert ("kubectl -n kvpool create secret" in pool.notes) is not bool(pool.of_kind("Secret"))


def test_names_of_any_release_are_short_enough() -> None:
    """53 characters are the longest; a StatefulSet's pods get eleven more for their label."""
    pool = Cluster(rendered(CASES["disks of pods"], "a" * 52 + "b"))
    assert all(len(one["metadata"]["name"]) <= 52 for one in pool.all)
    again = Cluster(rendered({"servers": PODS}, "1"))
    assert again.workload("server")["metadata"]["name"] == "1-kvpool-server"
    validate(again.workload("server"), KUBERNETES[-1])


def test_dashboard_and_alerts_are_those_of_deploy() -> None:
    pool = cluster("watched")
    (dashboard,) = pool.of_kind("ConfigMap", "-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    source = (DEPLOY / "grafana/kvpool.json").read_text()
    assert json.loads(dashboard["data"]["kvpool.json"]) == json.loads(source)
    rule = pool.only("PrometheusRule")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
    assert rule["metadata"]["labels"]["release"] == "main"


@pytest.mark.parametrize("case", ["watched", "watched pods"])
def test_monitors_name_the_jobs_as_alerts_know_them(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = cluster(case)
    for part in ("master", "server"):
        monitor, workload = pool.only("PodMonitor", f"-{part}"), pool.workload(part)
        label = monitor["spec"]["jobLabel"]
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert labels[label] == f"kvpool-{part}"
        (one,) = pod_of(workload)["containers"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in {p["name"] for p in one["ports"]}
        found = pool.settings(part, pod_of(workload), ADDRESSES[0], tmp_path, monkeypatch)
        page = getattr(found, part).http
        assert page.startswith("10.1.2.3:"), "on loopback nobody could read it"


def test_a_setting_restarts_whom_it_concerns() -> None:
    def sums(values: dict[str, Any]) -> list[str]:
        pool = Cluster(rendered(values))
        metadata = (pool.workload(p)["spec"]["template"]["metadata"] for p in ("master", "server"))
        return [one["annotations"]["checksum/config"] for one in metadata]

    master, server = sums({})
    changed = sums({"servers": {"policy": "lru"}})
    assert (changed[0] == master, changed[1] == server) == (True, False)
    changed = sums({"masters": {"blocksMax": 5000}})
    assert (changed[0] == master, changed[1] == server) == (False, True)
    changed = sums({"cluster": "two"})
    assert (changed[0] == master, changed[1] == server) == (False, False)


def test_a_generated_secret_is_long_and_never_the_same() -> None:
    made = {
        Cluster(rendered({"secret": {"generate": True}})).only("Secret")["data"]["secret"]
        for _ in range(2)
    }
    assert len(made) == 2
    assert all(len(one) >= 64 for one in made)


def test_a_package_has_everything(tmp_path: Path) -> None:
    archive = helm().package(CHART, destination=tmp_path)
    helm().expand(tmp_path / "out", archive)
    with helm().Chart.load(tmp_path / "out/kvpool") as chart:
        again = chart.render(CASES["watched"], name="kvpool", namespace="kvpool")
    (dashboard,) = Cluster({Path(k).name: v for k, v in again.items()}).of_kind(
        "ConfigMap", "-dashboard"
    )
    assert len(dashboard["data"]["kvpool.json"]) > 10_000


# --- its neighbours ------------------------------------------------------------------------


def found_tool(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make test WITH=helm")
    return found


def said_by(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    return done.stdout + done.stderr


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    assert said_by(found_tool("hadolint"), "--no-color", DEPLOY / "docker/Dockerfile") == ""


def test_actionlint_finds_nothing_in_the_workflows() -> None:
    files = sorted((ROOT / ".github/workflows").glob("*.yml"))
    assert said_by(found_tool("actionlint"), "-no-color", *files) == ""


def test_durations_are_read_as_kvpool_reads_them() -> None:
    for text in ("90s", "4m", "2h"):
        pool = Cluster(rendered({"servers": {"drain": text, "flush": "0s"}}))
        granted = pod_of(pool.workload("server"))["terminationGracePeriodSeconds"]
        assert granted == parse_duration(text) + 52
