"""`kvpool doctor --vllm JSON`: what is wrong with a `--kv-transfer-config`, before vLLM reads it.

vLLM does so when it has loaded for minutes, and says some of it on a line among thousands.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

from kvpool.errors import ConfigError
from kvpool.ops.finding import Finding

_CHECK: Final = "vLLM's JSON"
_CONNECTOR: Final = "KVPoolConnector"
_CONFIG: Final = "kv_connector_extra_config"
_ROLES: Final = ("kv_both", "kv_producer", "kv_consumer")
_NAMES: Final = ("kv_connector", "kv_role", "kv_load_failure_policy", _CONFIG)
#: Likeness of names that is taken for a slip: between those that vLLM has it is less.
_ALIKE: Final = 0.85


class ExaminedJson(NamedTuple):
    """What was found, and the settings with which such an engine meets the pool, if it starts."""

    findings: list[Finding]
    settings: dict[str, object] | None


def examine_json(text: str) -> ExaminedJson:
    """Look at the text as vLLM and the connector will."""
    try:
        given = json.loads(text)
    except ValueError as error:
        advice = "put it between '...' for the shell, and names and texts in it between double ones"
        return ExaminedJson([Finding(_CHECK, "fail", f"no JSON: {error}", advice)], None)
    if not isinstance(given, dict):
        wrong = Finding(_CHECK, "fail", "no object: expected {...}", "see connector/README.md")
        return ExaminedJson([wrong], None)
    findings = list(_examined(given))
    extra = _own_settings(given)
    if extra is None or any(one.verdict == "fail" for one in findings):
        return ExaminedJson(findings, None)
    try:
        chosen = resolve_name("kvpool_connector.settings:parse")(extra)
    except ConfigError as error:
        wrong = Finding(_CHECK, "fail", str(error), "do as it says: connector/README.md")
        return ExaminedJson([*findings, wrong], None)
    settings = {  # all of them: an engine does not read what the shell or a file says
        "client.masters": chosen.masters,
        "client.transports": chosen.transports,
        "cluster": chosen.cluster,
        "secret_file": chosen.secret_file,
        "local_only": False,
        "tenants_file": "",
    }
    fine = Finding(_CHECK, "ok", f"{_CONNECTOR}, {given['kv_role']}")
    return ExaminedJson(findings or [fine], settings)


def _examined(given: dict[str, Any]) -> Iterator[Finding]:
    if _own_settings(given) is None:
        text = f"kv_connector is {given.get('kv_connector')!r:.80}: no engine of this pool"
        advice = f'"kv_connector": "{_CONNECTOR}", alone or in a MultiConnector'
        yield Finding(_CHECK, "fail", text, advice)
    for part in _parts(given):
        yield from _examined_part(part)
    if (policy := given.get("kv_load_failure_policy", "fail")) != "recompute":
        text = f"kv_load_failure_policy is {policy!r:.80}: a request fails when one of its blocks "
        advice = 'add "kv_load_failure_policy": "recompute"'
        yield Finding(_CHECK, "warn", f"{text}is lost while it is loaded", advice)


def _examined_part(part: dict[str, Any]) -> Iterator[Finding]:
    for name in part:
        if name not in _NAMES and (close := difflib.get_close_matches(name, _NAMES, 1, _ALIKE)):
            yield Finding(_CHECK, "fail", f"{name!r:.80} is no name", f"did you mean {close[0]!r}?")
    if (role := part.get("kv_role")) not in _ROLES:
        text = f"kv_role is {role!r:.80}, of {part.get('kv_connector')!r:.80}"
        advice = '"kv_role": "kv_both" loads and saves; kv_producer saves, kv_consumer loads only'
        yield Finding(_CHECK, "fail", text, advice)


def _parts(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The whole, and the connectors in a MultiConnector: vLLM checks each as it does the whole."""
    yield given
    if given.get("kv_connector") == "MultiConnector" and isinstance(given.get(_CONFIG), dict):
        inner = given[_CONFIG].get("connectors")
        for one in inner if isinstance(inner, list) else ():
            if isinstance(one, dict):
                yield from _parts(one)


def _own_settings(given: dict[str, Any]) -> dict[str, Any] | None:
    """Those of the connector, alone or the first in a MultiConnector; None if it is not there."""
    own = (part for part in _parts(given) if part.get("kv_connector") == _CONNECTOR)
    extra = next((part.get(_CONFIG) or {} for part in own), None)
    return extra if isinstance(extra, dict) else None
