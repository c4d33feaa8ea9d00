"""`kvpool doctor --engine`: compares the names under which engines share, field by field.

An engine with KVPoolConnector describes itself in its `/metrics`, one series for each field. What
is read there may come from anybody: it is bounded, and only shown.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import queue
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final, NamedTuple

from kvpool.errors import ConfigError
from kvpool.ops.doctor import ADVICE
from kvpool.ops.finding import Finding
from kvpool.threads import wait_for_all

#: The metric and the labels that the connector describes its engine with.
METRIC: Final = "vllm:kvpool_name_info"
_TIMEOUT_S: Final = 5.0
_PAGE_BYTES_MAX: Final = 16 << 20
#: Fields of one engine, engines of one address, and differences that are shown of two engines.
_FIELDS_MAX: Final = 4096
_ENGINES_MAX: Final = 64
_SHOWN_MAX: Final = 12
#: Characters of a line that is read, of a value that is shown, and of a name of a field or engine.
_LINE_MAX: Final = 1 << 20
_VALUE_MAX: Final = 1024
_NAME_MAX: Final = 256
_SERIES: Final = re.compile(rf"{re.escape(METRIC)}\{{(.*)\}} (\S+)")
#: Linear time on any line: a name begins at a word's start only, and nothing is tried twice.
_LABEL: Final = re.compile(r'\b(\w++)="((?:[^"\\]++|\\.)*+)"')
_ESCAPES: Final = {r"\\": "\\", r"\"": '"', r"\n": " "}
#: Fields that are hashes of others, which say more.
_DIGESTS: Final = frozenset({"shape"})
_ADVICE: Final = {
    **ADVICE,
    "shape": "give every engine the same model configuration and options",
    "hf": "their model configurations differ: compare config.json and --hf-overrides",
    "module": "their models were built differently: compare --max-model-len and --hf-overrides",
}


class DescribedEngine(NamedTuple):
    """One engine's description, by field; empty if it has not described itself."""

    address: str
    fields: dict[str, str]
    #: Its page has a place for the description: the connector is there.
    has_connector: bool = False


async def examine_engines(addresses: list[str]) -> list[Finding]:
    """Read what these engines say of themselves, and compare all with the first one."""
    pages = await wait_for_all(asyncio.to_thread(read_engines, one) for one in addresses)
    engines: list[DescribedEngine] = []
    findings: list[Finding] = []
    for address, page in zip(addresses, pages, strict=True):
        if isinstance(page, Finding):
            findings.append(page)
            continue
        for engine in page or [DescribedEngine(address, {})]:
            finding = described(engine)
            if len(addresses) > 1 and finding.verdict == "warn":
                finding = finding._replace(verdict="fail")  # it was to be compared
            findings.append(finding)
            if "namespace" in engine.fields:
                engines.append(engine)
    return findings + [difference(engines[0], other) for other in engines[1:]]


def read_engines(address: str) -> list[DescribedEngine] | Finding:
    """The engines behind one server's `/metrics`, or why it cannot be read. Takes 5 s at most."""
    url = metrics_url(address)
    check = f"engine {address}"
    outcome: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
    # No timeout of urllib's bounds a lookup of the name, or an answer that comes byte by byte. The
    # thread is left behind then: it holds one page at most, and ends with the command.
    threading.Thread(target=_read_page, args=(url, outcome), daemon=True).start()
    try:
        page = outcome.get(timeout=_TIMEOUT_S)
    except queue.Empty:
        page = TimeoutError(f"no whole answer within {_TIMEOUT_S:g} s")
    if isinstance(page, Exception):
        why = _printable(str(getattr(page, "reason", "") or page or type(page).__name__))
        advice = "is this the address of a vLLM server?"
        return Finding(check, "fail", f"{url}: {_cut(why)}", advice)
    if len(page) > _PAGE_BYTES_MAX:
        return Finding(check, "fail", f"{url} has more than {_PAGE_BYTES_MAX >> 20} MiB", "")
    return parse_engines(address, page.decode(errors="replace"))


def _read_page(url: str, outcome: queue.SimpleQueue[bytes | Exception]) -> None:
    # No proxy of the environment: it would answer in the engine's place.
    direct = urllib.request.ProxyHandler({})
    try:
        with urllib.request.build_opener(direct, _NoRedirect).open(
            url, timeout=_TIMEOUT_S
        ) as answer:
            outcome.put(answer.read(_PAGE_BYTES_MAX + 1))
    except (OSError, ValueError, http.client.HTTPException) as error:
        outcome.put(error)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An engine's own address has its metrics; a stranger's answer chooses no other one."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        raise urllib.error.URLError(f"it redirects to {newurl}: give that address if you trust it")


