"""Who has what of a server, and what readers get: bounded, and exact where it is listed."""

from __future__ import annotations

import pytest

from kvpool import dev
from kvpool.client.pool import Pool
from kvpool.server.consumers import NAMES_MAX, Consumers
from kvpool.server.eviction.session import PROGRAMS_MAX, program_of
from kvpool.server.state.blocks import Blocks
from kvpool.server.state.quota import Quota
from kvpool.server.state.store import Store
from kvpool.server.state.tenants import account_of, set_quotas
from kvpool.testing.invariants import check_invariants
from kvpool.types import NAME_MAX, OTHERS, Consumer, Namespace, SessionHint
from tests.conftest import keys
from tests.server.test_quotas import ACME, BETA, PAGE, POOL, write
from tests.support import stores


def stack_of(pages: int, *, tenants: bool = True) -> Blocks:
    stack = Blocks([Store(pages * PAGE)])
    if tenants:
        set_quotas(stack.front, {"acme": Quota()})
    return stack


def named(report: list[Consumer], kind: str) -> dict[str, Consumer]:
    return {one.name: one for one in report if one.by == kind}


@pytest.mark.parametrize(
    ("session", "program"),
    [
        ("program=agent;conversation 7", "agent"),
        ("@acme/program=agent;c", "@acme/agent"),
        ("@acme/tenant=t/program=agent;c", "@acme/tenant=t/agent"),
        ("program=;c", ""),
        ("program=agent", ""),
        ("my program=agent;c", ""),
        (f"program={'a' * 65};c", ""),
    ],
)
def test_a_program_is_a_label_of_a_session(session: str, program: str) -> None:
    assert program_of(session) == program


def test_bytes_of_tenants_namespaces_and_programs() -> None:
    stack = stack_of(64)
    consumers = Consumers(stack, ["dram"])
    write(stack.front, ACME, keys(1, 5), 1.0, session=SessionHint("@acme/program=a;1"))
    write(stack.front, ACME, keys(2, 3), 1.0, session=SessionHint("@acme/program=a;2"))
    write(stack.front, POOL, keys(3, 7), 1.0)
    report = consumers.report()
    assert named(report, "tenant")["acme"].tiers == {"dram": 8 * PAGE}
    assert named(report, "tenant")[""].tiers == {"dram": 7 * PAGE}
    assert named(report, "namespace")["@acme/llm"].tiers == {"dram": 8 * PAGE}
    assert named(report, "namespace")["llm"].tiers == {"dram": 7 * PAGE}
    assert named(report, "program")["@acme/a"].tiers == {"dram": 8 * PAGE}
    stack.remove(ACME, keys(1, 5))
    assert named(consumers.report(), "program")["@acme/a"].tiers == {"dram": 3 * PAGE}
    stack.remove(ACME, keys(2, 3))
    assert not named(consumers.report(), "program")
    check_invariants(stack)


def test_who_evicted_whom() -> None:
    stack = stack_of(4)
    write(stack.front, ACME, keys(1, 4), 1.0)
    write(stack.front, BETA, keys(2, 3), 2.0)
    tenants = named(Consumers(stack, ["dram"]).report(), "tenant")
    assert tenants["acme"].evicted_by == {"beta": 3 * PAGE}
    account = account_of(stack.front, "acme")
    assert account is not None
    for n in range(100):
        account.lost(PAGE, f"t{n}")
    assert len(account.evicted_by) == 65
    shown = named(Consumers(stack, ["dram"]).report(), "tenant")["acme"].evicted_by
    assert (len(shown), sum(shown.values())) == (16, 103 * PAGE)


def test_the_list_is_bounded_and_the_rest_is_summed() -> None:
    stack = stack_of(4096, tenants=False)
    for n in range(100):
        write(stack.front, Namespace(f"{'n' * 500}{n}"), keys(n, 1 + (n == 50)), 1.0)
    namespaces = named(Consumers(stack, ["dram"]).report(), "namespace")
    assert len(namespaces) == 9
    assert max(map(len, namespaces)) == NAME_MAX
    assert next(one.tiers["dram"] for one in namespaces.values()) == 2 * PAGE
    assert namespaces[OTHERS].tiers == {"dram": (101 - 2 - 7) * PAGE}


