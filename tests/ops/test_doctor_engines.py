"""`kvpool doctor --engine`: why two engines share nothing, from what their `/metrics` say."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvpool.errors import ConfigError
from kvpool.ops import engines
from kvpool.ops.engines import METRIC, DescribedEngine, examine_engines, metrics_url, parse_engines
from kvpool.ops.finding import Finding
from tests.support.commands import kvpool

ONE = {
    "namespace": "vllm/2 model=qwen shape=11",
    "model": "qwen",
    "shape": "11",
    "shape.hf.rope_parameters.rope_theta": "10000.0",
    "shape.module.Phi3LongRoPE": "base=10000.0 rotary_dim=32 use_long_rope=False",
}


def page(fields: Mapping[str, str], engine: int = 0, value: float = 1.0) -> str:
    lines = ["# TYPE vllm:kvpool_name_info gauge", "vllm:num_requests_running 0.0"]
    for field, text in fields.items():
        escaped = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        labels = f'engine="{engine}",field="{field}",model_name="m",value="{escaped}"'
        lines.append(f"{METRIC}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"


Serve = Callable[[str], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Answers every request with a page, as a vLLM server does; gives its address."""
    servers: list[ThreadingHTTPServer] = []

    def start(text: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def stranger() -> Iterator[Callable[[list[bytes]], str]]:
    """Sends these bytes to who connects, 50 ms after one another; gives its address."""
    listeners: list[socket.socket] = []

    def start(pieces: list[bytes]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def answer() -> None:
            with listener.accept()[0] as peer:
                peer.recv(65536)
                for piece in pieces:
                    try:
                        peer.sendall(piece)
                    except OSError:
                        return
                    time.sleep(0.05)

        threading.Thread(target=answer, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener in listeners:
        listener.close()


async def compare(serve: Serve, other: Mapping[str, str]) -> Finding:
    findings = await examine_engines([serve(page(ONE)), serve(page(other))])
    assert [finding.verdict for finding in findings[:2]] == ["ok", "ok"]
    return findings[2]


async def test_engines_with_one_name_share(serve: Serve) -> None:
    finding = await compare(serve, ONE)
    assert (finding.verdict, finding.text) == ("ok", "share blocks")


async def test_the_fields_that_differ_are_named_and_not_their_hash(serve: Serve) -> None:
    other = {
        **ONE,
        "namespace": "vllm/2 model=qwen shape=22",
        "shape": "22",
        "shape.hf.rope_parameters.rope_theta": "50000.0",
        "shape.module.Phi3LongRoPE": "base=50000.0 rotary_dim=32 use_long_rope=True",
        "shape.module.Only": "here",
    }
    finding = await compare(serve, other)
    assert finding.verdict == "fail"
    assert "hf.rope_parameters.rope_theta 10000.0 and 50000.0" in finding.text
    assert (
        "module.Phi3LongRoPE base=10000.0 use_long_rope=False and base=50000.0 use_long_rope=True"
        in finding.text
    )
    assert "module.Only none and here" in finding.text
    assert "rotary_dim" not in finding.text
    assert "shape 11" not in finding.text
    assert "--hf-overrides" in finding.advice
    assert "--max-model-len" in finding.advice


async def test_a_variable_that_only_some_hosts_set_is_named(serve: Serve) -> None:
    without, has = ({**ONE, "namespace": seed, "seed": seed} for seed in ("unset", "a1b2c3d4"))
    finding = (await examine_engines([serve(page(without)), serve(page(has))]))[2]
    assert "seed unset and a1b2c3d4" in finding.text
    assert "PYTHONHASHSEED to one value on every host, or on none: `unset`" in finding.advice


async def test_what_an_engine_refuses_or_does_not_say_is_a_finding(serve: Serve) -> None:
    refused = serve(page({"problem": 'nothing is shared: "x"\nfiles'}))
    silent = serve("vllm:num_requests_running 0.0\n")
    one, two, three = await examine_engines([refused, silent, "127.0.0.1:1"])
    assert (one.verdict, one.text) == ("fail", 'nothing is shared: "x" files')
    assert (two.verdict, "after its first step" in two.advice) == ("fail", True)
    (alone,) = await examine_engines([serve(f"# TYPE {METRIC} gauge\n")])
    assert (alone.verdict, "--kv-transfer-config" in alone.advice) == ("warn", False)
    assert (three.verdict, "refused" in three.text) == ("fail", True)


def test_each_rank_of_one_server_is_an_engine_and_old_series_do_not_count() -> None:
    old = page({"namespace": "before"}, value=0.0)
    found = parse_engines("a", page(ONE) + page({**ONE, "namespace": "n"}, engine=1) + old)
    assert [engine.address for engine in found] == ["a engine 0", "a engine 1"]
    assert [engine.fields["namespace"] for engine in found] == [ONE["namespace"], "n"]


def test_what_anybody_may_send_is_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    many = "".join(page({f"f{n}": "v"}, engine=n) for n in range(100))
    assert len(parse_engines("a", many)) == 64
    (foreign,) = parse_engines("a", page({"namespace": "n\x1b[2Jm"}))
    assert foreign.fields["namespace"] == "n?[2Jm"  # no terminal is told to do anything
    (wide,) = parse_engines("a", page({f"f{n}": "v" for n in range(5000)}))
    assert len(wide.fields) == 4096
    monkeypatch.setattr(engines, "_PAGE_BYTES_MAX", 1 << 20)
    found = engines.read_engines(serve("x" * (2 << 20)))
    assert isinstance(found, Finding)
    assert "more than 1 MiB" in found.text
    assert parse_engines("a", f"{METRIC}{{broken\n{METRIC}{{}} 1.0\n{METRIC} 1.0") == []
    differing = {f"f{n}": "v" for n in range(50)}
    finding = engines.difference(
        DescribedEngine("a", ONE), DescribedEngine("b", {"namespace": "n", **differing})
    )
    assert "and 41 more" in finding.text


OK = b"HTTP/1.0 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"HTTP/1.0 200 OK\r\n", *[b"x: y\r\n"] * 90], "no whole answer within"),
        ([OK, *[b"x"] * 90], "no whole answer within"),
        ([b"no web server\r\n\r\n"], "no web server"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], "IncompleteRead"),
        ([b"HTTP/1.1 500 \x1b[2J\r\n\r\n"], "?[2J"),
        ([b"HTTP/1.1 500 " + b"x" * 60_000 + b"\r\n\r\n"], "xxx…"),
        ([b"HTTP/1.1 302 a\r\nLocation: http://10.0.0.1/metrics\r\n\r\n"], "it redirects to http"),
        ([b"HTTP/1.1 302 a\r\nLocation: file:///etc/passwd\r\n\r\n"], "file:///etc/passwd"),
    ],
)
def test_a_strangers_answer_is_one_short_finding_in_time(
    stranger: Callable[[list[bytes]], str],
    monkeypatch: pytest.MonkeyPatch,
    pieces: list[bytes],
    text: str,
) -> None:
    monkeypatch.setattr(engines, "_TIMEOUT_S", 1.0)
    began = time.monotonic()
    found = engines.read_engines(stranger(pieces))
    assert time.monotonic() - began < 3.0
    assert isinstance(found, Finding)
    assert (found.verdict, text in found.text) == ("fail", True), found
    assert found.text.isprintable()
    assert len(found.text) < 1200


