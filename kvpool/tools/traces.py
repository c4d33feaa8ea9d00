"""Recorded traces: prompts of real traffic, in the formats in which they are published.

| format | rows | time | tokens of a block |
|---|---|---|---|
| `mooncake` | `timestamp`, `input_length`, `output_length`, `hash_ids` | ms | 512 |
| `qwen-bailian` | the same, `chat_id`, `parent_chat_id` | s | 16 |
| `multi-turn` | the same, `session_id`, `delay`; or `session_id`, `turns` | ms | 512 |
| `sharegpt` | `conversations` or `messages`: lists of texts | none | 16 |

`parse` does no I/O; `load` opens a file (or stdin) for it, and unpacks gzip. What a file leaves out
is assumed, and named in `Trace.summary`.
Sources: https://github.com/kvcache-ai/Mooncake (FAST25-release),
https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon,
https://github.com/ai-dynamo/aiperf (docs/benchmark-modes/trace-replay.md)
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from kvpool.errors import ConfigError


class Request(NamedTuple):
    """One prompt: the ids of its blocks, head first. Equal ids mean an equal prefix up to there.

    A prompt that is shorter than a block may have none.
    """

    session: int
    chain: tuple[int, ...]
    time_s: float = 0.0
    #: Seconds until the session's next prompt; None: this is its last one.
    resumes_s: float | None = None
    #: Tokens of the prompt and of its answer; 0: not known.
    length: int = 0
    output: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """What a file has, in the order of time. `block` is the tokens that one id stands for."""

    name: str
    format: str
    unit: str
    block: int
    requests: list[Request]
    sessions: int
    notes: tuple[str, ...] = ()

    @property
    def span_s(self) -> float:
        """From the first prompt to the last one."""
        return self.requests[-1].time_s - self.requests[0].time_s

    @property
    def summary(self) -> str:
        """One line: what was understood."""
        longest = max(one.length or len(one.chain) * self.block for one in self.requests)
        time = f"times in {self.unit}" if self.unit else "no times"
        parts = [
            f"trace {self.name}: {self.format}",
            f"{time}",
            f"{len(self.requests):,} prompts",
            f"{self.sessions:,} sessions",
            f"blocks of {self.block} tokens",
            f"{self.span_s:,.3f} s",
            f"the longest prompt has {longest:,} tokens",
        ]
        return "; ".join([", ".join(parts), *self.notes])


class _Format(NamedTuple):
    unit: str
    block: int
    #: One of these fields in a row makes it this format, and no other above it in the table.
    fields: tuple[str, ...]


#: In the order in which `auto` asks: the most telling fields first.
FORMATS: Final = {
    "sharegpt": _Format("", 16, ("conversations", "messages")),
    "qwen-bailian": _Format("s", 16, ("chat_id", "parent_chat_id")),
    "multi-turn": _Format("ms", 512, ("session_id", "turns", "delay")),
    "mooncake": _Format("ms", 512, ("hash_ids", "timestamp", "input_length")),
}
AUTO: Final = "auto"
#: What `--format` takes.
NAMES: Final = ", ".join([AUTO, *FORMATS])
_UNITS: Final = {"s": 1.0, "ms": 1e-3}

#: Bytes of a row, and of a file that is one JSON list.
_ROW_MAX: Final = 16 << 20
_LIST_MAX: Final = 2 << 30
_TOKENS_MAX: Final = 100_000_000
_TIME_MAX: Final = 1e15
#: Tokens of a text are not known without its tokenizer; English and code have about so many.
_CHARACTERS_A_TOKEN: Final = 4
#: Above these rates of all prompts, times that were read as milliseconds are taken for seconds,
#: which is certain (an error) or likely (a note). Fewer prompts than `_RATE_ROWS` say nothing.
_TOKENS_A_SECOND_MAX: Final = 10e6
_PROMPTS_A_SECOND: Final = 50
_RATE_ROWS: Final = 10
#: Whole numbers that span more than this as seconds are taken for milliseconds.
_SPAN_MAX_S: Final = 86_400.0
#: Delays that all are shorter are likely to be seconds.
_DELAY_MS: Final = 100.0
#: How long an answer takes that has no time of its own: to its first token, and for each one.
_ANSWER_S: Final = 0.5
_TOKEN_S: Final = 0.0137
#: Between two prompts of a conversation whose times were not recorded.
_PAUSE_S: Final = 5.2


def load(
    path: Path | str,
    format: str = AUTO,
    *,
    block: int | None = None,
    unit: str | None = None,
    quiet: bool = False,
) -> Trace:
    """The trace in a file, packed with gzip or not; `-` is stdin. Prints its summary to stderr.

    `block` and `unit` (`s` or `ms`) replace what the format says. Raises ConfigError that names the
    line, its value, and what was expected.
    """
    name = "stdin" if str(path) == "-" else Path(path).name
    try:
        with open(0, "rb", closefd=False) if name == "stdin" else open(path, "rb") as raw:
            head = raw.peek(2)[:2] if isinstance(raw, io.BufferedReader) else b""
            file: Any = gzip.GzipFile(fileobj=raw) if head == b"\x1f\x8b" else raw
            trace = parse(_lines(file, name), format, block=block, unit=unit, name=name)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(f"trace {path}: it is no whole gzip file: {error}") from None
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from None
    if not quiet:
        print(trace.summary, file=sys.stderr)
    return trace


def _lines(file: Any, name: str) -> Iterator[bytes]:
    """The rows; a file that is one JSON list is one row, however many lines it has."""
    first, number = True, 0
    while line := file.readline(_ROW_MAX + 1):
        number += 1
        if first and line.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            yield line + file.read(_LIST_MAX)
            return
        if len(line) > _ROW_MAX:
            raise ConfigError(
                f"{name}, line {number}: more than {_ROW_MAX} bytes; the most for a row"
            )
        first = first and not line.strip()
        yield line


def parse(
    lines: Iterable[bytes],
    format: str = AUTO,
    *,
    block: int | None = None,
    unit: str | None = None,
    name: str = "trace",
) -> Trace:
    """The trace in these lines, as `load` has it."""
    if format != AUTO and format not in FORMATS:
        raise ConfigError(f"format {format!r}: expected one of {NAMES}")
    if unit is not None and unit not in _UNITS:
        raise ConfigError(f"time unit {unit!r}: expected s or ms")
    if block is not None and block < 1:
        raise ConfigError(f"block {block}: expected at least 1 token")
    reader: _TraceReader | None = None
    for where, row in _rows(lines, name):
        found = _format_of(row, where)
        if reader is None:
            reader = _TraceReader(found if format == AUTO else format, block, unit, name)
        if found != reader.format and not (found == "mooncake" and reader.format == "multi-turn"):
            raise ConfigError(
                f"{where}: these are fields of {found}, expected {reader.format}: give one format "
                f"a file, and say which with --format ({NAMES})"
            )
        reader.add(row, where)
    if reader is None:
        raise ConfigError(
            f"trace {name} is empty: no requests; expected one JSON object a line, in one of the "
            f"formats {', '.join(FORMATS)}"
        )
    return reader.finish()


def _rows(lines: Iterable[bytes], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        where = f"{name}, line {number}"
        text = _text(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, where)
        if not text.strip():
            continue
        try:
            row = json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, _NotANumber) else "expected a JSON object"
            raise ConfigError(f"{where}: {why}, got {text[:60].strip()!r}") from None
        if isinstance(row, dict):
            yield where, row
            continue
        if not isinstance(row, list):
            raise ConfigError(f"{where}: expected a JSON object, got {text[:60].strip()!r}")
        for position, entry in enumerate(row, 1):
            if not isinstance(entry, dict):
                raise ConfigError(
                    f"{name}, entry {position}: expected an object, got {entry!r:.60}"
                )
            yield f"{name}, entry {position}", entry


class _NotANumber(ValueError):
    pass


def _no_number(text: str) -> NoReturn:
    raise _NotANumber(f"{text} is no number; expected a finite one")


def _text(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: expected JSON lines in UTF-8, got something binary") from None


def _format_of(row: dict[str, Any], where: str) -> str:
    for name, format in FORMATS.items():
        if any(one in row for one in format.fields):
            return name
    have = ", ".join(list(row)[:8]) or "none"
    raise ConfigError(
        f"{where}: no known format has these fields: {have}; expected timestamp, input_length, "
        f"output_length and hash_ids, or another of the formats {', '.join(FORMATS)}"
    )


@dataclass(slots=True)
class _TraceSession:
    """What was read of one session, in the order of the file."""

    number: int
    time_s: float = 0.0  # when its next prompt comes, without a timestamp of its own
    length: int = 0  # tokens so far, with the answers
    chain: tuple[int, ...] = ()


class _TraceReader:
    """Requests from rows of one format."""

    def __init__(self, format: str, block: int | None, unit: str | None, name: str) -> None:
        self.format = format
        self._name = name
        self._given_unit = unit
        self._unit = unit or FORMATS[format].unit
        self._block = block or FORMATS[format].block
        self._numbers = itertools.count()
        self._sessions: dict[object, _TraceSession] = {}
        self._requests: list[Request] = []
        self._named: dict[tuple[int, object], int] = {}
        self._disordered = 0
        self._latest = -math.inf
        self._fraction = False
        self._delays: list[float] = []
        self._estimated = False
        adders: dict[str, Callable[[dict[str, Any], str], None]] = {
            "mooncake": self._add_mooncake,
            "qwen-bailian": self._add_chat,
            "multi-turn": self._add_turn,
            "sharegpt": self._add_conversation,
        }
        self.add = adders[format]

    # --- rows of each format -----------------------------------------------------------------

    def _add_mooncake(self, row: dict[str, Any], where: str) -> None:
        time_s = self._time(row, where)
        length, output = self._lengths(row, where)
        ids = self._ids(row, where, length)
        if len(set(ids)) != len(ids):
            raise ConfigError(f"{where}: an id is twice in hash_ids; expected prefixes, each once")
        self._append(_TraceSession(next(self._numbers)), ids, time_s, length, output)

    def _add_chat(self, row: dict[str, Any], where: str) -> None:
        chat, parent = (
            _whole(row, name, where, least=-1, default=-1) for name in ("chat_id", "parent_chat_id")
        )
        time_s = self._time(row, where)
        length, output = self._lengths(row, where)
        # An id names what is in a block, not what is before it: the same one may come twice.
        chain = self._chain((), self._ids(row, where, length))
        session = self._sessions.get(parent) if parent != -1 else None
        if session is None:
            session = _TraceSession(next(self._numbers))
        self._sessions[chat] = session
        self._append(session, chain, time_s, length, output)

    def _add_turn(self, row: dict[str, Any], where: str) -> None:
        name = row.get("session_id")
        if name is not None and not isinstance(name, str | int):
            raise ConfigError(f"{where}: session_id is {name!r:.60}, expected text")
        session = _TraceSession(next(self._numbers)) if name is None else self._session(str(name))
        turns = row.get("turns", [row])
        if not isinstance(turns, list) or not turns or not all(isinstance(t, dict) for t in turns):
            raise ConfigError(f"{where}: turns is {turns!r:.60}, expected a list of objects")
        for turn in turns:
            delay = _number(turn, "delay", where, default=0.0)
            if "delay" in turn:
                self._delays.append(delay)
            time_s = session.time_s + delay * _UNITS[self._unit]
            if turn.get("timestamp") is not None:
                time_s = self._time(turn, where)
            text = next(
                (turn[f] for f in ("text", "text_input") if isinstance(turn.get(f), str)), None
            )
            if text is not None:
                length, output = self._tokens(text), _whole(turn, "output_length", where, default=0)
            else:
                length, output = self._lengths(turn, where, required=True)
            if turn.get("hash_ids"):  # ids name the whole prompt
                chain = self._chain((), self._ids(turn, where, length))
            else:  # only what is new: what was before it comes first
                before = session.length
                length += before
                kept = session.chain[: before // self._block]
                count = length // self._block - len(kept)
                chain = self._chain(kept, [(session.number, before, n) for n in range(count)])
            self._append(session, chain, time_s, length, output)
            session.chain = chain

    def _add_conversation(self, row: dict[str, Any], where: str) -> None:
        messages = row.get("conversations", row.get("messages"))
        if not isinstance(messages, list) or not messages:
            raise ConfigError(
                f"{where}: conversations is {messages!r:.60}, expected a list of from and value, "
                "or of role and content"
            )
        session = _TraceSession(next(self._numbers))
        session.time_s = float(session.number)
        prompt = ""
        size = self._block * _CHARACTERS_A_TOKEN
        for number, one in enumerate(messages, 1):
            who, text = _message(one, f"{where}, message {number}")
            if who in _ANSWERS:
                output = self._tokens(text)
                whole = range(0, len(prompt) - size + 1, size)
                chain = self._chain((), [prompt[at : at + size] for at in whole])
                self._append(session, chain, session.time_s, self._tokens(prompt), output)
                session.time_s += _PAUSE_S
            prompt += text

    # --- parts of a row ------------------------------------------------------------------------

    def _time(self, row: dict[str, Any], where: str) -> float:
        value = _number(row, "timestamp", where)
        if self._unit == "ms" and not value.is_integer() and self._given_unit is None:
            raise ConfigError(
                f"{where}: timestamp is {value:g}, which may be seconds; {self.format} has whole "
                "milliseconds: say which with --time-unit s or --time-unit ms"
            )
        self._fraction = self._fraction or not value.is_integer()
        return value * _UNITS[self._unit] if self._unit == "s" else value / 1000

    def _lengths(
        self, row: dict[str, Any], where: str, *, required: bool = False
    ) -> tuple[int, int]:
        default = None if required or "hash_ids" not in row else 0
        length = _whole(row, "input_length", where, default=default)
        return length, _whole(row, "output_length", where, default=0)

    def _ids(self, row: dict[str, Any], where: str, length: int) -> tuple[int, ...]:
        ids = row.get("hash_ids", [] if 0 < length < self._block else None)
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise ConfigError(f"{where}: hash_ids is {ids!r:.60}, expected a list of integers")
        blocks = -(-length // self._block)
        if length and len(ids) > blocks:
            raise ConfigError(
                f"{where}: hash_ids has {len(ids)} ids, but {length} tokens are {blocks} blocks of "
                f"{self._block}; say how many tokens a block has with --block-tokens"
            )
        if len(ids) < length // self._block or not (ids or length):
            raise ConfigError(
                f"{where}: hash_ids has {len(ids)} ids, but {length} tokens are {blocks} blocks of "
                f"{self._block}; expected an id for each, or --block-tokens"
            )
        return tuple(ids)

    def _tokens(self, text: str) -> int:
        self._estimated = True
        return -(-len(text) // _CHARACTERS_A_TOKEN)

    def _chain(self, before: Sequence[int], names: Sequence[object]) -> tuple[int, ...]:
        """`before`, then an id for each name that stands for all names up to there."""
        chain = list(before)
        for name in names:
            place = (chain[-1] if chain else -1, name)
            chain.append(self._named.setdefault(place, len(self._named)))
        return tuple(chain)

    def _session(self, key: object) -> _TraceSession:
        found = self._sessions.get(key)
        if found is None:
            found = self._sessions[key] = _TraceSession(next(self._numbers))
        return found

    # --- all of them ---------------------------------------------------------------------------

    def _append(
        self,
        session: _TraceSession,
        chain: tuple[int, ...],
        time_s: float,
        length: int,
        output: int,
    ) -> None:
        self._disordered += time_s < self._latest
        self._latest = max(self._latest, time_s)
        self._requests.append(Request(session.number, chain, time_s, None, length, output))
        session.length = length + output
        session.time_s = time_s + _ANSWER_S + _TOKEN_S * output

    def finish(self) -> Trace:
        """All of them in the order of time. Raises ConfigError where the unit cannot be right."""
        if not self._requests:
            raise ConfigError(f"trace {self._name}: no requests; no message is answered")
        requests = sorted(self._requests, key=lambda request: request.time_s)
        following: dict[int, float] = {}
        for at in range(len(requests) - 1, -1, -1):
            one = requests[at]
            if one.session in following:
                gap_s = following[one.session] - one.time_s
                requests[at] = one._replace(resumes_s=gap_s)
            following[one.session] = one.time_s
        if self.format == "mooncake":  # sessions are numbered in the order of time
            requests = [one._replace(session=n) for n, one in enumerate(requests)]
        unit, block = self._unit, self._block
        made = Trace(self._name, self.format, unit, block, requests, len(following))
        return replace(made, notes=(*self._check_unit(made), *self._notes()))

    def _check_unit(self, trace: Trace) -> tuple[str, ...]:
        if self._given_unit is not None or not trace.unit or not trace.span_s:
            return ()
        span_s, count = trace.span_s, len(trace.requests)
        if trace.unit == "s":
            if not self._fraction and span_s > _SPAN_MAX_S:
                raise ConfigError(
                    f"trace {trace.name}: whole timestamps that span {span_s:,.0f} seconds may be "
                    f"milliseconds; {trace.format} has seconds: say which with --time-unit s or "
                    "--time-unit ms"
                )
            if not self._fraction and count >= _RATE_ROWS:
                return ("times without a fraction may be milliseconds: if so, --time-unit ms",)
            return ()
        tokens = sum(one.length or len(one.chain) * trace.block for one in trace.requests)
        if count >= _RATE_ROWS and tokens / span_s > _TOKENS_A_SECOND_MAX:
            raise ConfigError(
                f"trace {trace.name}: {tokens:,} tokens of prompts in {span_s:g} s may be times in "
                f"seconds; {trace.format} has milliseconds: say which with --time-unit s or "
                "--time-unit ms"
            )
        if count >= _RATE_ROWS and count / span_s > _PROMPTS_A_SECOND:
            return ("so many prompts a second may be times in seconds: if so, --time-unit s",)
        if self._delays and 0 < max(self._delays) < _DELAY_MS:
            return ("delays this short may be seconds: if so, --time-unit s",)
        return ()

    def _notes(self) -> Iterator[str]:
        if self._disordered and self.format in ("mooncake", "qwen-bailian"):
            yield f"{self._disordered:,} prompts were out of order and are sorted"
        if self._estimated:
            yield f"tokens are estimated, {_CHARACTERS_A_TOKEN} characters each"
        if self.format == "multi-turn":
            yield f"an answer is taken to last {_ANSWER_S:g} s and {_TOKEN_S * 1e3:g} ms a token"
        if self.format == "sharegpt":
            yield f"a session a second and {_PAUSE_S:g} s between its prompts are assumed"


_ANSWERS: Final = frozenset({"gpt", "chatgpt", "bard", "bing", "model", "assistant"})


def _message(message: object, where: str) -> tuple[str, str]:
    """Who says what."""
    if isinstance(message, dict):
        for who, what in (("from", "value"), ("role", "content")):
            if isinstance(message.get(who), str) and isinstance(message.get(what), str):
                return message[who], message[what]
    raise ConfigError(f"{where}: expected from and value, or role and content, got {message!r:.60}")


def _number(row: dict[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = row.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _TIME_MAX:
        raise ConfigError(
            f"{where}: {name} is {_shown(value)}, expected a number from 0 to {_TIME_MAX:g}"
        )
    return float(value)


def _whole(
    row: dict[str, Any], name: str, where: str, *, least: int = 0, default: int | None = None
) -> int:
    value = row.get(name, default)
    if type(value) is not int or not least <= value <= _TOKENS_MAX:
        raise ConfigError(
            f"{where}: {name} is {_shown(value)}, expected a whole number from {least} to "
            f"{_TOKENS_MAX:,}"
        )
    return value


def _shown(value: object) -> str:
    return "missing" if value is None else f"{value!r:.60}"