def test_a_tenant_with_many_names_leaves_some_to_others() -> None:
    stack = stack_of(8)
    consumers = Consumers(stack, ["dram"])
    for n in range(3 * NAMES_MAX):
        consumers.read(Namespace(f"@acme/{n}"), None, 1, 10, 0)
    consumers.read(BETA, None, 1, 1 << 30, 0)
    namespaces = named(consumers.report(), "namespace")
    assert namespaces[BETA.name].hit_blocks == 1
    assert namespaces[OTHERS].hit_blocks > 2 * NAMES_MAX
    assert len(consumers._reads["namespace"]) <= NAMES_MAX


def test_made_up_names_fill_one_line() -> None:
    consumers = Consumers(stack_of(16), ["dram"])
    for n in range(3 * NAMES_MAX):
        consumers.read(Namespace(f"made up {n}"), None, 0, 0, 2)
    assert len(consumers._reads["namespace"]) == 1
    for n in range(3 * NAMES_MAX):
        consumers.read(Namespace(f"real {n}"), None, 1, 10, 0)
    assert len(consumers._reads["namespace"]) == NAMES_MAX
    report = named(consumers.report(), "namespace")
    assert sum(one.hit_blocks for one in report.values()) == 3 * NAMES_MAX
    assert sum(one.missed_blocks for one in report.values()) == 6 * NAMES_MAX


def test_programs_are_bounded_and_each_tenant_has_its_share() -> None:
    """Of all tenants together: a heartbeat names and compares them."""
    stack, half = stack_of(PROGRAMS_MAX + 64), PROGRAMS_MAX // 2
    policy = stack.front.extents.policy
    for space, marker, count in ((ACME, "@acme/", half + 9), (BETA, "@beta/", 1), (POOL, "", half)):
        for n in range(count):
            session = f"{marker}program=p{n};1"
            stores.write(
                stack.front, keys(n, 1), 1.0, namespace=space, session=session, check=False
            )
    found = policy.bytes_of_programs()
    assert len(found) == PROGRAMS_MAX + 1
    assert found[OTHERS] == (9 + 1) * PAGE
    assert found["@beta/p0"] == PAGE
    stack.remove(ACME, [keys(n, 1)[0] for n in range(half + 9)])
    assert policy.programs.names.used == half
    write(stack.front, ACME, keys(half, 1), 2.0, session=SessionHint(f"@acme/program=p{half};1"))
    assert policy.bytes_of_programs()[f"@acme/p{half}"] == PAGE, "it was one of the others before"


def test_figures_of_many_tenants_are_those_of_all() -> None:
    stack, count = stack_of(256), 150
    policy = stack.front.extents.policy
    for n in range(count):
        space, session = Namespace(f"@t{n}/llm"), SessionHint(f"@t{n}/s")
        write(stack.front, space, keys(n, 1), 1.0, session=session)
    assert [policy.figures["sessions"] for _ in range(3)][-1] == count
    stack.remove(Namespace("@t0/llm"), keys(0, 1))
    set_quotas(stack.front, {})
    assert [policy.figures["sessions"] for _ in range(3)][-1] == count - 1


def test_reads_of_no_program_count_beside_those_of_programs() -> None:
    device, memory = both = [Store(8 * PAGE), Store(8 * PAGE)]
    consumers = Consumers(Blocks(both, front_tier=1), ["hbm", "dram"])
    write(device, POOL, keys(1, 1), 1.0, session=SessionHint("program=agent;1"))
    write(memory, POOL, keys(1, 1), 1.0, session=SessionHint("alone"))
    for tier in (None, 0, None, None):
        (pin,) = both[1 if tier is None else tier].pin(1, POOL, 0, keys(1, 1), 3.0)
        consumers.read(POOL, pin._replace(tier=tier), 1, PAGE, 0)
    report = named(consumers.report(), "program")
    assert {name: one.hit_blocks for name, one in report.items()} == {"agent": 1, "": 2}


async def test_reads_count_once_for_each_answer(pool_dev: dev.Dev, pool: Pool) -> None:
    digests = keys(1, 4)
    await pool.write(POOL, digests, [bytes(1000)] * 4, session="program=agent;1")
    buffers = [bytearray(1000) for _ in range(4)]
    await pool.read(POOL, digests, buffers)
    await pool.read(POOL, digests, buffers)
    report = [one for server in pool_dev.servers for one in server.stats(0.0).consumers]
    for kind, name in (("tenant", ""), ("namespace", "llm"), ("program", "agent")):
        found = [one for one in report if (one.by, one.name) == (kind, name)]
        assert sum(one.hit_blocks for one in found) == 8, kind
        assert sum(one.hit_bytes for one in found) == 8000, kind
