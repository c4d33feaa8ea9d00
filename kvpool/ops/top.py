"""The view of `kvpool top`: a pool on a screen of any size, and what each key does to it.

It draws text from what masters answered; terminal, keyboard and clock are the command's. Names of
servers come over the network: they are shown as text, without what would control a terminal.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from rich.text import Text

from kvpool.ops.bars import age, bar, colour_of, sparkline
from kvpool.ops.inferred import inferred_line, inferred_of, inferred_sum
from kvpool.ops.pool_watch import AskedTotals, PoolWatch, UnderWay
from kvpool.ops.server_state import ServerState, state_of
from kvpool.ops.tables import problem_of
from kvpool.types import Demand, Member, ServerStats, TierUsage
from kvpool.units import human

_STYLES: Final = {
    ServerState.UP: "green",
    ServerState.LATE: "yellow",
    ServerState.LEAVING: "yellow",
    ServerState.LEFT: "yellow",
    ServerState.LOST: "red",
}
#: Moves under way that are shown, and what they are called.
_MOVES_MAX: Final = 3
_MOVES: Final = {"drain": "leaves", "copies": "fetches", "prefetch": "prefetch"}
#: Of one server; of all of them.
_HISTORY_MAX: Final = 120
_HISTORIES_MAX: Final = 1024
_SHARE_WIDTH: Final = 13


class _Order(NamedTuple):
    """A way to sort servers: its key, its name, and what comes first."""

    key: str
    name: str
    rank: Callable[[Top, Member], float | str]


_ORDERS: Final = (
    _Order("n", "name", lambda top, one: one.server),
    _Order("u", "used", lambda top, one: -_share(one.stats.used, one.capacity)),
    _Order("t", "traffic", lambda top, one: -sum(top.rates(one))),
    _Order("a", "age of victims", lambda top, one: one.stats.victim_age_s),
    _Order("p", "problems", lambda top, one: -_problems(one)),
)


class Top:
    """What is shown. `seen` and `lost` tell of a look at the pool, `press` of a key.

    `hidden` says why figures are left out, which masters do not tell a tenant; empty: none are.
    """

    def __init__(self, hidden: str = "") -> None:
        self._hidden = hidden
        self.quit = False
        self._watch = PoolWatch()
        self._members: list[Member] = []
        self._history: dict[str, deque[tuple[float, float]]] = {}
        self._asked = False  # a master has told how many blocks clients asked for
        self._lost_since: float | None = None
        self._clock = self._why = ""
        self._order = _ORDERS[0]
        self._reverse = False
        self._selected = ""
        self._inside = False  # of the selected server
        self._help = False

    def rates(self, member: Member) -> tuple[float, float]:
        """Bytes per second, read and written."""
        return self._watch.rates.get(member.server, (0.0, 0.0))

    def seen(self, now: float, members: Sequence[Member], demand: Demand | None) -> None:
        """What masters answered just now."""
        self._lost_since = None
        self._members = list(members)
        totals = AskedTotals()
        if demand is not None:
            self._asked |= bool(demand.asked_blocks)
            totals = AskedTotals(demand.asked_blocks, demand.found_blocks)
        self._watch.sample(now, self._members, totals)
        known = {one.server for one in self._members[:_HISTORIES_MAX]}
        self._history = {name: kept for name, kept in self._history.items() if name in known}
        for name in known:
            kept = self._history.setdefault(name, deque(maxlen=_HISTORY_MAX))
            kept.append(self._watch.rates.get(name, (0.0, 0.0)))

    def lost(self, now: float, clock: str, why: str) -> None:
        """No master answers; `clock` is the time for people."""
        if self._lost_since is None:
            self._lost_since, self._clock = now, clock
        self._why = why

    def press(self, key: str) -> None:
        """A key, by its character or its name (`up`, `enter`, ...)."""
        if key == "q":
            self.quit = True
        elif key in ("?", "h"):
            self._help = not self._help
        elif key in ("escape", "backspace", "left"):
            self._inside = self._help = False
        elif key in ("enter", "right"):
            self._inside = bool(self._sorted())
            self._selected = self._sorted()[self._place()].server if self._inside else ""
        elif key in _STEPS:
            self._move(_STEPS[key])
        elif key == "r":
            self._reverse = not self._reverse
        elif key == "s":
            places = [one.key for one in _ORDERS]
            self._order = _ORDERS[(places.index(self._order.key) + 1) % len(_ORDERS)]
        else:
            self._order = next((one for one in _ORDERS if one.key == key), self._order)

    def lines(
        self, now: float, width: int, height: int | None, *, ascii_only: bool = False
    ) -> list[Text]:
        """At most `height` lines of at most `width` cells; without a height all servers."""
        page = _Screen(width, ascii_only, hidden=bool(self._hidden))
        if self._help:
            page.help()
        else:
            self._head(page, now)
            inside = next((m for m in self._members if m.server == self._selected), None)
            if self._inside and inside is not None:
                page.server(inside, self._history.get(inside.server, ()))
            else:
                self._table(page, height)
        keys = _HELP if width >= _WIDE else "? keys  q quit"
        drawn = page.lines if height is None else [*page.lines[: height - 1], Text(keys, "dim")]
        for line in drawn:
            line.truncate(width, overflow="ellipsis" if not ascii_only else "crop")
        return drawn

    # --- inside --------------------------------------------------------------------------

    def _sorted(self) -> list[Member]:
        order = sorted(self._members)
        order.sort(key=lambda one: self._order.rank(self, one), reverse=self._reverse)
        return order

    def _place(self) -> int:
        names = [one.server for one in self._sorted()]
        return names.index(self._selected) if self._selected in names else 0

    def _move(self, step: int) -> None:
        order = self._sorted()
        if order:
            place = min(len(order) - 1, max(0, self._place() + step))
            self._selected = order[place].server

    def _head(self, page: _Screen, now: float) -> None:
        alive = [one for one in self._members if one.alive]
        if self._lost_since is not None:
            silent = age(max(0.0, now - self._lost_since))
            text = f"no master answers since {self._clock} ({silent}): {_plain(self._why)}"
            page.add(text, "bold red")
        else:
            counts = Counter(state_of(one) for one in self._members)
            line = Text("kvpool ", "bold")
            for state in ServerState:
                if counts[state]:
                    line.append(f" {counts[state]} {state.value}", _STYLES[state])
            if not counts:
                line.append(" no server has registered", "yellow")
            page.lines.append(line)
        used, capacity = sum(m.stats.used for m in alive), sum(m.capacity for m in alive)
        if self._hidden:
            page.add(f"memory    {human(capacity)}")
            page.add(self._hidden, "dim")
            return
        blocks = sum(one.stats.blocks for one in alive)
        page.bar("memory", used, capacity, f"{blocks:,} blocks")
        points = self._watch.points
        hits = [None if one.hit_rate is None else min(1.0, one.hit_rate) for one in points]
        last = next((one for one in reversed(hits) if one is not None), None)
        text = "-" if last is None else f"{max(0.0, last):.1%}"
        page.spark("hit rate", text if self._asked else "-", hits, top=1.0)
        read, written = [p.read_bytes_s for p in points], [p.written_bytes_s for p in points]
        page.spark("read", f"{human(read[-1] if read else 0)}/s", read)
        page.spark("written", f"{human(written[-1] if written else 0)}/s", written)
        if inferred := inferred_line(inferred_sum(alive)):
            page.add(f"inferred  {inferred}")
        for one in self._watch.under_way()[:_MOVES_MAX]:
            page.move(one)

    def _table(self, page: _Screen, height: int | None) -> None:
        page.columns(f"{self._order.name}{', reversed' if self._reverse else ''}")
        order, place = self._sorted(), self._place()
        first, room = 0, len(order)
        if height is not None:
            room = max(1, height - len(page.lines) - 1)
            first = max(0, min(place - room // 2, len(order) - room))
        for number, one in enumerate(order[first : first + room], first):
            page.row(one, self.rates(one), selected=number == place and height is not None)


class _Screen:
    """Lines of one screen."""

    def __init__(self, width: int, ascii_only: bool, *, hidden: bool) -> None:
        self.lines: list[Text] = []
        self._hidden = hidden
        self._width = width
        self._ascii = ascii_only
        # What does not fit is left out, least important last in this list.
        self._columns = [
            name
            for name, needed in (("read", 62), ("written", 73), ("victim", 82), ("clients", 90))
            if width >= needed and not hidden
        ]
        taken = 2 + 10 + _SHARE_WIDTH + 1 + sum(_COLUMNS[name] + 1 for name in self._columns)
        self._name_width = max(6, min(32, width - taken))

    def add(self, text: str, style: str = "") -> None:
        self.lines.append(Text(text, style))

    def bar(self, label: str, used: float, capacity: float, more: str = "") -> None:
        share = _share(used, capacity)
        size = max(4, min(40, self._width // 3))
        line = Text(f"{label:<9}")
        line.append(bar(share, size, ascii_only=self._ascii), colour_of(share))
        line.append(f" {share:4.0%}")
        line.append(f"  {human(used)} of {human(capacity)}", "dim")
        if more and self._width >= _WIDE:
            line.append(f", {more}", "dim")
        self.lines.append(line)

    def spark(
        self, label: str, text: str, values: Sequence[float | None], top: float | None = None
    ) -> None:
        size = max(4, min(_HISTORY_MAX, self._width - 24))
        drawn = sparkline(values, size, top=top, ascii_only=self._ascii)
        self.lines.append(Text(f"{label:<9}{text:>12}  ").append(drawn, "cyan"))

    def move(self, one: UnderWay) -> None:
        """How far it is; where nobody knows how much it is, only how fast."""
        line = Text(f"{_MOVES[one.move]:<9}")
        text = f"{human(one.bytes_s)}/s, of unknown size"
        if one.left_bytes is not None:
            total = one.moved_bytes + one.left_bytes
            share = one.moved_bytes / total if total else 1.0
            size = max(4, min(32, self._width // 3 - 8))
            line.append(bar(share, size, ascii_only=self._ascii), "yellow").append(f" {share:4.0%}")
            text = f"{human(one.left_bytes)} left"
            if one.left_bytes:
                text += f", {age(one.left_s)}" if one.left_s is not None else ", nothing moves"
        line.append(f"  {_plain(one.server)}").append(f"  {text}", "dim")
        self.lines.append(line)

    def columns(self, order: str) -> None:
        """The heading of the table."""
        line = Text(f"  {'server':<{self._name_width}} {'state':<9} {'memory':<{_SHARE_WIDTH}}")
        for name in self._columns:
            line.append(f" {_HEADINGS.get(name, name):>{_COLUMNS[name]}}")
        if self._width - len(line) > len(order) + 10:
            line.append(f"  by {order}", "dim")
        line.stylize("bold")
        self.lines.append(line)

    def row(self, member: Member, rates: tuple[float, float], *, selected: bool) -> None:
        state, share = state_of(member), _share(member.stats.used, member.capacity)
        name = Text(_plain(member.server))
        name.truncate(self._name_width, pad=True)
        line = Text("> " if selected else "  ")
        line.append_text(name)
        text, style = state.value, _STYLES[state]
        if state in (ServerState.LOST, ServerState.LEFT, ServerState.LATE):
            text = f"{text} {_short_age(member.heard_s)}"
        elif any(tier.lost for tier in member.stats.usage):
            text, style = "tier lost", "red"
        elif any(tier.read_only for tier in member.stats.usage):
            text, style = "read-only", "yellow"
        elif any(tier.files_out for tier in member.stats.usage):
            text, style = "file lost", "yellow"
        line.append(f" {text:<9} ", style)
        if self._hidden:
            self._add_row(line.append(human(member.capacity)), selected)
            return
        line.append(bar(share, _SHARE_WIDTH - 5, ascii_only=self._ascii), colour_of(share))
        line.append(f" {share:4.0%}")
        values = {
            "read": f"{human(rates[0])}/s",
            "written": f"{human(rates[1])}/s",
            "victim": _short_age(member.stats.victim_age_s),
            "clients": f"{member.stats.counters.get('connections', 0):,}",
        }
        for column in self._columns:
            line.append(f" {values[column]:>{_COLUMNS[column]}}")
        self._add_row(line, selected)

    def _add_row(self, line: Text, selected: bool) -> None:
        if selected:
            line.stylize("reverse")
        self.lines.append(line)

    def server(self, member: Member, history: Sequence[tuple[float, float]]) -> None:
        """Everything about one server, the most important first."""
        state, stats = state_of(member), member.stats
        line = Text(_plain(member.server), "bold").append(f"  {state.value}", _STYLES[state])
        line.append(f"  heard {age(member.heard_s)} ago, host {_plain(member.host)}", "dim")
        self.lines += [Text(), line]
        if not self._hidden:
            self._figures(stats, history)
        for address in member.addresses:
            self.add(f"at        {_plain(address)}", "dim")

    def _figures(self, stats: ServerStats, history: Sequence[tuple[float, float]]) -> None:
        for tier in stats.usage:
            self._tier(tier, sum(one.hits for one in stats.usage))
        history = list(history)
        last = history[-1] if history else (0.0, 0.0)
        self.spark("read", f"{human(last[0])}/s", [one[0] for one in history])
        self.spark("written", f"{human(last[1])}/s", [one[1] for one in history])
        self.add(f"victims   {age(stats.victim_age_s)} old; {self._counts(stats.counters)}")
        if inferred := inferred_line(inferred_of(stats.counters)):
            self.add(f"inferred  {inferred}")
        if stats.draining:
            left = f"{stats.drain_left_blocks:,} blocks, {human(stats.drain_left_bytes)}"
            self.add(f"leaves    {left} left", "yellow")
        for client in stats.clients:
            held = f"{human(client.pinned_bytes)} pinned, {human(client.reserved_bytes)} reserved"
            self.add(f"client    {_plain(client.name)} ({_plain(client.transport)}): {held}")

    def _tier(self, tier: TierUsage, hits: int) -> None:
        share = f"{tier.hits / hits:.0%} of reads" if hits else "no reads"
        more = f"{tier.blocks:,} blocks, {share}"
        self.bar(_plain(tier.name)[:8], tier.used, tier.capacity, more)
        if tier.lost:
            self.add(f"          out of service: {_plain(tier.status_text)}", "red")
        elif problem := problem_of(tier):
            self.add(f"          {problem}: {_plain(tier.status_text)}", "yellow")
        if tier.failures or tier.corrupt:
            self.add(f"          {tier.failures:,} failures, {tier.corrupt:,} corrupt", "yellow")

    def _counts(self, counters: Mapping[str, int]) -> str:
        names = ("evicted", "refused", "missed")
        return ", ".join(f"{counters.get(f'{one}_blocks', 0):,} {one}" for one in names)

    def help(self) -> None:
        self.lines += [Text(line) for line in _KEYS]


_STEPS: Final = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10}
_COLUMNS: Final = {"read": 11, "written": 11, "victim": 8, "clients": 7}
_HEADINGS: Final = {"victim": "victims"}
#: From here on the footer names the keys.
_WIDE: Final = 70
_HELP: Final = "arrows select  enter one server  s sort  r reverse  ? keys  q quit"
_KEYS: Final = (
    "up down  select a server",
    "enter    look at it; escape: back",
    "s        sort by the next column",
    "n u t    by name, used, traffic",
    "a p      by age of victims, problems",
    "r        reverse the order",
    "?        these lines",
    "q        quit, as Ctrl-C does",
)


def _share(used: float, capacity: float) -> float:
    return used / capacity if capacity else 0.0


def _problems(member: Member) -> int:
    states = list(ServerState)
    broken = sum(bool(problem_of(tier)) for tier in member.stats.usage)
    return states.index(state_of(member)) * 100 + broken


def _plain(name: str) -> str:
    """Without characters that control a terminal, or turn the direction of what follows."""
    return "".join(one if one.isprintable() else "?" for one in name)


def _short_age(seconds: float) -> str:
    return age(seconds).replace(" ", "").replace("min", "m")
