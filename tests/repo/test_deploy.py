"""What `deploy/` says is what kvpool understands: each command line, setting, port and path.

For Kubernetes see `test_kubernetes.py`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Coroutine, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
import yaml

import kvpool
from kvpool import config, registry
from kvpool.cli import run as commands
from kvpool.cli import settings, shared
from kvpool.cli.app import app
from kvpool.config import Config, check_bind, parse_transport
from kvpool.net.http_server import Page, pages
from tests.support.programs import module_at

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
HEALTHY = module_at(DEPLOY / "docker/healthy.py")
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


def settings_of(
    words: list[str], environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> Config:
    """What the command `kvpool *words` would run with: its own parser, its own settings."""
    seen: list[Config] = []

    def load(*args: Any) -> Config:
        seen.append(settings.load(args[0], environment, args[2]))
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
    assert "healthcheck" not in service  # the image's
    page = found.server.http if name == "server" else found.master.http
    assert page
    assert HEALTHY.page_of(["kvpool", *service["command"]], told) == page
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
    copies = [line for line in lines if re.match("COPY (?!--from)", line)]
    copied = {word for line in copies for word in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    project = (ROOT / "pyproject.toml").read_text()
    wheel = project.partition("[tool.hatch.build.targets.wheel]")[2].partition("\n\n")[0]
    for package in re.findall(r'"([\w/]+)"', wheel):
        assert package.partition("/")[0] in copied, package
    assert lines[-1] == 'ENTRYPOINT ["kvpool"]'
    assert "COPY deploy/docker/healthy.py /opt/kvpool/healthy.py" in lines
    assert lines[-2].endswith('CMD ["python", "/opt/kvpool/healthy.py"]')


@pytest.mark.parametrize(
    ("words", "environment", "page"),
    [
        ("kvpool master --http 10.0.0.1:7452", {}, "10.0.0.1:7452"),
        ("docker-init -- kvpool server --http=[::1]:7453", {}, "[::1]:7453"),
        ("kvpool server", {"KVPOOL_SERVER_HTTP": "127.0.0.1:1"}, "127.0.0.1:1"),
        ("kvpool server", {"KVPOOL_CONFIG": "FILE"}, "127.0.0.1:7453"),
        ("kvpool master --config FILE", {}, "127.0.0.1:7452"),
        ("kvpool master --config FILE --http 127.0.0.1:2", {}, "127.0.0.1:2"),
        ("kvpool master", {"KVPOOL_SERVER_HTTP": "127.0.0.1:1"}, ""),
        ("kvpool status --masters a:1", {"KVPOOL_SERVER_HTTP": "127.0.0.1:1"}, ""),
    ],
)
def test_the_health_check_asks_the_page_of_this_process(
    words: str, environment: dict[str, str], page: str
) -> None:
    file = str(DEPLOY / "systemd/pool.yaml")
    command = words.replace("FILE", file).split()
    environment = {name: value.replace("FILE", file) for name, value in environment.items()}
    assert HEALTHY.page_of(command, environment) == page


async def test_the_health_check_passes_no_proxy(tmp_path: Path) -> None:
    problems: list[str] = ["no master knows this server yet"]

    def ready() -> Page:
        status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
        return Page(status, "".join(problems).encode())

    async def check_of(http: str) -> tuple[int | None, str]:
        command = tmp_path / "cmdline"
        command.write_text("\0".join(["kvpool", "server", "--http", http, ""]))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, DEPLOY / "docker/healthy.py", command),
            env={**os.environ, "http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://[::1]:9"},
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(20):
            _, said = await process.communicate()
        return process.returncode, said.decode().strip()

    async with pages({"/ready": ready}, "127.0.0.1:0") as serving:
        assert serving is not None
        everywhere = serving.address.replace("127.0.0.1", "0.0.0.0")
        assert await check_of(everywhere) == (1, problems.pop())
        assert await check_of(serving.address) == (0, "")
        address = serving.address
    code, said = await check_of(address)
    assert code == 1
    assert said.startswith(f"{address} does not answer: ")


def test_images_are_of_this_version() -> None:
    names = [
        (path, name)
        for path in DEPLOY.rglob("*")
        if path.is_file() and path.suffix in ("", ".yaml")
        for name in re.findall(r"\bkvpool:(\d[\w.-]*|latest)", path.read_text())
    ]
    assert len(names) >= 5
    assert [one for one in names if one[1] not in (kvpool.__version__, "latest")] == []
    assert [path.name for path, name in names if name == "latest"] == ["engine.yaml"]  # another's
