"""Settings: where they come from, and that nothing wrong goes unnoticed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvpool import registry
from kvpool.cli import run
from kvpool.cli.settings import load
from kvpool.config import parse_tier, parse_transport
from kvpool.errors import ConfigError
from kvpool.server.eviction.density import Density
from kvpool.server.eviction.lru import LRU
from kvpool.units import parse_duration, parse_size


@pytest.mark.parametrize("section", ["", "master", "server", "client"])
def test_settings_do_not_change_while_a_process_runs(section: str) -> None:
    found = getattr(load(), section) if section else load()
    for name in found.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(found, name, getattr(found, name))


#: Every setting, by section.
DEFAULTS = {
    "master": {
        "bind": "127.0.0.1:7450",
        "timeout_s": 3.0,
        "blocks_max": 50_000_000,
        "http": "",
        "insecure": False,
    },
    "server": {
        "id": "",
        "identity_file": "",
        "masters": ["127.0.0.1:7450"],
        "capacity": 1 << 30,
        "tiers": [],
        "listen": ["tcp://127.0.0.1:0", "shm://"],
        "announce": [],
        "heartbeat_s": 1.0,
        "policy": "",
        "connections_max": 1024,
        "write_mode": "write_through",
        "flush_s": 8.0,
        "balance": True,
        "drain_s": 0.0,
        "back_in_s": 0.0,
        "http": "",
        "insecure": False,
    },
    "client": {
        "masters": ["127.0.0.1:7450"],
        "transports": ["inproc", "shm", "ucx", "tcp"],
        "timeout_s": 5.0,
        "attempt_s": 1.0,
        "hedge_s": 0.1,
        "verify": True,
        "device_staging": 128 << 20,
        "device_path": "staged",
    },
}


@pytest.mark.parametrize("section", DEFAULTS)
def test_defaults_stay(section: str) -> None:
    """Users rely on them, and on their units."""
    found = getattr(load(), section)
    assert {name: getattr(found, name) for name in found.__struct_fields__} == DEFAULTS[section]
    assert not load().local_only
    assert (load().cluster, load().secret_file) == ("default", "")


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("master.blocks_max", 1, 10**12),
        ("master.timeout_s", 0.001, 86_400.0),
        ("server.capacity", 4096, 2**60),
        ("server.connections_max", 1, 10**9),
        ("server.flush_s", 0.001, 86_400.0),
        ("server.drain_s", 0, 86_400.0),
        ("server.back_in_s", 0, 86_400.0),
        ("client.hedge_s", 0.001, 86_400.0),
    ],
)
def test_the_smallest_and_the_largest_value_of_a_setting(
    name: str, least: float, most: float
) -> None:
    section, _, setting = name.partition(".")
    for value in (least, most):
        found = load(flags={name: value})
        assert getattr(getattr(found, section), setting) == value
    too_large = () if most in (10**9, 10**12) else (most + 1,)
    for value in (0 if isinstance(least, float) else least - 1, *too_large):
        with pytest.raises(ConfigError, match=setting):
            load(flags={name: value})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64GiB", 64 << 30),
        ("1.5MiB", 3 << 19),
        ("0.3KiB", 307),
        ("4096", 4096),
        ("4096.0", 4096),
        (7, 7),
        (" 2 KiB ", 2048),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64GB", "did you mean 64GiB"),
        ("-1", "negative"),
        ("1e3", "1e3"),
        ("lots", "lots"),
        ("", "expected"),
        ("1..2GiB", "no number"),
        ("0.5", "a whole number"),
        ("4096.7B", "a whole number"),
        ("1" * 400, "1111"),
        ("\u0663MiB", "expected"),  # an Arabic 3
    ],
)
def test_wrong_sizes(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("40us", 4e-5),
        ("250ms", 0.25),
        ("2s", 2.0),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("0.5", 0.5),
        (3, 3.0),
        (0.25, 0.25),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["1 fortnight", "\uff15s", "nan", "inf", "-1s", "1e9", ""])
def test_a_wrong_duration(text: str) -> None:
    with pytest.raises(ConfigError, match=f"duration {text!r}"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("server: {capcity: 1GiB}", "did you mean 'server.capacity'"),
        ("sever: {}", "did you mean 'server'"),
        ("master: {forget_s: 1h}", "'master.forget_s' is gone: remove it: a lost server"),
        ("server: {copies_max: 2}", "'server.copies_max' is gone: remove it: lost copies"),
        (
            "server: {fetch_rate: 1GiB}",
            "'server.fetch_rate' is gone: remove it: fetches take a quarter",
        ),
        ("client: {measure: false}", "'client.measure' is gone: remove it: paths are taken"),
        ("server: {zeal_max: 2}", "unknown setting 'server.zeal_max'; known: server.id"),
        ("server: {capacity: 64GB}", "setting 'server.capacity'.*did you mean 64GiB"),
        ("server: {heartbeat_s: 0}", "heartbeat_s"),
        ("server: {id: gpu 17}", "'gpu 17', expected .* without blanks"),
        ("server: {id: 'gpu-1,gpu-2'}", "without blanks and commas"),
        ("server: {connections_max: many}", "connections_max"),
        ("server: [1, 2]", "expected a section"),
        ("server: {alignment: 3000}", "'server.alignment' is gone: remove it: blocks start at"),
        ("client: {masters: []}", "masters"),
        ("- a\n- b", "expected settings"),
        ("a: [", "config file"),
        ("server: {balance: perhaps}", "neither true nor false"),
        ("server: {prefault: false}", r"is gone: remove it, or write .*dram:8GiB\?prefault=no"),
        ("client: {copies_max: 1}", "'client.copies_max' is gone: remove it: blocks that many"),
        ("server: {capacity: 0}", "'server.capacity' is 0"),
        ("server: {capacity: .inf}", "inf"),
        (f"server: {{capacity: {'1' * 400}}}", "1152921504606846976"),
        ("server: {heartbeat_s: .nan}", "heartbeat_s"),
        ("server: {connections_max: true}", "connections_max"),
        ('server: {id: "a\\nb"}', "printable"),
        ("server: null", "expected a section"),
        ("1: 2", "unknown setting '1'"),
        ("[" * 1000, "config file"),
        ("cluster: 2020-13-45", "no YAML that can be read$"),
        ("cluster: a\ncluster: b", "'cluster' stands twice"),
        ("#" * 65_537, "larger than 65536 bytes"),
        ("cluster: !!timestamp x", "config file"),
        (
            f"cluster: [&a x, {', '.join(['*a'] * 17)}]",
            "more than 16 aliases: write out what they stand for",
        ),
        ("cluster: !!python/object:os.system x", "config file"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "kvpool.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load(file)


def test_settings_of_tiers_and_transports_have_defaults() -> None:
    """What `nvme:/file:1GiB` and `ucx://host:1` mean when nothing else is said."""
    ours = [
        entry.load()
        for kind in (registry.TIERS, registry.TRANSPORTS)
        for name, entry in sorted(registry.installed(kind).items())
        if name in ("dram", "nvme", "tcp", "shm", "inproc")
    ]
    found = [
        {one.name: one.default for one in inspect.signature(make).parameters.values()}
        for make in ours
    ]
    assert [one.get("prefault") for one in found] == [True, None, None, None, None]
    nvme = {name: found[1][name] for name in ("queue_depth", "direct", "alignment")}
    assert nvme == {"queue_depth": 16, "direct": True, "alignment": 4096}


@pytest.mark.parametrize("prefault", [True, False])
def test_memory_is_touched_at_start_unless_the_tier_says_otherwise(
    prefault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Memory:
        def __init__(self, capacity: int, *, prefault: bool = True) -> None:
            made.append((capacity, prefault))

    monkeypatch.setattr(registry, "_load", lambda *_: Memory)
    registry.tier(parse_tier("dram:1MiB"), prefault=prefault)
    registry.tier(parse_tier(f"dram:1MiB?prefault={not prefault}"), prefault=prefault)
    assert made == [(1 << 20, prefault), (1 << 20, not prefault)]


@pytest.mark.parametrize("command", [run.master, run.server, run.dev])
def test_a_process_outlives_the_shell_that_started_it(command: Callable[..., None]) -> None:
    parameters = inspect.signature(command).parameters
    for flag in ("die_with_parent", "insecure", "local_only"):
        assert flag not in parameters or parameters[flag].default is False


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load(tmp_path / "nowhere.yaml")
    assert load(environment={"KVPOOL_CONFIG": "it names the file"}) == load()
    named = "environment variable KVPOOL_NONSENSE: unknown setting 'nonsense'"
    with pytest.raises(ConfigError, match=named):
        load(environment={"KVPOOL_NONSENSE": "1"})


# --- settings of transports -------------------------------------------------------------------


class Pigeon:
    """A transport of another package. Its constructor says which settings there are."""

    scheme = "pigeon"

    def __init__(
        self,
        *,
        birds: int = 2,
        armoured: bool = False,
        load: int = 1 << 20,
        rest_s: float = 1.5,
        losses: float = 0.1,
        home: str = "",
    ) -> None:
        self.settings = (birds, armoured, load, rest_s, losses, home)


def install_pigeon(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    installed = registry.installed

    def with_pigeon(group: str) -> dict[str, EntryPoint]:
        entry = EntryPoint("pigeon", where, registry.TRANSPORTS)
        return installed(group) | ({"pigeon": entry} if group == registry.TRANSPORTS else {})

    monkeypatch.setattr(registry, "installed", with_pigeon)


@pytest.fixture
def pigeon(monkeypatch: pytest.MonkeyPatch) -> None:
    install_pigeon(monkeypatch, f"{__name__}:Pigeon")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("pigeon", (2, False, 1 << 20, 1.5, 0.1, "")),
        ("pigeon?birds=7&armoured=yes", (7, True, 1 << 20, 1.5, 0.1, "")),
        ("pigeon?load=16MiB&rest_s=250ms", (2, False, 16 << 20, 0.25, 0.1, "")),
        ("pigeon?losses=0.5&home=a,b%2C%26c", (2, False, 1 << 20, 1.5, 0.5, "a,b,&c")),
        ("pigeon://loft:1?birds=3", (3, False, 1 << 20, 1.5, 0.1, "")),
    ],
)
def test_a_third_party_transport_has_settings(
    pigeon: None, spec: str, expected: tuple[object, ...]
) -> None:
    for made in (registry.transport(spec), *registry.transports([spec, "tcp"]).values()):
        if isinstance(made, Pigeon):
            assert made.settings == expected


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("pigeon?wings=2", "'pigeon' has no setting 'wings'; its settings: birds, armoured"),
        ("pigeon?birds=many", "'pigeon': setting 'birds': size 'many': expected"),
        ("pigeon?armoured=perhaps", "'pigeon': setting 'armoured'.*neither true nor false"),
        ("pigeon?load=1GB", "did you mean 1GiB"),
        ("pigeon?rest_s=soon", "'pigeon': setting 'rest_s': duration 'soon'"),
        ("pigeon?losses=few", "'pigeon': setting 'losses' is 'few', expected a number"),
        ("pigeon?birds=1&birds=2", "setting 'birds' is given twice"),
        ("pigeon?birds", "'birds': expected setting=value"),
        ("?birds=1", "expected a name"),
        ("tcp?birds=1", "'tcp' has no setting 'birds'; its settings: none"),
    ],
)
def test_a_wrong_setting_is_never_ignored(pigeon: None, spec: str, says: str) -> None:
    """Also where others would do: a transport that is not there is left out, a mistake is not."""
    for strict in (False, True):
        with pytest.raises(ConfigError, match=says):
            registry.transports(["inproc", spec], strict=strict)


def test_a_transport_that_cannot_be_loaded_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is there, and a library that it needs is not."""
    install_pigeon(monkeypatch, "kvpool.no_such_module:Pigeon")
    assert list(registry.transports(["pigeon", "tcp"])) == ["tcp"]
    registry.check_settings(["pigeon?birds=1", "tcp"])
    for specs, strict in ((["pigeon"], False), (["pigeon", "tcp"], True)):
        with pytest.raises(ConfigError, match="'pigeon' is installed but cannot be loaded"):
            registry.transports(specs, strict=strict)


