"""Prefill on one engine, decode on another: what the first promises, and how long the second waits.

The answer of an engine that prefills is out before its last blocks are in the pool. So the answer
has a promise, which proxies hand on as it is; the engine that decodes loads what is there, and
waits for the rest while it comes faster than it would be computed. Pure: no engine, clock or
socket. (design: load-or-recompute)
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple

from kvpool.types import Namespace

#: Of what a promise looks like. Others are ignored: an engine of another release may have made it.
VERSION: Final = 1
#: Where a request's parameters of this connector have a promise.
PROMISE: Final = "promise"
#: Longest name and tail, in hexadecimal digits. A name has fewer, a tail is a block's key.
_NAME_DIGITS: Final = 16
_TAIL_DIGITS_MAX: Final = 128
_TOKENS_MAX: Final = 1 << 40
_COMPUTING_S_MAX: Final = 3600.0
#: Assumed of computing where neither engine has measured any.
_COMPUTING_S: Final = 1.0
#: Time between two looks for a block: a quarter of what it has been waited for, within limits.
_LOOK_SHARE: Final = 0.25
_LOOK_S_MIN: Final = 0.002
_LOOK_S_MAX: Final = 0.05
#: A wait may always take so long: a master knows of a block some milliseconds after it was stored.
_WAIT_S_MIN: Final = 0.03
#: Of the time that computing the blocks takes which have come, how much longer a wait may take.
_CAME_SHARE: Final = 0.5


class PromisedBlocks(NamedTuple):
    """The pool will have the first `tokens` of a prompt, under the name `name`, and soon.

    `tail` is the engine's hash of those tokens: of another prompt it is another. `computing_s`: the
    seconds in which the engine that promises computes so many. Without `tokens` it is a proxy's,
    which asks both engines at once: some engine computes this very prompt.
    """

    tokens: int | None = None
    tail: bytes = b""
    name: str = ""
    computing_s: float | None = None

    def as_params(self) -> dict[str, Any]:
        """For `kv_transfer_params`: some 200 bytes of JSON."""
        params: dict[str, Any] = {"version": VERSION, "name": self.name, "tokens": self.tokens}
        params["tail"] = self.tail.hex()
        if self.computing_s is not None:
            params["computing_s"] = round(self.computing_s, 6)
        return params


def parse_promise(given: object) -> PromisedBlocks | str:
    """The promise that a client or a proxy hands on, or why it is ignored. Never raises."""
    if not isinstance(given, Mapping):
        return "expected an object"
    if given.get("version") != VERSION or isinstance(given.get("version"), bool):
        return f"expected version {VERSION}: the engines are of different releases"
    tokens, tail, name, computing_s = map(given.get, ("tokens", "tail", "name", "computing_s"))
    given_s = 0.0 if computing_s is None else computing_s
    if type(given_s) not in (int, float) or not 0 <= given_s <= _COMPUTING_S_MAX:
        return f"computing_s: expected seconds, from 0 to {_COMPUTING_S_MAX:g}"
    seconds = None if computing_s is None else float(computing_s)
    if tokens is None:
        return PromisedBlocks(computing_s=seconds)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 < tokens < _TOKENS_MAX:
        return "tokens: expected a whole number from 1"
    if not isinstance(name, str) or len(name) != _NAME_DIGITS:
        return f"name: expected {_NAME_DIGITS} hexadecimal digits"
    if not isinstance(tail, str) or not 0 < len(tail) <= _TAIL_DIGITS_MAX:
        return "tail: expected hexadecimal digits"
    try:
        return PromisedBlocks(tokens, bytes.fromhex(tail), name, seconds)
    except ValueError:
        return "tail: expected hexadecimal digits"


def promise_name(namespaces: Iterable[Namespace]) -> str:
    """What engines that share blocks have in common, in a form that shows nothing else."""
    names = "\n".join(f"{one.name}|{one.parts}" for one in namespaces)
    return hashlib.sha256(names.encode()).hexdigest()[:_NAME_DIGITS] if names else ""


class PromiseState(enum.Enum):
    """What becomes of a promise at the engine that decodes; `TRANSITIONS` are the possible moves.

    The value names a label of the metric `promises`.
    """

    GIVEN = "given"  # its request has not loaded anything yet
    AWAITED = "awaited"  # a load has begun, and waits for blocks that are not there yet
    KEPT = "kept"  # all blocks have come
    BROKEN = "broken"  # some have not come in time; the engine computes them
    FOUND = "found"  # all blocks were there at once, or this engine had them
    OTHER_NAME = "other name"  # of an engine that shares nothing with this one
    OTHER_PROMPT = "other prompt"
    TOO_MANY = "too many"  # as many loads wait as may
    NOT_USED = "not used"  # it is computed, or loaded by another connector; or nobody wants it


_REFUSED: Final = frozenset(
    {PromiseState.OTHER_NAME, PromiseState.OTHER_PROMPT, PromiseState.TOO_MANY}
)
#: Every state that is not here is final, and counted once.
TRANSITIONS: Final[Mapping[PromiseState, frozenset[PromiseState]]] = {
    # on_blocks_allocated; a request that ends or starts anew before that
    PromiseState.GIVEN: _REFUSED
    | {PromiseState.AWAITED, PromiseState.FOUND, PromiseState.NOT_USED},
    # on_load_result of the last rank; a request that ends or starts anew before that
    PromiseState.AWAITED: frozenset(
        {PromiseState.KEPT, PromiseState.BROKEN, PromiseState.NOT_USED}
    ),
}


class GivenPromise:
    """One request's promise at the engine that decodes. It is waited for at most once."""

    def __init__(self, promise: PromisedBlocks, counters: MutableMapping[str, float]) -> None:
        self.promise = promise
        self.state = PromiseState.GIVEN
        self._counters = counters

    def tokens(self, name: str, hashes: Sequence[bytes], tokens_per_hash: int) -> int:
        """Tokens that this engine, which shares under `name`, may wait for; 0: refused, or spent.

        `hashes` are those of the request, each of which names all tokens before it.
        """
        if self.state is not PromiseState.GIVEN:
            return 0
        tokens = self.promise.tokens
        if tokens is None:
            return len(hashes) * tokens_per_hash
        if self.promise.name != name:
            self.move_to(PromiseState.OTHER_NAME)
            return 0
        number, rest = divmod(tokens, tokens_per_hash)
        if rest or number > len(hashes) or bytes(hashes[number - 1]) != self.promise.tail:
            self.move_to(PromiseState.OTHER_PROMPT)
            return 0
        return tokens

    def move_to(self, state: PromiseState) -> None:
        """Nothing happens to a promise that has ended."""
        if self.state not in TRANSITIONS:
            return
        assert state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state
        if state not in TRANSITIONS:
            self._counters[f"promise {state.value}"] += 1

    def wait_limits(
        self, first: int, last: int, prefill_s: float | None, limit_s: float
    ) -> WaitLimits:
        """For the load of tokens `first` to `last`, which this engine computes in `prefill_s`."""
        computing_s = self.promise.computing_s
        if prefill_s is None and computing_s is not None:
            # Of the other engine, whose machine is like this one as a rule.
            prefill_s = computing_s * (last - first) / (self.promise.tokens or last)
        return WaitLimits(_COMPUTING_S if prefill_s is None else prefill_s, limit_s)


