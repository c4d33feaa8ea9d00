"""What the scheduler half writes to the engine's log, for its operator: why nothing is shared."""

from __future__ import annotations

from collections.abc import Callable

from kvpool_connector.identity.adapters import Adapter
from kvpool_connector.identity.naming import EngineNames
from kvpool_connector.plan.verifier import Verifier
from kvpool_connector.records.messages import Mismatch


class SchedulerLog:
    """The lines of one engine; those that each request could cause are written once.

    `line` writes one to the engine's log, `error` writes an error.
    """

    def __init__(self, line: Callable[[str], None], error: Callable[[str], None]) -> None:
        self.line, self._error = line, error
        self._missing = self._adapters = False  # written since the last reset, or ever

    def reset(self) -> None:
        """The engine gets another name."""
        self._missing = False

    def names(self, names: EngineNames) -> None:
        """What this engine's blocks are called, or why they have no name."""
        for name in names.namespaces:
            self.line(f"sharing blocks as: {name.name}")
        if names.namespaces:
            self.line(f"its blocks say that they are of {names.writer}")
        if names.problem:
            self.line(names.problem)

    def no_name(self, names: EngineNames) -> None:
        """Why nothing is shared yet: workers do not describe their model in time, or cannot."""
        if self._missing or names.problem:
            return
        self._missing = True
        why = f"ranks {names.missing_ranks} have not described their model"
        if names.reads_files:
            why = "its kernels hide weights, so another process reads all of their files first"
        self.line(f"nothing is loaded or saved: {why}")

    def refused_adapter(self, adapter: Adapter, *, replaced: bool) -> None:
        if self._adapters:
            return
        self._adapters = True
        why = (
            "was replaced under its name, and the engine's own cache may have blocks of the former "
            "one; reset_prefix_cache with reset_connector ends that"
            if replaced
            else "cannot be told apart from another one of this name: this vLLM does not show "
            "which adapters are loaded"
        )
        self.line(f"nothing is loaded or saved for LoRA adapter {adapter.name!r}: it {why}")

    def mismatch(self, mismatch: Mismatch, names: EngineNames, verifier: Verifier) -> None:
        """The line that an operator must act on: which engine, which block, and what to do."""
        namespaces = names.namespaces
        name = namespaces[mismatch.group].name if namespaces else "a name of before"
        self._error(
            "the pool has other KV than this engine computes: block "
            f"{mismatch.digest.hex()} differs by {mismatch.difference:.2g} in {mismatch.layer} ("
            f"rounding explains {mismatch.tolerance:.2g}). "
            f"Computed by {names.writer}, rank {mismatch.rank}; "
            f"stored by {mismatch.writer} on {verifier.stored_at(mismatch)}; "
            f"both call it: {name}. This engine loads no blocks of that writer any more. If others "
            f"say the same of it, restart it with what they have (kvpool doctor compares engines)."
        )
        if verifier.writers.odd:
            self._error(
                f"{len(verifier.writers.wrong)} engines compute other KV than this one, and "
                "none of those that it has compared computes the same: it shares nothing any more, "
                "until a restart or reset_prefix_cache with reset_connector"
            )
