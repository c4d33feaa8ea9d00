"""What a policy tells people: how many of what, how often it was right, and why a block went."""

from __future__ import annotations

import random

import pytest

from kvpool.server.eviction import density as density_module
from kvpool.server.eviction import verdicts
from kvpool.server.eviction.density import Density
from kvpool.server.eviction.held_programs import HeldPrograms
from kvpool.server.eviction.lru import LRU
from kvpool.server.eviction.order import Order
from kvpool.server.eviction.programs import _CLASSES, _SHARED, Programs
from kvpool.server.eviction.session_hints import SessionAwarePolicy
from kvpool.server.eviction.tenant_orders import TenantOrders
from kvpool.server.state.entry import Entry
from kvpool.server.state.store import Store
from kvpool.types import Namespace, WriteStatus
from tests.conftest import key
from tests.server.test_programs import Server, chain
from tests.server.test_quotas import store as tenants_store
from tests.server.test_quotas import write as tenants_write
from tests.support.stores import ONE, PAGE, write


@pytest.fixture(autouse=True)
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(density_module, "_SAMPLE", 1)
    monkeypatch.setattr(density_module, "_GHOSTS_MIN", 8)


# --- programs ----------------------------------------------------------------------------------


def check(server: Server) -> None:
    """The figures are those of the programs that are remembered, and none is more than is there."""
    counted = HeldPrograms(_CLASSES, _SHARED)
    for program in server.policy._programs.values():
        own = program.blocks - program.common
        assert 0 <= program.common <= program.blocks
        counted.blocks[program.number] += own
        counted.programs[program.number] += own > 0
        counted.common += program.common
    held = server.policy._held
    assert (held.blocks, held.programs, held.common) == (
        counted.blocks,
        counted.programs,
        counted.common,
    )
    assert sum(held.blocks) + held.common <= server.policy._stored


def test_conversations_are_counted_with_the_blocks_that_they_share() -> None:
    server = Server(100)
    server.prompt([*chain("head", 3), *chain("a", 2)], 5.0)
    server.prompt(chain("alone", 4), 5.0)
    figures = server.policy.inferred().figures
    assert (figures["inferred_programs"], figures["inferred_shared_blocks"]) == (2, 0)
    server.prompt([*chain("head", 3), *chain("b", 2)], 5.0)
    server.prompt([*chain("head", 3), *chain("a", 3)], 5.0)
    figures = server.policy.inferred().figures
    assert (figures["inferred_programs"], figures["inferred_shared_blocks"]) == (3, 3)
    check(server)
    for name in ("alone", "a", "b", "head"):
        server.store.remove(ONE, [key(one) for one in reversed(chain(name, 4))], PAGE)
    assert not any(server.policy.inferred().figures[name] for name in ("inferred_programs",))
    assert server.policy.inferred().figures["inferred_shared_blocks"] == 0


