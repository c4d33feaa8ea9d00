"""The commands that look at a pool, run in this process against a real one."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvpool import Cluster, Namespace, Pool
from kvpool.cli import shared
from kvpool.cli.app import app
from kvpool.config import Config, MasterConfig
from kvpool.errors import MasterLost
from kvpool.master.service import Master
from kvpool.net.control_network import TcpNetwork
from kvpool.ops import process
from kvpool.tools import bench
from tests.conftest import keys, value
from tests.support.commands import running_kvpool
from tests.support.local_pool import LocalPool
from tests.support.programs import free_address

NAMESPACE = Namespace("commands")


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    local = LocalPool()
    stored = keys("commands", 3)
    local.ask(lambda client: client.write(NAMESPACE, stored, [value(key) for key in stored]))
    local.settled()
    yield local
    local.close()


def kvpool(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def as_json(*arguments: str) -> Any:
    done = kvpool(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_status(pool: LocalPool) -> None:
    done = kvpool("status", "--masters", pool.master)
    assert "dev-0" in done.stdout
    assert "256 MiB" in done.stdout
    for heading in ("victim age", "hints", "errors"):  # of servers, and of their tiers
        assert heading in done.stdout
    [member] = as_json("status", "--masters", pool.master)
    assert member["server"] == "dev-0"
    assert member["blocks"] == 3


def test_options_with_several_values_may_be_given_several_times(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is dropped without a word."""
    served: list[Config] = []

    async def serve(settings: Config) -> None:
        served.append(settings)

    monkeypatch.setattr("kvpool.cli.run._serve", serve)
    words = "--listen tcp://h:1,shm:// --listen ucx://h:2?tls=rc,self --masters a:1 --masters b:2"
    done = kvpool("server", *words.split(), "--announce", "tcp://n:1,ucx://n:2")
    assert done.exit_code == 0, done.output
    (found,) = (one.server for one in served)
    assert found.listen == ["tcp://h:1", "shm://", "ucx://h:2?tls=rc,self"]
    assert found.masters == ["a:1", "b:2"]
    assert found.announce == ["tcp://n:1", "ucx://n:2"]
    assert as_json("status", "--masters", pool.master, "--masters", "127.0.0.1:1")