def test_no_page_takes_long_to_compare() -> None:
    began = time.monotonic()
    labels = ["a" * 1_000_000, 'a="' + '\\"' * 400_000, 'a="' + "b " * 400_000, "} " * 400_000]
    hostile = "".join(f"{METRIC}{{{text}}} 1.0\n" for text in labels)
    assert parse_engines("a", hostile) == []
    assert parse_engines("a", f'{METRIC}{{field="{"f" * (2 << 20)}"}} 1.0\n') == []
    one, other = (
        parse_engines("a", page({"namespace": name, "f" * 9999: words}))[0]
        for name, words in (
            ("n", " ".join(f"a{n}" for n in range(60_000))),
            ("m" * 50_000, " ".join(f"b{n}" for n in range(60_000))),
        )
    )
    finding = engines.difference(one, other)
    assert "a0 a1" in finding.text
    assert len(finding.text) < 3000
    assert len(engines.described(other).text) < 1200
    assert time.monotonic() - began < 10.0  # it takes 0.2 s; the squares of these, minutes


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("gpu1:8000", "http://gpu1:8000/metrics"),
        ("http://gpu1:8000/", "http://gpu1:8000/metrics"),
        ("https://gpu1/v/metrics", "https://gpu1/v/metrics"),
    ],
)
def test_addresses_are_given_short_or_whole(address: str, url: str) -> None:
    assert metrics_url(address) == url


@pytest.mark.parametrize(
    "address",
    ["file:///etc/passwd", "ftp://gpu1", "http://", "", "gpu1:99999", "gpu1:x", "http://[::1"],
)
def test_what_is_no_web_server_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="expected an address"):
        metrics_url(address)


def test_the_command_compares_engines_without_a_pool(serve: Serve) -> None:
    engines = []
    for fields in (ONE, {**ONE, "namespace": "n", "model": "llama"}):
        engines += ["--engine", serve(page(fields))]
    done = kvpool("doctor", "--json", *engines)
    assert done.code == 1, done.err  # they share nothing
    assert "model qwen and llama" in json.loads(done.out)[2]["text"]
    assert kvpool("doctor", "--engine", "file:///x").code == 2
    assert kvpool("doctor", *engines, "--vllm", "{}").code == 2


def test_the_table_shows_what_looks_like_markup_as_it_is(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank numbers come from the page, too."""
    text = page(ONE) + page(ONE).replace('engine="0"', 'engine="[/red]"')
    monkeypatch.setenv("COLUMNS", "300")
    done = kvpool("doctor", "--engine", serve(text))
    assert done.code == 0, done.err
    assert "engine [/red]" in done.out
