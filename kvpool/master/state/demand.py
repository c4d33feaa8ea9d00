"""How much memory would be enough: the live working set, measured by what clients ask a master for.

A block is *live* between two requests for it: memory is of use to it in that time, and in no
other. The live working set is the mean of the bytes that are live, over the last minutes. By
Little's law that is the sum of the times from each request for a block to the next one, divided by
the time of observation; no window has to be chosen, a block of an ended conversation does not
count, and a block that was evicted meanwhile does, because the request for it is what counts.

Only blocks whose hash is below a threshold are followed, and each stands for as many as the
threshold leaves out (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvpool import spans
from kvpool.master.state.directory import ChainMatch, Directory
from kvpool.shares import Recent
from kvpool.spans import MarkedChain
from kvpool.tenant_names import TENANTS_MAX, tenant_of
from kvpool.types import Demand, Namespace, Run, WorkingSet

#: Blocks followed at once for one tenant; of n tenants each has an n-th. With more, its threshold
#: is halved.
FOLLOWED_MAX: Final = 8192
#: However many tenants there are, each has so many.
_FOLLOWED_MIN: Final = 64
#: Namespaces with figures of their own; one more drops the one that was asked for longest ago, of
#: a tenant that has more than its part.
NAMESPACES_MAX: Final = 256
#: The figures are means over about this many seconds.
_MEAN_S: Final = 600.0
#: A block that was not asked for in so long is forgotten: a request after that is as for a new one.
_FORGET_S: Final = 3600.0
#: Of the hash of a digest, the bits that the threshold is compared with.
_HASH_BITS: Final = 30
_HASH_MASK: Final = (1 << _HASH_BITS) - 1
#: What writers say of sizes is theirs; a message has to hold the product.
_SIZE_MAX: Final = 1 << 62
#: Weight of the earlier matches with each new one.
_KEEP: Final = 0.99
#: Blocks of one call that are looked at; no client of ours asks for more at once.
_BATCH_MAX: Final = 4096
#: Of so many matches one is looked at behind its first miss: so many blocks, evenly spread.
_HOLES_EVERY: Final = 16
_HOLES_MAX: Final = 128
#: Spans of a chain whose last blocks are not followed one by one.
_SPANS_MIN: Final = 2
#: Forgotten by one call, at most.
_FORGET_MAX: Final = 64


class DemandMeter:
    """What clients ask one master for; `now` is in seconds.

    A call costs a comparison for each block, and one step more for each that is followed. One
    tenant can make it hold `FOLLOWED_MAX` blocks, all can `NAMESPACES_MAX` namespaces. A flood of
    one makes no figure of another coarser.
    """

    def __init__(self, directory: Directory | None = None) -> None:
        self._directory = directory
        #: By tenant; who has asked for nothing for the longest time first.
        self._samples: OrderedDict[str, _Sample] = OrderedDict()
        self._figures: Recent[Namespace, tuple[Namespace, _Figures]] = Recent(NAMESPACES_MAX)
        # Sums over the last matches, which fade with each: prompts that were found, their servers;
        # blocks that were looked behind a hole, and the others of those prompts.
        self._chains = 0.0
        self._servers = 0.0
        self._held = 0.0
        self._beyond = 0.0

    def asked(
        self, namespace: Namespace, digests: Sequence[bytes], now: float, size: int = 0
    ) -> None:
        """These blocks were looked up, or are being written with `size` bytes each."""
        salt = hash(namespace)
        keys = [hash(digest) ^ salt for digest in digests[:_BATCH_MAX]]
        self._count(namespace, [(keys, 1)], now, size)

    def asked_chain(
        self, namespace: Namespace, chain: MarkedChain, now: float, behind: Sequence[int] = ()
    ) -> None:
        """These blocks were looked up for a prompt, which goes on with the spans `behind`. A span
        is followed as one.

        The blocks at the end, in no whole span, count with the spans: in the next prompt they are
        in one, which nobody has asked for before. Only short chains are followed block by block.
        """
        salt = hash(namespace)
        keys = [mark ^ salt for mark in (*chain.marks, *behind)]
        prompt = len(chain) + len(behind) * spans.SPAN_BLOCKS
        if len(keys) >= _SPANS_MIN:
            self._count(namespace, [(keys, prompt / len(keys))], now, 0, prompt)
            return
        rest = chain.digests(len(chain.marks) * spans.SPAN_BLOCKS, len(chain))
        single = [hash(digest) ^ salt for digest in rest]
        self._count(namespace, [(keys, spans.SPAN_BLOCKS), (single, 1)], now, 0, prompt)

    def _count(
        self,
        namespace: Namespace,
        asked: Sequence[tuple[Sequence[int], float]],
        now: float,
        size: int = 0,
        prompt: int = 0,
    ) -> None:
        """Hashes of what was asked for, each of so many blocks; of a `prompt` of so many."""
        tenant = tenant_of(namespace.name)
        known = self._figures.get(tenant, namespace) or (namespace, _Figures(now))
        self._figures.put(tenant, namespace, known)
        figures = known[1]
        figures.block_bytes = size or figures.block_bytes
        sample = self._samples.get(tenant)
        if sample is None:
            sample = self._samples[tenant] = _Sample()
            if len(self._samples) > TENANTS_MAX:
                self._samples.popitem(last=False)
        self._samples.move_to_end(tenant)
        figures.add(sample.count(asked, now), now, prompt)
        sample.forget(now, max(FOLLOWED_MAX // len(self._samples), _FOLLOWED_MIN))
        quiet = next(iter(self._samples.values()))
        if now - quiet.counted_at >= _FORGET_S:
            self._samples.popitem(last=False)

    def found(self, namespace: Namespace, chain: MarkedChain, match: ChainMatch, nth: int) -> None:
        """A prompt was looked up, as the `nth` that ended so; 0: the client asks again."""
        self.matched(match.runs)
        if nth and nth % _HOLES_EVERY == 0 and self._directory is not None:
            first, count = match.length + 1, len(chain)
            step = max(1, -(-(count - first) // _HOLES_MAX))
            behind = chain.digests(first, count, step)
            listed = listed_of(self._directory, namespace, behind) * step
            self.looked_beyond(match.length, listed)

    def matched(self, runs: Sequence[Run]) -> None:
        """The lookup of a prompt found these runs."""
        if runs:
            servers = {replica.server for run in runs for replica in run.replicas[:1]}
            self._chains = self._chains * _KEEP + 1
            self._servers = self._servers * _KEEP + len(servers)

    def looked_beyond(self, reachable: int, beyond: int) -> None:
        """Of a prompt's blocks, so many can be read, and so many lie behind a missing one."""
        self._held = self._held * _KEEP + reachable + beyond
        self._beyond = self._beyond * _KEEP + beyond

    def demand(self, now: float) -> Demand:
        """The figures now; the largest working set first."""
        sets = [
            WorkingSet(
                namespace,
                min(_SIZE_MAX, round(blocks * figures.block_bytes)),
                round(blocks),
                min(_SIZE_MAX, round(figures.prompt * figures.block_bytes)),
            )
            for namespace, figures in self._figures.values()
            for blocks in [figures.mean(now)]
        ]
        began = min((figures.began for _, figures in self._figures.values()), default=now)
        return Demand(
            now - began,
            tuple(sorted((one for one in sets if one.size), key=lambda one: -one.size)),
            self._servers / self._chains if self._chains else 0.0,
            self._beyond / self._held if self._held else 0.0,
        )