def test_the_smallest_batches_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are less than the block that is read alone, and than an extent each."""
    monkeypatch.setattr(bench, "BenchOptions", partial(bench.BenchOptions, calls=20))
    done = kvpool("bench", "--block-size", "1", "--batch", "2", "--rounds", "1", "--json")
    assert "error" not in done.stderr
    assert json.loads(done.stdout)["rows"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("dev", "--capacity", "0"), "server.capacity"),
        (("bench", "--block-size", "0"), "--block-size '0': a block has at least one byte"),
        (("bench", "--block-size", "2MB"), "did you mean 2MiB"),
        (("top", "--every", "0"), "--every 0: expected some time"),
        (("top", "--every", "x"), "--every: duration 'x'"),
        (("drain", "s", "--deadline", "x"), "--deadline: duration 'x'"),
        (("drain", "s", "--back-in", "x"), "--back-in: duration 'x'"),
        (("remove", "--model", "m", "--deadline", "x"), "--deadline: duration 'x'"),
        (("spread", "f" * 64, "--namespace", "n", "--to", "1", "--deadline", "x"), "--deadline: d"),
        (("prefetch", "f" * 64, "--namespace", "n", "--deadline", "x"), "--deadline: duration 'x'"),
        (("replay", "--capacity", "x"), "--capacity: size 'x'"),
        (("replay", "--block-size", "x"), "--block-size: size 'x'"),
        (("replay", "--dry", "--capacity", "1MiB", "--block-size", "x"), "--block-size: size 'x'"),
        (("replay", "--policy", "lru", "--policy", "arc"), "several values of --policy need --dry"),
        (("replay", "--capacity", "1MiB,2MiB"), "several values of --capacity need --dry"),
        (("replay", "--events", "0.3:x", "--events", "0.2:join"), "event '0.3:x'"),
        (("replay", "--transports", "x", "--transports", "shm"), "no transport 'x'"),
        (("server", "--capacity", "1MiB", "--tier", "dram:1MiB"), "tiers (dram:1MiB): expected"),
        (("server", "--listen", "tpc://a:1", "--listen", "shm://"), "'tpc'; did you mean 'tcp'?"),
    ],
)
def test_nothing_is_refused_before_anything_starts(words: tuple[str, ...], said: str) -> None:
    done = kvpool(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.count("error:") == 1
    assert said in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", ["status", "usage"])
async def test_a_pool_without_servers_is_a_sentence(command: str) -> None:
    network = TcpNetwork(Cluster("default"))
    master = Master(MasterConfig(bind="127.0.0.1:0"), network)
    await master.start()
    try:
        where = ("--masters", master.address)
        done = await running_kvpool(command, *where)
        assert (done.code, done.out.count("\n")) == (1, 1)
        assert done.out.startswith("no server has registered: `kvpool server` starts one")
        assert (await running_kvpool(command, *where, "--json")).out == "[]\n"
    finally:
        await master.close()
        network.close()


def test_a_shell_completes_commands_and_options() -> None:
    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        asked = {"_KVPOOL_COMPLETE": "complete_bash", **words}
        return CliRunner().invoke(app, prog_name="kvpool", env=asked).stdout.split()

    assert completed("kvpool sta") == ["status"]
    assert "--tier" in completed("kvpool server --t")


def test_help_breaks_lines_only_where_the_terminal_ends() -> None:
    done = CliRunner().invoke(app, ["replay", "--help"], env={"COLUMNS": "140", "TERM": "dumb"})
    assert "several values, comma-separated. Without it there are 2 servers" in done.output


def test_help_cuts_no_word() -> None:
    for command in ("server", "replay", "events", "top"):
        env = {"COLUMNS": "60", "TERMINAL_WIDTH": "60", "TERM": "dumb"}
        done = CliRunner().invoke(app, [command, "--help"], env=env)
        assert "Usage: kvpool" in done.output
        assert "\N{HORIZONTAL ELLIPSIS}" not in done.output


@pytest.mark.parametrize("words", ["spread --to 1", "prefetch", "explain"])
def test_keys_on_stdin_that_are_no_text_are_a_usage_error(words: str) -> None:
    done = CliRunner().invoke(app, [*words.split(), "--namespace", "n", "-"], input=b"\xff\xfe")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "keys on stdin: expected text" in done.stderr


def test_names_are_printed_as_they_are() -> None:
    assert "keys :x:" in kvpool("explain", ":x:", "--namespace", "n").stderr  # and not as a picture


def test_top_shows_what_went_wrong_and_goes_on(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    members, asked = Pool.members, []

    async def failing(self: Pool, **options: Any) -> Any:
        if "timeout" in options:
            asked.append(options)
            if len(asked) == 2:
                raise MasterLost("it restarts")
            if len(asked) == 4:
                raise ValueError("a bug")
        return await members(self, **options)

    monkeypatch.setattr(Pool, "members", failing)
    done = kvpool("top", "--masters", pool.master, "--every", "1ms", "--refreshes", "3")
    assert done.exit_code == 0, done.output
    assert len(asked) == 3
    assert isinstance(kvpool("top", "--masters", pool.master).exception, ValueError)


@pytest.mark.parametrize("cluster", ["default", "bank"])
def test_dev_says_how_to_connect(
    cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def at_once() -> None:
        pass

    known, secret = "", tmp_path / "[a]"
    if cluster != "default":  # of the environment, which counts here, too
        secret.write_text("0123456789abcdef")
        secret.chmod(0o600)
        monkeypatch.setenv("KVPOOL_CLUSTER", cluster)
        monkeypatch.setenv("KVPOOL_SECRET_FILE", str(secret))
        known = f', cluster="bank", secret_file="{secret}"'

    monkeypatch.setattr(process, "wait_for_signal", at_once)
    done = kvpool("dev", "--capacity", "1MiB", "--servers", "2", "--bind", "127.0.0.1:0")
    assert done.exit_code == 0, done.output
    (address,) = re.findall(r"kvpool is up: master at (127\.0\.0\.1:\d+)", done.stdout)
    assert f'await kvpool.connect("{address}"{known})' in done.stdout
    assert re.findall(r"server (dev-\d), 1 MiB: .*shm://", done.stdout) == ["dev-0", "dev-1"]
    assert "Ctrl-C" in done.stdout


def test_dev_serves_the_status_page_and_the_metrics_of_its_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = free_address()
    served: dict[str, str] = {}

    async def look() -> None:
        for path in ("/", "/metrics", "/ready"):
            url = f"http://{address}{path}"
            answer = await asyncio.to_thread(urllib.request.urlopen, url, timeout=10)
            served[path] = answer.read().decode()

    monkeypatch.setattr(process, "wait_for_signal", look)
    done = kvpool("dev", "--capacity", "1MiB", "--bind", "127.0.0.1:0", "--http", address)
    assert done.exit_code == 0, done.output
    assert f"status page, metrics, health, ready at http://{address}" in done.stdout
    assert "<title>" in served["/"]
    assert 'kvpool_server_capacity_bytes{server="dev-0"}' in served["/metrics"]
    assert served["/ready"] == "ready\n"
    with pytest.raises(OSError, match="refused"):  # it ends with the pool
        urllib.request.urlopen(f"http://{address}/", timeout=10)


@pytest.mark.parametrize("option", ["--http", "--bind"])
def test_dev_is_for_this_host(option: str) -> None:
    done = kvpool("dev", "--capacity", "1MiB", "--bind", "127.0.0.1:0", option, "0.0.0.0:0")
    assert done.exit_code == 2
    assert "0.0.0.0:0 is reachable from other machines" in done.stderr
    assert "choose one on 127.0.0.1; `kvpool master` and" in done.stderr
    assert "--secret-file" not in done.stderr  # dev has none
    assert "is up" not in done.stdout


def test_explain(pool: LocalPool) -> None:
    stored, missing = keys("commands", 1)[0].hex(), keys("not there", 1)[0].hex()
    here, gone = as_json(
        "explain", stored, missing, "--namespace", "commands", "--masters", pool.master
    )
    assert (here["key"], here["status"]) == (stored, "hit")
    assert here["replicas"][0]["server"] == "dev-0"
    assert (gone["key"], gone["replicas"]) == (missing, [])
    assert gone["status"] != "hit"
    done = kvpool("explain", stored, missing, "--namespace", "commands", "--masters", pool.master)
    assert "  hit: present on dev-0" in done.stdout
    assert "  never written (since this master started)" in done.stdout
    assert "never written: never" not in done.stdout
    # A block has as many parts as its namespace: with another number it is another block.
    [other] = as_json(
        "explain", stored, "--namespace", "commands", "--parts", "2", "--masters", pool.master
    )
    assert other["status"] != "hit"


def test_explain_says_what_came_of_a_sessions_hints(pool: LocalPool) -> None:
    """Within two heartbeats: one brings the hint to the server, the next one its answer back."""

    async def hint(client: Pool) -> None:
        [chain] = [keys("explain a session", 1)]
        await client.write(NAMESPACE, chain, [b"x" * 4096], session="chat")
        await client.session("chat").hint(resume_in=1e6)
        await client.session("elsewhere").hint(resume_in=5)

    pool.ask(hint)
    where = ("--masters", pool.master)
    until = time.monotonic() + 20
    while not (report := as_json("explain", "--session", "chat", *where))["servers"]:
        assert time.monotonic() < until
    assert report["hints"][0]["resume_in"] == 1e6
    assert (report["servers"][0]["server"], report["servers"][0]["followed"]) == ("dev-0", False)
    shown = kvpool("explain", "--session", "chat", *where).stdout
    assert "it resumes in 1000000.0 s" in shown
    assert "dev-0: not followed, or only in part: " in shown
    assert "no server has answered" in kvpool("explain", "--session", "elsewhere", *where).stdout
    assert "no hint about it" in kvpool("explain", "--session", "nobody", *where).stdout
    pool.ask(lambda client: client.session("chat").arrived())
    assert "its prompt is here" in kvpool("explain", "--session", "chat", *where).stdout
    pool.ask(lambda client: client.session("chat").end())
    assert "it ends" in kvpool("explain", "--session", "chat", *where).stdout
    assert kvpool("explain", "--session", "a\nb", *where).exit_code == 2
    assert kvpool("explain", *where).exit_code == 2


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("command", ["status", "doctor", "usage"])
def test_no_word_is_cut_at_the_width_of_a_terminal(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch, command: str, width: int
) -> None:
    monkeypatch.setattr(shared.console, "width", width)
    lines = kvpool(command, "--masters", pool.master).stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert "\u2026" not in "".join(lines)
    whole = {"status": "256 MiB", "usage": "hit rate"}.get(command, "inproc:InprocTransport")
    assert any(whole in line for line in lines), lines


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "--batch", "0"),
        ("bench", "--batch", "1025"),
        ("bench", "--rounds", "0"),
        ("replay", "--limit", "0"),
        ("replay", "--servers", "65"),
        ("explain", "ff", "--namespace", "n", "--parts", "257"),
        ("explain", "zz", "--namespace", "n"),
        ("explain", "ff", "--namespace", "n"),  # too short for a key
        ("dev", "--servers", "0"),
    ],
)
def test_numbers_out_of_range_are_usage_errors(arguments: tuple[str, ...]) -> None:
    assert kvpool(*arguments).exit_code == 2


def test_usage(pool: LocalPool) -> None:
    (of_pool,) = as_json("usage", "--masters", pool.master)
    assert of_pool["name"] == ""
    assert sum(of_pool["used_bytes"].values()) > 0
    assert as_json("usage", "--by", "namespace", "--masters", pool.master)
    assert "(the pool)" in kvpool("usage", "--masters", pool.master).stdout
    assert kvpool("usage", "--by", "colour", "--masters", pool.master).exit_code == 2
