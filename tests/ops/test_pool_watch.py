"""What is worth a line in the last events, and rates that a restart does not spoil."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.ops.pool_watch import EVENTS_MAX, HOUR_POINTS_MAX, SAMPLES_MAX, AskedTotals, PoolWatch
from kvpool.ops.server_state import ServerState, state_of
from kvpool.types import Member, ServerStats, TierUsage
from tests.support.members import member as usual_member


def member(server: str = "a", epoch: int = 1, **changed: Any) -> Member:
    return usual_member(server, epoch=epoch, **{"heard_s": 0.5, "capacity": 100, **changed})


def moved(read: int, written: int = 0, **more: Any) -> ServerStats:
    return ServerStats(counters={"read_bytes": read, "written_bytes": written}, **more)


@pytest.mark.parametrize(
    ("changed", "state"),
    [
        ({}, ServerState.UP),
        ({"heard_s": 1.6}, ServerState.LATE),
        ({"stats": ServerStats(draining=True)}, ServerState.LEAVING),
        ({"alive": False, "stats": ServerStats(draining=True)}, ServerState.LOST),
        ({"alive": False, "left": True, "heard_s": 60.0}, ServerState.LEFT),
    ],
)
def test_states(changed: dict[str, Any], state: ServerState) -> None:
    assert state_of(member(**changed)) is state


def test_the_life_of_a_server_is_told_once_each() -> None:
    watch = PoolWatch()
    broken = ServerStats(usage=[TierUsage("nvme", lost=True)])
    life = [
        [],
        [member()],
        [member(stats=ServerStats(draining=True))],
        [member()],
        [member(alive=False)],
        [member()],
        [member(epoch=2)],
        [member(epoch=2, stats=broken)],
        [member(epoch=2)],
        [],
    ]
    for at, members in enumerate(life):
        for half in (0.0, 0.5):  # the same again is no news
            watch.sample(at + half, members, AskedTotals())
    told = ["joined", "leaving", "stays", "lost", "back", "restarted", "tier", "tier", "forgotten"]
    assert [one.event for one in watch.events] == told
    assert [one.at for one in watch.events] == list(range(1, 10))


def test_an_upgrade_is_no_incident() -> None:
    """A server is drained, ends, and its next process comes; a crash in between is told, too."""
    watch = PoolWatch()
    draining = ServerStats(draining=True)
    ended = member(alive=False, left=True, stats=draining)
    for at, one in enumerate(
        [member(), member(stats=draining), ended, ended, member(epoch=2), member(epoch=2)]
    ):
        watch.sample(float(at), [one], AskedTotals())
    assert [one.event for one in watch.events] == ["leaving", "left", "back"]
    watch.sample(6.0, [member(epoch=2, alive=False)], AskedTotals())
    watch.sample(7.0, [member(epoch=2, alive=False, left=True)], AskedTotals())
    watch.sample(8.0, [member(epoch=2)], AskedTotals())
    assert [one.event for one in watch.events][3:] == ["lost", "left", "back"]


def test_servers_that_were_there_at_the_first_look_are_no_news() -> None:
    watch = PoolWatch()
    watch.sample(0.0, [member()], AskedTotals(refusals=7))
    watch.sample(1.0, [member()], AskedTotals(refusals=7))
    assert not watch.events
    watch.sample(2.0, [member()], AskedTotals(refusals=9))
    assert [(one.event, one.text[:10]) for one in watch.events] == [("refused", "2 messages")]


def test_rates_are_means_and_a_restart_is_no_negative_traffic() -> None:
    watch = PoolWatch()
    for at, read in enumerate((5000, 6000, 7000, 8000)):
        watch.sample(at, [member(stats=moved(read))], AskedTotals())
    assert watch.points[-1].read_bytes_s == pytest.approx(1000)
    watch.sample(4.0, [member(epoch=2, stats=moved(300))], AskedTotals())
    assert watch.points[-1].read_bytes_s == pytest.approx((1000 + 1000 + 300) / 3)
    assert min(point.read_bytes_s for point in watch.points) >= 0
    assert 0 < watch.rates["a"][0] <= 1000
    watch.sample(4.5, [member(epoch=2, alive=False, stats=moved(300))], AskedTotals())
    assert watch.rates["a"] == (0.0, 0.0)
    watch.sample(5.0, [], AskedTotals())
    assert not watch.rates


def test_the_hit_rate_is_of_what_was_asked_lately() -> None:
    watch = PoolWatch()
    for at, (asked, found) in enumerate([(100, 0), (100, 0), (110, 9), (120, 18)]):
        watch.sample(at, [], AskedTotals(asked, found))
    assert [point.hit_rate for point in watch.points] == [None, 0.9, 0.9]


def test_all_that_is_kept_is_bounded() -> None:
    watch = PoolWatch()
    for at in range(SAMPLES_MAX + 20):
        watch.sample(at, [member(f"server-{at}")], AskedTotals())
    assert len(watch.points) == SAMPLES_MAX
    assert len(watch.events) == EVENTS_MAX
    assert len(watch.rates) == 1


def test_a_drain_has_a_bar_a_speed_and_the_time_that_is_left() -> None:
    watch = PoolWatch()

    def look(at: float, left: int, draining: bool = True, **more: Any) -> list[Any]:
        stats = ServerStats(draining=draining, drain_left_bytes=left)
        watch.sample(at, [member(stats=stats, **more)], AskedTotals())
        return [tuple(one) for one in watch.under_way()]

    assert look(0.0, 0, draining=False) == []
    assert look(1.0, 1000) == [("a", "drain", 0.0, 0, 1000, None)]  # its speed is not known yet
    assert look(2.0, 900) == [("a", "drain", 100.0, 100, 900, 9.0)]
    for second in range(3, 30):
        found = look(float(second), 900)
    assert found == [("a", "drain", 0.0, 100, 900, None)], "it stands still"
    assert look(31.0, 0)[0][3:] == (1000, 0, 0.0)
    assert look(32.0, 0, alive=False) == []
    assert look(33.0, 50) == [("a", "drain", 0.0, 0, 50, None)], "the next one begins anew"
    watch.sample(34.0, [], AskedTotals())
    assert watch.under_way() == [], "a server that is forgotten moves nothing"


def test_copies_and_prefetches_are_told_while_they_move() -> None:
    watch = PoolWatch()
    for second in range(5):
        counters = {"fetched_bytes": second << 20, "prefetched_bytes": (second << 20) * 2}
        quiet = member("b", stats=ServerStats(counters={"fetched_bytes": 1 << 40}))
        watch.sample(float(second), [member(stats=ServerStats(counters=counters)), quiet], ASKED)
    prefetch, copies = watch.under_way()
    assert (prefetch.server, prefetch.move, copies.move) == ("a", "prefetch", "copies")
    assert prefetch.bytes_s == pytest.approx(2 * copies.bytes_s)
    assert 0.7 * (1 << 20) < copies.bytes_s < 1 << 20
    assert (copies.left_bytes, copies.left_s) == (None, None)
    for second in range(5, 40):
        watch.sample(float(second), [member(stats=ServerStats(counters=counters))], ASKED)
    assert watch.under_way() == []
    watch.sample(40.0, [member(epoch=2, stats=ServerStats(counters={}))], ASKED)
    assert watch.under_way() == [], "a restart moves nothing"
    watch.sample(41.0, [], ASKED)
    assert watch._means == watch._drains == watch.rates == {}


ASKED = AskedTotals()


def test_an_hour_is_kept_and_no_more() -> None:
    watch = PoolWatch()
    for second in range(2 * 3600):
        late = second >= 3600
        stopped = {"hit": second, "evicted": 5} if late else {"evicted": min(5, second)}
        asked = AskedTotals(second * 10, second * (5 if late else 1), stopped=stopped)
        watch.sample(float(second), [member(stats=moved(second * 100, used=second))], asked)
    assert len(watch.hour) == len(watch._hour_totals) - 1 == HOUR_POINTS_MAX
    assert watch.hour[-1].at - watch.hour[0].at == pytest.approx(3580)
    assert [round(one.read_bytes_s) for one in watch.hour] == [100] * HOUR_POINTS_MAX
    assert watch.hour[-1].used == 7180
    seconds, lately = watch.last_hour()
    assert 3600 <= seconds <= 3620
    assert lately.asked_blocks == seconds * 10
    assert dict(lately.stopped) == {"hit": 7199}, "what did not happen is not listed"
    assert PoolWatch().last_hour() == (0.0, AskedTotals())