def metrics_url(address: str) -> str:
    """Where an engine's metrics are: `host:8000`, `http://host:8000` or the whole URL.

    Raises ConfigError for what is no address of a web server.
    """
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urllib.parse.urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        valid = False
    if not valid:
        raise ConfigError(
            f"--engine {address!r}: expected an address such as http://127.0.0.1:8000"
        )
    path = parts.path.rstrip("/")
    if not path.endswith("/metrics"):
        path += "/metrics"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def parse_engines(address: str, page: str) -> list[DescribedEngine]:
    """The descriptions in a page of metrics, one for each data parallel rank that has sent one."""
    found: dict[str, dict[str, str]] = {}
    for line in io.StringIO(page):  # one at a time: a page may consist of millions
        if not line.startswith(METRIC) or len(line) > _LINE_MAX:
            continue
        if (series := _SERIES.fullmatch(line.rstrip("\r\n"))) is None:
            continue
        labels = {name: _unescaped(value) for name, value in _LABEL.findall(series[1])}
        if series[2] not in ("1", "1.0") or "field" not in labels:  # 0: it was so before
            continue
        engine = _cut(labels.get("engine", "0"), _NAME_MAX)
        if engine in found or len(found) < _ENGINES_MAX:
            fields = found.setdefault(engine, {})
            if len(fields) < _FIELDS_MAX:
                fields[_cut(labels["field"], _NAME_MAX)] = labels.get("value", "")
    if not found and f"# TYPE {METRIC} " in page:
        return [DescribedEngine(address, {}, has_connector=True)]
    several = len(found) > 1
    return [
        DescribedEngine(f"{address} engine {number}" if several else address, fields)
        for number, fields in sorted(found.items())
    ]


def described(engine: DescribedEngine) -> Finding:
    """What one engine says of itself."""
    check = f"engine {engine.address}"
    if problem := engine.fields.get("problem"):
        return Finding(check, "fail", _cut(problem), "see the engine's log")
    name = engine.fields.get("namespace")
    if name is None and engine.has_connector:
        text = "it has answered nothing yet: it says its name after its first step"
        return Finding(check, "warn", text, "send it a request, then look again")
    if name is None:
        return Finding(
            check,
            "warn",
            "it does not say under which name it shares blocks",
            "send it a request: it says so after its first step; is it started with "
            "KVPoolConnector in --kv-transfer-config?",
        )
    return Finding(check, "ok", f"shares blocks as: {_cut(name)}")


def difference(one: DescribedEngine, other: DescribedEngine) -> Finding:
    """Whether two engines share blocks, and if not, in which fields they differ."""
    check = f"{one.address} and {other.address}"
    if one.fields["namespace"] == other.fields["namespace"]:
        return Finding(check, "ok", "share blocks")
    names = [*one.fields, *(name for name in other.fields if name not in one.fields)]
    apart = [
        name
        for name in names
        if name != "namespace" and one.fields.get(name) != other.fields.get(name)
    ]
    telling = [name for name in apart if name not in _DIGESTS] or apart
    texts = [_differs(name, one.fields.get(name), other.fields.get(name)) for name in telling]
    if len(texts) > _SHOWN_MAX:
        texts = [*texts[:_SHOWN_MAX], f"and {len(texts) - _SHOWN_MAX} more"]
    advice = dict.fromkeys(text for name in telling for text in [_advice(name)] if text)
    return Finding(
        check,
        "fail",
        f"share nothing, because they differ in {'; '.join(texts)}",
        "; ".join(advice) or "make these fields equal to share blocks",
    )


def _differs(name: str, one: str | None, other: str | None) -> str:
    """A field and its two values; of values that are lists of words, the words that differ."""
    if one is None or other is None:
        return f"{_plain(name)} {_cut(one or 'none')} and {_cut(other or 'none')}"
    ours, theirs = one.split(" "), other.split(" ")
    if len(ours) > 1 or len(theirs) > 1:
        in_ours, in_theirs = set(ours), set(theirs)
        one = " ".join(word for word in ours if word not in in_theirs) or "none"
        other = " ".join(word for word in theirs if word not in in_ours) or "none"
    return f"{_plain(name)} {_cut(one)} and {_cut(other)}"


def _plain(name: str) -> str:
    return name.removeprefix("shape.")


def _advice(name: str) -> str:
    plain = _plain(name)
    return _ADVICE.get(plain) or _ADVICE.get(plain.partition(".")[0], "")


def _unescaped(text: str) -> str:
    text = re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), text)
    return _printable(text)


def _printable(text: str) -> str:
    """The text without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _cut(text: str, length: int = _VALUE_MAX) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
