"""deploy/prometheus and deploy/grafana with a real Prometheus that watches a real pool."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from tests.support.programs import ROOT, RunningPrograms, free_address

DEPLOY = ROOT / "deploy"
#: Of the system, or where `make test WITH=prometheus` unpacks Debian's package.
PATHS = f"{ROOT / '.prometheus/usr/bin'}:/usr/local/bin:/usr/bin:/bin"
PROMETHEUS, PROMTOOL = (
    shutil.which(name) or shutil.which(name, path=PATHS) for name in ("prometheus", "promtool")
)
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None or PROMTOOL is None, reason="no prometheus: see make test WITH=prometheus"
)
RULES = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]
DASHBOARD = json.loads((DEPLOY / "grafana/kvpool.json").read_text())
TARGETS = [
    (panel["title"], target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
]


def promtool(*words: str | Path, stdin: bytes = b"") -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], input=stdin, capture_output=True, timeout=60)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert not re.search(rb"(?i)error|warn", done.stderr), done.stderr.decode()


class Watched(RunningPrograms):
    """A master, two servers and a client as processes, and the Prometheus that watches them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.master = free_address()
        self.pages = {name: free_address() for name in ("master", "a", "b", "client")}
        self.url = f"http://{free_address()}"
        on = ["--bind", self.master, "--http", self.pages["master"]]
        self.start_kvpool("master", "master", *on)
        for name in ("a", "b"):
            tiers = ["--tier", "dram:4MiB", "--tier", f"nvme:{folder}/{name}:16MiB"]
            member = ["--masters", self.master, "--id", name]
            self.start_kvpool(name, "server", *member, *tiers, "--http", self.pages[name])
        port = self.pages["client"].rpartition(":")[2]
        self.start("client", sys.executable, "-m", "tests.prometheus.traffic", self.master, port)
        self.start(
            "prometheus",
            str(PROMETHEUS),
            f"--config.file={self.configuration()}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
        )

    def configuration(self) -> Path:
        """The one of deploy/, with the addresses of these processes, and quicker."""
        settings = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
        settings["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        pages = self.pages
        jobs = {
            "kvpool-master": [pages["master"]],
            "kvpool-server": [pages["a"], pages["b"]],
            "kvpool-client": [pages["client"]],
        }
        for job in settings["scrape_configs"]:
            job["static_configs"] = [{"targets": jobs.pop(job["job_name"])}]
        assert not jobs
        rules = json.loads(json.dumps(RULES))
        for rule in rules["groups"][0]["rules"]:
            rule.pop("for", None)
        (self.folder / "alerts.yml").write_text(yaml.safe_dump(rules))
        config = self.folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(settings))
        return config

    def page(self, name: str) -> bytes:
        with urlopen(f"http://{self.pages[name]}/metrics", timeout=5) as answer:
            return bytes(answer.read())

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples that are numbers."""
        question = urlencode({"query": expression})
        with urlopen(f"{self.url}/api/v1/query?{question}", timeout=10) as answer:
            found = json.loads(answer.read())["data"]["result"]
        return [one for one in found if not math.isnan(float(one["value"][1]))]

    def firing(self) -> set[str]:
        with urlopen(f"{self.url}/api/v1/alerts", timeout=10) as answer:
            alerts = json.loads(answer.read())["data"]["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}

    def until(self, what: str, condition: Callable[[], object], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except (URLError, OSError):
                pass
            assert time.monotonic() < end, f"not within {seconds} s: {what}"
            time.sleep(0.3)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    running = Watched(tmp_path_factory.mktemp("pool"))
    try:
        ready = 'sum(rate(kvpool_tier_read_bytes_total{tier="nvme"}[10s])) > 0'
        running.until("blocks come back from a disk", lambda: running.query(ready))
        working = "kvpool_master_working_set_bytes"
        running.until("prompts have come back", lambda: running.query(working))
        yield running
    finally:
        running.close()


def as_grafana_asks(expression: str) -> str:
    return expression.replace("$__rate_interval", "20s").replace("$server", ".*")


def names_in(expression: str) -> set[str]:
    """The metrics of kvpool that an expression reads, but not what it records."""
    names = set(re.findall(r"(?:vllm:)?\bkvpool_[a-z_]+", expression.replace("[:_]", ":")))
    return names - {"kvpool_client", "kvpool_server"}


# --- without a pool ------------------------------------------------------------------------


def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    promtool("check", "rules", DEPLOY / "prometheus/alerts.yml")
    promtool("check", "config", DEPLOY / "prometheus/prometheus.yml")


def test_each_alert_fires_when_it_should_and_for_nothing_else(tmp_path: Path) -> None:
    cases = yaml.safe_load((Path(__file__).parent / "alerts_test.yml").read_text())["tests"]
    assert sorted(case["name"] for case in cases) == sorted(rule["alert"] for rule in ALERTS)
    assert all(case["alert_rule_test"][0]["exp_alerts"] for case in cases)
    rules = json.loads(json.dumps(RULES))
    for rule in rules["groups"][0]["rules"]:
        rule.pop("annotations", None)
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    copy = shutil.copy(Path(__file__).parent / "alerts_test.yml", tmp_path)
    promtool("test", "rules", copy)


def test_each_alert_says_what_is_wrong_and_is_documented() -> None:
    page = (ROOT / "docs/operate.md").read_text()
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]
        assert f"`{rule['alert']}`" in page, rule["alert"]


def test_the_dashboard_takes_its_data_source_from_a_variable() -> None:
    assert {one["name"] for one in DASHBOARD["templating"]["list"]} == {"datasource", "server"}
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
            assert panel["targets"], panel["title"]
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    places = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy)
        for panel in DASHBOARD["panels"]
        for dx in range(panel["gridPos"]["w"])
        for dy in range(panel["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places), "panels lie on each other"
    assert max(x for x, _ in places) < 24


# --- with a pool ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["master", "a", "client"])
def test_promtool_finds_nothing_wrong_with_the_metrics(watched: Watched, name: str) -> None:
    page = b"\n".join(
        line
        for line in watched.page(name).splitlines()
        if b"vllm:" not in line  # vLLM's own convention
    )
    promtool("check", "metrics", stdin=page + b"\n")


def test_every_target_is_scraped(watched: Watched) -> None:
    watched.until("four targets are up", lambda: len(watched.query("up == 1")) == 4)


@pytest.mark.parametrize(("title", "expression"), TARGETS)
def test_each_expression_of_the_dashboard_has_data(
    watched: Watched, title: str, expression: str
) -> None:
    asked = as_grafana_asks(expression)
    assert "$" not in asked
    watched.until(f"{title}: {asked}", lambda: watched.query(asked), 30.0)


def test_alerts_and_dashboard_read_metrics_that_there_are(watched: Watched) -> None:
    there: set[str] = set()
    for page in ("master", "a", "client"):
        for line in watched.page(page).decode().splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                there |= {f"{name}_bucket"} if kind == "histogram" else {name}
    read = {name for rule in ALERTS for name in names_in(rule["expr"])}
    read |= {name for _, expression in TARGETS for name in names_in(expression)}
    read = {name for name in read if "_cold_" not in name}  # tests/tiers/test_objects.py
    assert len(read) > 50
    assert read <= there, sorted(read - there)


def test_a_pool_that_is_well_has_no_alert(watched: Watched) -> None:
    # Small memory for the test, and no day of history: what is small here is no mistake.
    small = {"KvpoolFullOfYoungBlocks", "KvpoolTooSmall", "KvpoolWritesRefused"}
    assert watched.firing() <= small


def test_a_killed_server_and_then_a_killed_master_are_alerts(watched: Watched) -> None:
    watched.kill("a")
    watched.until("a is lost", lambda: "KvpoolServerLost" in watched.firing())
    assert watched.query('ALERTS{alertname=~"Kvpool.*",alertstate="firing"}')
    watched.kill("master")
    alerts = {"KvpoolNoMaster", "KvpoolMasterGone", "KvpoolServerWithoutMaster"}
    watched.until("no master answers", lambda: alerts <= watched.firing())