def test_what_is_not_installed_is_named_and_hides_nothing_behind_it() -> None:
    assert list(registry.transports(["pigeon", "tcp", "dove", "shm"])) == ["tcp", "shm"]
    with pytest.raises(ConfigError, match=r"none of the transports \['pigeon'\] is installed"):
        registry.transports(["pigeon"])
    with pytest.raises(ConfigError, match=r"no policy .pigeon. is installed; installed: .*lru"):
        registry.policy("pigeon", 1 << 20)


def test_the_default_policy_is_lru_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(registry.policy(load().server.policy, 1 << 20), Density)
    installed = registry.installed
    for there in ({}, {"density": EntryPoint("density", "kvpool.no:Density", registry.POLICIES)}):
        monkeypatch.setattr(
            registry,
            "installed",
            lambda group, there=there: {"lru": installed(group)["lru"]} | there,
        )
        assert isinstance(registry.policy(load().server.policy, 1 << 20), LRU)
        assert "the default policy is not installed" in caplog.text
        caplog.clear()
        with pytest.raises(ConfigError, match="policy 'density'"):
            registry.policy("density", 1 << 20)


def test_a_transport_has_one_set_of_settings(pigeon: None) -> None:
    with pytest.raises(ConfigError, match="'pigeon' is given twice with different settings"):
        registry.transports(["pigeon://a:1", "pigeon://a:2?birds=1"])
    assert list(registry.transports(["pigeon://a:1", "pigeon://a:2"])) == ["pigeon"]


