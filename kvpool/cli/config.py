"""The command config: the settings, where each value comes from, and their JSON schema."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, get_args, get_type_hints

import msgspec
import typer
from msgspec import Meta
from rich.markup import escape

from kvpool.cli.settings import read_file, setting_of
from kvpool.cli.shared import ConfigFile, Json, console, fail, settings_of
from kvpool.config import ClientConfig, Config, MasterConfig, ServerConfig
from kvpool.errors import ConfigError
from kvpool.units import human

if TYPE_CHECKING:
    from rich.table import Table

#: A size and a duration as a text.
_TEXTS: Final = {
    "size": r"^\s*[\d.]{1,20}\s*(|B|KiB|MiB|GiB|TiB)\s*$",
    "seconds": r"^\s*[\d.]{1,20}\s*(|us|ms|s|m|h)\s*$",
}


def config(
    values: Annotated[
        list[str] | None,
        typer.Argument(help="Settings as an option would give them, e.g. server.capacity=64GiB."),
    ] = None,
    file: ConfigFile = None,
    show: Annotated[
        bool, typer.Option("--show", help="Each setting, its value, and where that comes from.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="The JSON schema of a file with settings, for editors.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check the settings that a process would have here, and show them.

    Exit code 2 if one is unknown or wrong.
    """
    if schema:
        if show or values:
            fail(ConfigError("--schema is the same for all settings: give it alone"))
        print(json.dumps(json_schema(), indent=2))
        return
    flags: dict[str, object] = dict(map(_parsed, values or []))
    settings = settings_of(file, flags)
    found = list(sourced(settings, file, os.environ, flags))
    if as_json:
        print(json.dumps([one._asdict() for one in found]))
    elif show:
        from kvpool.ops.folding import Fitted

        console.print(Fitted(_table(found), names=1))
    else:
        changed = sum(one.source != "default" for one in found)
        console.print(f"{len(found)} settings are valid, {changed} are not the default")


class _Setting(NamedTuple):
    setting: str
    value: Any
    source: str
    unit: str = ""


def _parsed(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        fail(ConfigError(f"{text!r}: expected setting=value, such as server.capacity=64GiB"))
    return name, value


def sourced(
    settings: Config, file: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]
) -> Iterator[_Setting]:
    """Every setting with its value and its source, the last one of those that give it."""
    written = read_file(file) if file is not None else {}
    variables = {
        ".".join(setting_of(name)): name for name in environment if name.startswith("KVPOOL_")
    }
    for name, value, unit in _leaves(settings):
        section, _, last = name.rpartition(".")
        in_file = written.get(section, {}) if section else written
        source = "default"
        if name in flags:
            source = "argument"
        elif name in variables:
            source = f"environment {variables[name]}"
        elif last in in_file:
            source = f"file {file}"
        yield _Setting(name, value, source, unit)


def _leaves(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Name, value and unit of each setting."""
    hints = get_type_hints(type(settings), include_extras=True)
    for name, hint in hints.items():
        value = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            yield from _leaves(value, f"{name}.")
        else:
            yield f"{prefix}{name}", value, _unit(hint)


def _unit(hint: Any) -> str:
    meta = next((one for one in get_args(hint)[1:] if isinstance(one, Meta)), None)
    return str((meta.extra or {}).get("unit", "")) if meta is not None else ""


def _table(found: list[_Setting]) -> Table:
    from rich.table import Table

    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for one in found:
        source = escape(one.source)
        dim = "dim" if one.source == "default" else ""
        table.add_row(one.setting, escape(_as_written(one)), source, style=dim)
    return table


def _as_written(one: _Setting) -> str:
    if isinstance(one.value, bool):
        return "yes" if one.value else "no"
    if isinstance(one.value, list):
        return ", ".join(one.value) or "-"
    if one.unit == "size":
        return human(one.value)
    if one.unit == "seconds":
        return f"{one.value:g} s"
    return str(one.value) or "-"


def json_schema() -> dict[str, Any]:
    """The JSON schema of a file with settings: what `load` reads is valid, and sizes, durations
    and lists may be texts. A value that fits may still be refused where settings belong together.
    """
    made = msgspec.json.schema(Config)
    for section in (Config, MasterConfig, ServerConfig, ClientConfig):
        fields = made["$defs"][section.__name__]["properties"]
        defaults, comments = section(), _comments(section)
        for name, hint in get_type_hints(section, include_extras=True).items():
            field = fields[name]
            if "$ref" in field:
                field.pop("default")  # those of its settings
            elif field["type"] == "array":
                field |= {"type": ["array", "string"], "default": getattr(defaults, name)}
            elif unit := _unit(hint):
                field |= {"type": [field["type"], "string"], "pattern": _TEXTS[unit]}
            if name in comments:
                field["description"] = comments[name]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _comments(section: type[Any]) -> dict[str, str]:
    """What `#:` says above each setting; nothing without the source."""
    try:
        source = inspect.getsource(section)
    except OSError:
        return {}
    blocks = re.findall(r"((?:^ *#: .*\n)+) *(\w+):", source, re.MULTILINE)
    return {name: " ".join(re.findall(r"#: (.*)", text)) for text, name in blocks}