@pytest.mark.parametrize("remembered", [6, 4096])
def test_the_figures_are_right_whatever_comes(
    remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.server.eviction.programs._REMEMBERED_MIN", remembered)
    for seed in range(3):
        chance = random.Random(seed)
        server = Server(60)
        lengths: dict[int, int] = {}
        for turn in range(150):
            number = chance.randrange(12)
            lengths[number] = lengths.get(number, 0) + chance.randrange(1, 4)
            if lengths[number] > 20:
                lengths[number] = 0
            head = chain(f"head {number % 3}", number % 4)
            mine = chain(f"talk {number}", lengths[number] + 1, chance.choice(["", str(turn)]))
            server.prompt([*head, *mine] or ["x"], chance.expovariate(0.2))
            check(server)


def test_who_goes_on_is_expected_to_and_who_does_not_is_not() -> None:
    server = Server(4000)
    for turn in range(1, 4):
        for number in range(40):
            server.prompt(chain(f"talk {number}", 2 * turn), 5.0)
    for number in range(60):
        server.prompt(chain(f"once {number}", 20), 5.0)
    figures = server.policy.inferred().figures
    wrong = figures["inferred_dead_came"]
    # First prompts of up to 15 blocks go on here, and third ones and longer ones do not.
    assert figures["inferred_returning_came"] > 30 > figures["inferred_returning_left"] == 0
    assert figures["inferred_dead_blocks"] >= 60 * 20
    right = figures["inferred_returning_came"]
    server.prompt(chain("talk 7", 8), 5.0)
    server.prompt(chain("last", 1), 5.0)
    figures = server.policy.inferred().figures
    assert figures["inferred_dead_came"] == wrong + 1, "it was expected to be over"
    assert figures["inferred_returning_came"] == right


def test_a_conversation_has_left_with_its_last_block_and_may_be_asked_for_again() -> None:
    server = Server(40)
    for number in range(120):
        server.prompt(chain(f"once {number}", 2), 700.0)
    figures = server.policy.inferred().figures
    assert figures["inferred_programs"] == 20
    assert 80 < figures["inferred_dead_left"] <= 100
    assert figures["inferred_dead_came"] == 0 == figures["inferred_dead_asked"]
    server.prompt(chain("once 50", 4), 5.0)
    server.prompt(chain("once 119", 4), 5.0)
    server.prompt(chain("last", 1), 5.0)
    figures = server.policy.inferred().figures
    assert (figures["inferred_dead_came"], figures["inferred_dead_asked"]) == (1, 1)


def test_programs_say_why_a_block_went() -> None:
    server = Server(12)
    for number in range(30):
        server.prompt(chain(f"once {number}", 4), 60.0)
    why = server.policy.inferred().why
    assert why(key("once 20/3")) == (
        "of a conversation of at most 1 prompts, quiet for 180 s: 0% of such conversations come "
        "back after that, and all else was expected to bring more hits"
    )
    assert why(key("once 29/3")) == "", "it is here"
    assert why(key("never")) == ""


# --- density -----------------------------------------------------------------------------------


def written(store: Store, name: str, now: float, length: int = 1) -> list[WriteStatus]:
    return write(store, [key(one) for one in chain(name, length)], now)


def read(store: Store, name: str, now: float) -> None:
    for pin in store.pin(1, ONE, 0, [key(f"{name}/0")], now):
        store.unpin(1, pin.id)


def test_density_tells_what_it_takes_blocks_for_and_what_became_of_them() -> None:
    policy: Density[Entry] = Density(0)
    store = Store(100 * PAGE, policy=policy)
    for number in range(40):
        written(store, f"good {number}", number)
    for number in range(40):
        read(store, f"good {number}", 50.0 + number)
        policy.inferred()
    figures = policy.inferred().figures
    assert figures["inferred_returning_came"] == 20, "as soon as more than half had come back"
    assert figures["inferred_dead_came"] == 20, "until then they were not expected"


def test_what_density_evicts_for_good_was_rightly_taken_for_dead() -> None:
    policy: Density[Entry] = Density(0)
    store = Store(10 * PAGE, policy=policy)
    for number in range(200):
        written(store, f"scan {number}", 60.0 * number)
    figures = policy.inferred().figures
    assert figures["inferred_dead_blocks"] == 10
    assert figures["inferred_dead_left"] > 100 > figures["inferred_dead_asked"] == 0
    written(store, "scan 185", 12_001.0)
    assert policy.inferred().figures["inferred_dead_asked"] == 1, "evicted, and asked for again"
    assert policy.inferred().why(key("scan 189/0")) == (
        "used once, quiet for 600 s: 0% of such blocks come back after that, and all else was "
        "expected to bring more hits"
    )


def test_density_counts_the_blocks_that_are_there() -> None:
    policy: Density[Entry] = Density(0)
    store = Store(40 * PAGE, policy=policy)
    chance = random.Random(3)
    for turn in range(600):
        name = f"talk {chance.randrange(30)}"
        if store.index.peek(ONE, 0, key(f"{name}/0")) is not None and chance.random() < 0.5:
            read(store, name, float(turn))
        else:
            written(store, name, float(turn), chance.randrange(1, 4))
        if chance.random() < 0.1:
            store.remove(ONE, [key(f"{name}/0")], PAGE)
        uses = [abs(one.policy_data) & density_module._USES for one in store.index.inventory()]
        assert policy._held == [uses.count(number) for number in range(1, 5)]


def test_a_refused_block_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(density_module, "_RELEARN_EVERY", 100)
    monkeypatch.setattr(density_module, "_LATE_MIN", -1.0)
    policy: Density[Entry] = Density(0)
    store = Store(10 * PAGE, policy=policy)
    for number in range(10):
        written(store, f"good {number}", 0.0)
    for now in range(1, 60):
        for number in range(10):
            read(store, f"good {number}", float(now))
    assert written(store, "scan", 60.0) == [WriteStatus.BYPASSED]
    assert policy.inferred().why(key("scan/0")) == verdicts.REFUSED


# --- the joint ---------------------------------------------------------------------------------


def test_a_policy_that_infers_nothing_says_so() -> None:
    order = Order(LRU(), 0)
    assert not order.figures
    assert order.inferred().why(key("a")) == ""


def test_figures_of_a_policy_stand_beside_those_of_hints() -> None:
    order = SessionAwarePolicy(Programs(0), 0)
    assert {"sessions", "inferred_programs"} <= set(order.figures)


def test_reasons_are_kept_for_the_last_departures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "_GONE_MAX", 3)
    gone = verdicts.Departures("{} {}".format)
    for number in (1, 2, 1, 3, 4):
        gone.add(bytes([number]), number, 0.0)
    assert [gone.why(bytes([number])) for number in (1, 2, 3, 4)] == ["1 0.0", "", "3 0.0", "4 0.0"]


def test_each_tenant_has_its_own_and_operators_see_the_sum() -> None:
    store = tenants_store(8, Density, acme=(4, 4), beta=(4, 4))
    for number in range(40):
        for name in ("acme", "beta"):
            space, digest = Namespace(f"@{name}/n"), key(f"{name} {number}")
            tenants_write(store, space, [digest], 60.0 * number)
    order = store.extents.policy
    indexes = {one.account.name: one for one in store.index.by_part.values()}
    assert isinstance(order, TenantOrders)
    figures = order.figures
    assert figures["inferred_dead_blocks"] == 8
    of_acme, of_beta = (order.order_of(indexes[name]).inferred().why for name in ("acme", "beta"))
    assert of_acme(key("acme 3"))
    assert not of_beta(key("acme 3")), "a tenant's policy knows nothing of others"
    assert order.inferred().why(key("acme 3")) == of_acme(key("acme 3"))
    assert order.inferred().why(key("acme 39")) == ""