class WaitLimits(NamedTuple):
    """How long a load waits for what this engine computes in `compute_s`: at most `limit_s`."""

    compute_s: float
    limit_s: float


class BlockWait:
    """The wait of one load for `blocks` blocks, of which some have come.

    It ends when the rest has not come for as long as computing the rest would take, so that the
    prompt takes at most twice as long as without it; and when all of it takes longer than computing
    the whole, and half of what has come once more: then the blocks come slower than that. Only
    the time without a block to read counts, not that of reading.
    """

    def __init__(self, wait_limits: WaitLimits, blocks: int) -> None:
        self._wait_limits = wait_limits
        self._blocks = blocks
        self._came = 0
        self._silent_s = 0.0  # since a block has come
        self.waited_s = 0.0

    def came(self, blocks: int) -> None:
        """So many more are there."""
        self._came += blocks
        self._silent_s = 0.0

    def waited(self, seconds: float) -> None:
        """So long there was none."""
        self._silent_s += seconds
        self.waited_s += seconds

    def next_look_s(self) -> float | None:
        """Seconds until it is worth looking again; None: it has waited long enough."""
        compute_s, limit_s = self._wait_limits
        left_s = limit_s - self.waited_s
        if not math.isinf(compute_s):
            came = min(1.0, self._came / self._blocks)
            silence_s = max(_WAIT_S_MIN, compute_s * (1 - came))
            whole_s = max(_WAIT_S_MIN, compute_s * (1 + _CAME_SHARE * came))
            left_s = min(left_s, silence_s - self._silent_s, whole_s - self.waited_s)
        if left_s <= 0:
            return None
        look_s = min(self._silent_s * _LOOK_SHARE, _LOOK_S_MAX)
        return min(left_s, max(_LOOK_S_MIN, look_s))