def listed_of(directory: Directory, namespace: Namespace, digests: Sequence[bytes]) -> int:
    """How many of these blocks some server has, in whatever order."""
    blocks = directory.blocks.get(namespace)
    found = blocks.get_all(digests) if blocks is not None else []
    return len(found) - found.count(None)


class _Sample:
    """The blocks of one tenant that are followed."""

    __slots__ = ("_changed_at", "_threshold", "asked", "counted_at")

    def __init__(self) -> None:
        #: When each was asked for last, by a hash of its key; the longest ago first.
        self.asked: OrderedDict[int, float] = OrderedDict()
        self.counted_at = 0.0
        self._threshold = 1 << _HASH_BITS
        self._changed_at = 0.0

    def count(self, asked: Sequence[tuple[Sequence[int], float]], now: float) -> float:
        """Block-seconds since the requests before; an estimate, where not all are followed."""
        self.counted_at = now
        threshold, last_asked = self._threshold, self.asked
        waited = 0.0
        for keys, blocks in asked:
            for key in keys:
                if key & _HASH_MASK < threshold:
                    before = last_asked.get(key)
                    if before is not None:
                        waited += (now - before) * blocks
                        last_asked.move_to_end(key)
                    last_asked[key] = now
        return waited * (1 << _HASH_BITS) / threshold

    def forget(self, now: float, limit: int) -> None:
        """Forget what was not asked for in a long time, and follow no more than `limit`."""
        asked = self.asked
        for _ in range(_FORGET_MAX):
            oldest = next(iter(asked.items()), None)
            if oldest is None or now - oldest[1] < _FORGET_S:
                break
            asked.popitem(last=False)
        if len(asked) > limit:
            self._threshold, self._changed_at = max(1, self._threshold // 2), now
            for key in [key for key in asked if key & _HASH_MASK >= self._threshold]:
                del asked[key]
            while len(asked) > limit:
                asked.popitem(last=False)
        few = len(asked) < limit // 8 and self._threshold < 1 << _HASH_BITS
        if few and now - self._changed_at > _MEAN_S:
            # A flood of keys, or a time with more work, is over: follow more blocks again.
            self._threshold, self._changed_at = self._threshold * 2, now


class _Figures:
    """Sums of one namespace that fade with `_MEAN_S`."""

    __slots__ = ("_at", "_prompts", "_waited", "began", "block_bytes", "prompt")

    def __init__(self, now: float) -> None:
        self.began = now
        self.block_bytes = 0
        self._at = now
        self._waited = 0.0  # block-seconds
        self._prompts = 0.0
        self.prompt = 0.0  # blocks, of the mean one

    def add(self, waited: float, now: float, prompt: int) -> None:
        fade = math.exp((self._at - now) / _MEAN_S)
        self._waited = self._waited * fade + waited
        self._prompts = self._prompts * fade + (prompt > 0)
        if prompt:
            self.prompt += (prompt - self.prompt) / self._prompts
        self._at = now

    def mean(self, now: float) -> float:
        seen = _MEAN_S * -math.expm1((self.began - now) / _MEAN_S)
        waited = self._waited * math.exp((self._at - now) / _MEAN_S)
        return waited / seen if seen > 0 else 0.0
