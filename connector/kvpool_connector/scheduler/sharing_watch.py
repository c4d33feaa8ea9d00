"""Lines in the engine's log about what no request fails for, and costs hits. Pure.

Late lookups and strange promises are counted, and logged once a minute. An engine that shares
nothing with others of its model looks healthy, so after some lookups its name is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from kvpool import Namespace
from kvpool_connector.records.promises import PromiseState

#: Why a lookup ended without an answer, labels of a metric: the request has waited as long as it
#: may; the workers have not reported yet, so there are no names to ask for; no master is connected,
#: or each one refused; earlier lookups were late.
LATE: Final = "lookup timeout"
NO_NAMESPACE: Final = "no namespace"
NO_MASTER: Final = "no master"
SILENT: Final = "silent pool"
LATE_REASONS: Final = (LATE, NO_NAMESPACE, NO_MASTER, SILENT)
_EVERY_S: Final = 60.0
#: Lookups after which the engine's name is compared with those of other engines, once.
LOOKUPS_BEFORE_COMPARED: Final = 1000
#: Fields that differ where weights do: two models of one size are rightly apart.
_OTHER_WEIGHTS: Final = frozenset({"memory", "weights"})
_NAMES_MAX: Final = 3


class SharingWatch:
    """What was counted since the last line."""

    def __init__(self, log_line: Callable[[str], None]) -> None:
        self._log_line = log_line
        self._late: Counter[str] = Counter()  # by reason
        self._late_logged_at = -_EVERY_S
        self._strange = 0
        self._strange_logged_at = -_EVERY_S
        self._lookups = 0

    def on_metrics(self, metrics: Mapping[str, float], now: float) -> bool:
        """Count these sums of late. True once: compare the engine's names with the others."""
        for reason in LATE_REASONS:
            if count := int(metrics.get(f"miss {reason}", 0)):
                self._late[reason] += count
        if self._late and now - self._late_logged_at >= _EVERY_S:
            late = self._late
            reasons = ", ".join(f"{late[name]} {name}" for name in LATE_REASONS if late[name])
            self._log_line(f"{late.total()} prompts were computed without a lookup: {reasons}")
            late.clear()
            self._late_logged_at = now
        self._strange += int(metrics.get(f"promise {PromiseState.OTHER_NAME.value}", 0))
        if self._strange and now - self._strange_logged_at >= _EVERY_S:
            self._log_line(
                f"{self._strange} promises came from engines that share nothing with this one "
                "(kvpool doctor --engine URL for both says why); their prompts were computed"
            )
            self._strange, self._strange_logged_at = 0, now
        before, self._lookups = self._lookups, self._lookups + int(metrics.get("lookups", 0))
        return before < LOOKUPS_BEFORE_COMPARED <= self._lookups

    def on_new_names(self) -> None:
        """The engine's blocks are called otherwise from here on."""
        self._lookups = 0


def others_of_this_model(
    own: Sequence[Namespace], known: Iterable[tuple[Namespace, int]]
) -> list[str]:
    """For each name of this model that this engine does not share, its blocks and in which fields
    it differs; at most three, the largest first. Without those of other weights."""
    groups = [_fields(one) for one in own]
    found = []
    for namespace, blocks in known:
        theirs = _fields(namespace)
        if not blocks or namespace in own or theirs.get("model", "") == "":
            continue
        for ours in groups:
            apart = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            if "model" not in apart and "group" not in apart and not _OTHER_WEIGHTS & set(apart):
                found.append((blocks, f"{blocks} blocks differ in {', '.join(apart) or 'parts'}"))
    return [text for _, text in sorted(found, reverse=True)[:_NAMES_MAX]]


def _fields(namespace: Namespace) -> dict[str, str]:
    return dict(word.split("=", 1) for word in namespace.name.split(" ") if "=" in word)
