"""The vLLM connector consists of rooms that import one way, and each has a budget of lines.

A room is a package, or a file beside the packages. What stands beside them is what users and
vLLM's entry points name (`vllm`), and what several rooms need. What the connectors of all engines
need is below it (`kvpool_engines`); of what stands beside it, it knows nothing.
"""

from __future__ import annotations

from pathlib import Path

from tests.repo.test_budgets import held, lines
from tests.repo.test_house import ROOT, files, imports, within

CONNECTOR = ROOT / "connector/kvpool_connector"

#: Who may import whom: a room sees itself, and all rooms in the layers above it in this list.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("records",),
    ("identity", "plan", "memory", "hook_guard"),
    ("form_choice",),  # the joint of `kvpool_codecs`
    ("settings",),
    ("hints", "worker"),
    ("scheduler",),
    ("vllm_engine",),
    ("vllm",),
    ("vllm_plugin",),
)
#: Of a lower layer these alone may be imported: each room is as independent as it can be.
ONLY = {
    "hints": {"records"},
    "hook_guard": {"records"},
    "identity": {"records"},
    "memory": {"records"},
    "plan": {"records"},
}
#: Lines of the whole and of each package, (aim, today).
LINES = {
    "": (7_200, 9_194),
    "hints": (331, 331),
    "identity": (735, 735),
    "memory": (919, 919),
    "plan": (2_464, 2_464),
    "records": (667, 667),
    "scheduler": (1_000, 1_000),
    "vllm_engine": (1_600, 1_600),
    "worker": (854, 854),
}


#: Of it and of all packages beside it.
ALL_LINES = 14_850


def room_of(name: str) -> str:
    """`kvpool_connector.plan.planner.Planner` is of the room `plan`."""
    return name.removeprefix("kvpool_connector").lstrip(".").partition(".")[0]


def room(path: Path) -> str:
    return path.relative_to(CONNECTOR).parts[0].removesuffix(".py")


def connector_files() -> list[Path]:
    return files("connector.kvpool_connector")


def test_every_file_of_the_connector_is_in_a_layer() -> None:
    known = [one for layer in LAYERS for one in layer]
    assert {room(path) for path in connector_files()} == {*known, "__init__"}
    assert len(known) == len(set(known))


def test_the_connector_imports_one_way() -> None:
    wrong = []
    for path in connector_files():
        here = room(path)
        if here == "__init__":
            continue
        (level,) = (n for n, layer in enumerate(LAYERS) if here in layer)
        below = {one for layer in LAYERS[:level] for one in layer}
        allowed = ONLY.get(here, below) | {here}
        assert allowed <= below | {here}, here
        wrong += [
            f"{path.relative_to(CONNECTOR)} imports {name}"
            for name in imports(path)
            if within(name, "kvpool_connector") and room_of(name) not in allowed
        ]
    assert not wrong


def test_the_connector_does_not_know_what_stands_beside_it() -> None:
    others = ("kvpool_agents", "kvpool_lmcache", "kvpool_sglang", "kvpool_transformers")
    for path in connector_files():
        assert not [one for one in imports(path) if within(one, *others)], path
    for path in files("connector.kvpool_agents", *(f"connector.{one}" for one in others)):
        known = [one for one in imports(path) if within(one, "kvpool_connector")]
        allowed = {"settings"} if path.parent.name == "kvpool_agents" else set()
        assert {room_of(one) for one in known} <= allowed, path


def test_a_package_beside_it_hangs_at_one_joint() -> None:
    for package, joint in (
        ("kvpool_codecs", "form_choice.py"),
        ("kvpool_events", "vllm_engine/kv_events.py"),
    ):
        for path in connector_files():
            knows = [one for one in imports(path) if within(one, package)]
            assert not knows or path == CONNECTOR / joint, path


def test_what_all_connectors_need_knows_none_of_them() -> None:
    for path in files(*(f"connector.kvpool_{one}" for one in ("codecs", "engines", "events"))):
        wanted = {one.partition(".")[0] for one in imports(path)}
        own = {one for one in wanted if one.startswith("kvpool_")}
        assert own <= {"kvpool_engines", path.parent.name}, path
        assert "vllm" not in wanted, path
        assert "torch" not in wanted or path.stem == "fingerprint", path


def test_decisions_and_requests_know_no_tensors() -> None:
    for path in connector_files():
        if room(path) in ("plan", "hints", "scheduler"):
            assert not [one for one in imports(path) if within(one, "vllm", "torch")], path


def test_a_package_says_what_it_is() -> None:
    for path in connector_files():
        if path.name == "__init__.py" and path.parent != CONNECTOR:
            assert path.read_text().startswith('"""'), path


def test_all_connectors_together_are_no_larger() -> None:
    counted = sum(map(lines, (ROOT / "connector").rglob("*.py")))
    assert counted <= ALL_LINES, "remove as much as you add"
    assert counted + 100 >= ALL_LINES, f"{counted}: lower its limit to that"


def test_the_connector_is_no_larger() -> None:
    counted = {
        name: sum(lines(path) for path in connector_files() if name in ("", room(path)))
        for name in LINES
    }
    packages = {path.parent.name for path in CONNECTOR.glob("*/__init__.py")}
    assert packages == LINES.keys() - {""}, "a package needs a budget"
    wrong = [
        held(name or "the connector", count, *LINES[name], slack=100)
        for name, count in counted.items()
    ]
    assert not [one for one in wrong if one]
