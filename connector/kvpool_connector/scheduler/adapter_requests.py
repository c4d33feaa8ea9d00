"""Requests whose LoRA adapter was not loaded by every rank when they arrived. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpool_connector.identity.adapters import Adapter, AdapterKeys, KnownAdapters
from kvpool_connector.records.values import RequestHints


@dataclass(slots=True)
class AdapterRequest:
    """One that arrived before the workers had told of a step after `step`."""

    hashes: Sequence[bytes]
    tokens: int
    hints: RequestHints
    adapter: Adapter
    step: int
    until: float
    given_up: bool = False  # it is computed; its blocks may still be saved


class AdapterRequests:
    """They wait until the workers have told of their adapter; `known` has what was told."""

    def __init__(self, known: KnownAdapters) -> None:
        self.known = known
        self._waiting: dict[str, AdapterRequest] = {}
        self._reported_step = 0

    def add(self, request_id: str, request: AdapterRequest) -> None:
        self._waiting[request_id] = request

    def drop(self, request_id: str) -> None:
        """It has ended."""
        self._waiting.pop(request_id, None)

    def on_report(self, step: int) -> None:
        """The workers have told what they had loaded after this step."""
        self._reported_step = max(self._reported_step, step)

    def must_wait(self, request_id: str, now: float) -> bool:
        """Whether the engine is to ask again. Once it need not, the request is computed."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        if not waiting.given_up and now < waiting.until and self._reported_step <= waiting.step:
            return True
        waiting.given_up = True
        return False

    def take_ready(self, *, no_names: bool) -> Iterator[tuple[str, AdapterRequest, bool]]:
        """Those that wait no longer, and whether their adapter is refused: with `no_names` all.

        What is returned has its keys and hints with the adapter's fingerprints, unless refused.
        """
        for request_id, waiting in list(self._waiting.items()):
            fingerprints = self.known.fingerprints(waiting.adapter)
            refused = no_names or self.known.refused(waiting.adapter)
            if refused or fingerprints:
                del self._waiting[request_id]
                if not refused:
                    key = waiting.adapter.number, fingerprints
                    waiting.hashes = AdapterKeys(waiting.hashes, waiting.adapter, self.known)
                    waiting.hints = waiting.hints._replace(adapter=key)
                yield request_id, waiting, refused
