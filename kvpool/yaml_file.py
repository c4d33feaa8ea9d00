"""Settings in a YAML file. What is short to write may be long to read: it is refused in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvpool.errors import ConfigError

#: Sections in each other; names, values and ends of sections; characters of one of them.
_DEPTH_MAX: Final = 32
_EVENTS_MAX: Final = 1 << 15
_VALUE_MAX: Final = 1 << 12
#: Of `*name`, each of which may stand for many of those before it.
_ALIASES_MAX: Final = 16


def read_yaml(path: Path, what: str, *, size_max: int, whole: bool = False) -> Any:
    """What stands there; the last line of a file that must be `whole` has an end. `what` names the
    file in the ConfigError, which quotes nothing of it: who took a file of secrets for this one
    must not find them in a log."""
    import yaml  # not at the top (design: layout)

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # tens of times faster

    class Loader(base):  # type: ignore[misc]
        """Refuses a setting that is written twice, of which YAML would take the last."""

        def once(self, node: yaml.MappingNode) -> dict[object, object]:
            found: dict[object, object] = {}
            for key, value in node.value:
                name = self.construct_object(key, deep=True)
                if name in found:
                    raise ConfigError(f"{what}: {name!r} stands twice in one place")
                found[name] = self.construct_object(value, deep=True)
            return found

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, Loader.once)
    try:
        with open(path, "rb") as file:
            text = file.read(size_max + 1)
        if len(text) > size_max:
            raise ConfigError(f"{what}: larger than {size_max} bytes")
        if whole and text and not text.endswith(b"\n"):
            raise ConfigError(f"{what}: its last line does not end: it may be cut off")
        depth = aliases = 0
        for count, event in enumerate(yaml.parse(text, base)):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            aliases += isinstance(event, yaml.AliasEvent)
            if depth > _DEPTH_MAX or count > _EVENTS_MAX:
                raise ConfigError(f"{what}: deeper or longer than any settings are")
            if aliases > _ALIASES_MAX:
                raise ConfigError(
                    f"{what}: more than {_ALIASES_MAX} aliases: write out what they stand for"
                )
            if isinstance(event, yaml.ScalarEvent) and len(event.value) > _VALUE_MAX:
                raise ConfigError(f"{what}: a value of more than {_VALUE_MAX} characters")
        return yaml.load(text, Loader)
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}") from None
    except ConfigError:
        raise
    except Exception as error:  # besides YAMLError: a date 2020-13-45 is a bare ValueError
        mark = getattr(error, "problem_mark", None)
        where = f": line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{what}: no YAML that can be read{where}") from None
