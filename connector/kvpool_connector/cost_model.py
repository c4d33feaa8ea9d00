"""What a load and what a prefill will take, from what they took: pure.

Both are wanted in seconds before either has begun. Nothing here reads a clock.
"""

from __future__ import annotations

from typing import Final

#: Weight of what is known when a new measurement comes.
_DECAY: Final = 0.8
#: A load so many times faster than expected says that the pool has changed.
_NEWS: Final = 4.0
#: A load that brought nothing in some time would have taken this much longer, for all we know.
_UNKNOWN: Final = 2.0
#: Assumed of a pool before anything was measured: a slow local network.
_PRIOR_LATENCY_S: Final = 0.002
_PRIOR_BYTES_S: Final = 1e9
#: Steps with fewer prompt tokens say more about the step than about the tokens.
PREFILL_TOKENS_MIN: Final = 32


class LoadTime:
    """Seconds of a load as latency + bytes / bandwidth: a line through the latest loads."""

    def __init__(self) -> None:
        self.samples = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def gave_up(self, size: int, arrived: int, seconds: float) -> None:
        """Only a part of a load had come when it was given up: what was before is over.

        Of a load of which nothing had come all that is known is that it takes longer.
        """
        self._forget()
        self.observe(arrived or size, seconds if arrived else _UNKNOWN * seconds)

    def disappointed(self, size: int, seconds: float) -> None:
        """A load took longer than what it was to save: the pool is not what it was."""
        self._forget()
        self.observe(size, seconds)

    def observe(self, size: int, seconds: float) -> None:
        """A load of `size` bytes took so long."""
        x, y = float(max(size, 1)), max(seconds, 1e-6)
        if y * _NEWS < self.seconds(size):  # so much faster that what was before is over
            self._forget()
        self.samples += 1
        self._weight = self._weight * _DECAY + 1
        self._x = self._x * _DECAY + x
        self._y = self._y * _DECAY + y
        self._xx = self._xx * _DECAY + x * x
        self._xy = self._xy * _DECAY + x * y

    def seconds(self, size: int) -> float:
        latency_s, per_byte_s = self._line()
        return latency_s + size * per_byte_s

    @property
    def bandwidth(self) -> float:
        """Bytes per second, latency apart."""
        return 1 / self._line()[1]

    def _forget(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def _line(self) -> tuple[float, float]:
        if not self._weight:
            return _PRIOR_LATENCY_S, 1 / _PRIOR_BYTES_S
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        through_zero = mean_y / mean_x
        if variance < 0.01 * mean_x * mean_x:  # all of one size: nothing to tell latency from
            return 0.0, through_zero
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        if slope <= 0:
            return 0.0, through_zero
        slope = min(slope, through_zero)  # no negative latency
        return max(0.0, mean_y - slope * mean_x), max(slope, 1e-13)


class PrefillTime:
    """Seconds of computing a prompt, by context length: attention makes late tokens dearer."""

    def __init__(self) -> None:
        # Of each power of two of context: tokens and seconds, older ones weigh less.
        self._tokens: dict[int, float] = {}
        self._seconds: dict[int, float] = {}

    def observe(self, segments: list[tuple[int, int]], seconds: float) -> None:
        """One step computed tokens `first` to `last` (excluded) of some prompts."""
        total = sum(last - first for first, last in segments)
        if total < PREFILL_TOKENS_MIN or seconds <= 0:
            return
        for first, last in segments:
            bucket = _bucket((first + last) // 2)
            share = (last - first) / total
            self._tokens[bucket] = self._tokens.get(bucket, 0.0) * _DECAY + last - first
            self._seconds[bucket] = self._seconds.get(bucket, 0.0) * _DECAY + seconds * share

    def seconds(self, first: int, last: int) -> float | None:
        """Of computing tokens `first` to `last` (excluded); None before anything was measured."""
        if not self._tokens:
            return None
        total = 0.0
        while first < last:
            end = min(last, 1 << _bucket(first))
            total += (end - first) / self._rate(_bucket(first))
            first = end
        return total

    def _rate(self, bucket: int) -> float:
        """Tokens per second there, or in the nearest context length that was measured."""
        nearest = min(self._tokens, key=lambda known: (abs(known - bucket), known))
        return self._tokens[nearest] / max(self._seconds[nearest], 1e-9)


class StepTimes:
    """How long steps take, for `PrefillTime`. They may overlap, and end in their order."""

    def __init__(self, prefill_time: PrefillTime) -> None:
        self._prefill_time = prefill_time
        self._began: dict[int, tuple[float, list[tuple[int, int]]]] = {}
        self._ended = 0.0

    def began(self, step: int, segments: list[tuple[int, int]], now: float) -> None:
        """This step computes tokens `first` to `last` (excluded) of some prompts, or nothing."""
        self._began[step] = (now, segments)

    def ended(self, step: int, now: float) -> None:
        """It is through, and with it all before it."""
        for earlier in [number for number in self._began if number <= step]:
            since, segments = self._began.pop(earlier)
            if earlier == step and segments:
                self._prefill_time.observe(segments, now - max(since, self._ended))
        self._ended = now


def _bucket(context: int) -> int:
    return max(context, 1).bit_length()