def test_settings_come_from_files_the_environment_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.yaml"
    file.write_text('client: {transports: ["ucx?tls=rc,self&rails=2", tcp]}')
    spec = ("ucx", "", {"tls": "rc,self", "rails": "2"})
    assert parse_transport(load(file).client.transports[0]) == spec
    environment = {
        "KVPOOL_CLIENT_TRANSPORTS": "ucx?tls=rc%2Cself&rails=2, tcp",
        "KVPOOL_SERVER_LISTEN": "shm://, ucx://h:1?tls=rc,self&rails=2,tcp://h:2",
    }
    found = load(environment=environment)
    assert [parse_transport(text) for text in found.client.transports] == [spec, ("tcp", "", {})]
    assert [parse_transport(text) for text in found.server.listen] == [
        ("shm", "shm://", {}),
        ("ucx", "ucx://h:1", spec[2]),
        ("tcp", "tcp://h:2", {}),
    ]
    found = load(flags={"client.transports": ["ucx?tls=rc,self&rails=2"]})
    assert parse_transport(found.client.transports[0]) == spec


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("KVPOOL_SERVER_UCX_TLS", "server.listen: ucx://10.0.0.1:7461?tls="),
        ("KVPOOL_SERVER_UCX_RAILS", "server.listen: ucx://10.0.0.1:7461?rails="),
        ("KVPOOL_CLIENT_UCX_DEVICES", "client.transports: ucx?net_devices="),
    ],
)
def test_a_setting_that_has_moved_names_its_new_form(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(new)):
        load(environment={old: "1"})
