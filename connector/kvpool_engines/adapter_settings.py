"""Settings of connectors whose engine hands a dictionary on, such as LMCache."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from kvpool import ClientConfig, Cluster, ConfigError, read_cluster
from kvpool_connector.settings import wrong_master, wrong_name


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What an operator can set. Times are in seconds."""

    masters: list[str] = field(default_factory=lambda: ["127.0.0.1:7450"])
    transports: list[str] = field(default_factory=lambda: ["shm", "tcp"])
    cluster: str = "default"
    #: A file with the cluster's secret, if it has one, or with the key of a tenant.
    secret_file: str = ""
    #: Tenants share nothing.
    tenant: str = "default"
    #: Of the weights: these engines tell their model's name only. Change it with the weights.
    revision: str = ""
    #: The longest time that the engine's start waits for the pool.
    start_wait_s: float = 1.0
    lookup_timeout_s: float = 1.0
    load_timeout_s: float = 10.0
    store_timeout_s: float = 10.0
    #: Without calls after a failure.
    pause_s: float = 5.0

    @classmethod
    def parse(cls, params: Mapping[str, object], where: str) -> AdapterSettings:
        """Raises ConfigError for an unknown name or a wrong value, with what is expected.

        `where` is what the engine calls the dictionary.
        """
        known = {one.name: one for one in fields(cls)}
        defaults = cls()
        for name, value in params.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else f": {', '.join(known)}"
                raise ConfigError(f"{where} has no setting {name!r}{hint}")
            default = getattr(defaults, name)
            fits = isinstance(value, type(default)) or (
                isinstance(default, float) and isinstance(value, int)
            )
            if isinstance(default, list):
                fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
                fits = fits and bool(value)
            if isinstance(default, float) and isinstance(value, (int, float)):
                fits = fits and 0 <= value <= 3600 and not isinstance(value, bool)
            if not fits:
                raise ConfigError(f"{where}: {name} is {value!r}, expected as in {default!r}")
        settings = cls(**params)  # type: ignore[arg-type]
        wrong = [
            wrong_name(one, getattr(settings, one)) for one in ("cluster", "tenant", "revision")
        ]
        wrong += map(wrong_master, settings.masters)
        for sentence in filter(None, wrong):
            raise ConfigError(f"{where}: {sentence}")
        return settings

    def client(self) -> ClientConfig:
        """The configuration of the pool's client."""
        return ClientConfig(masters=list(self.masters), transports=list(self.transports))

    def owner(self) -> Cluster:
        """The cluster, with its secret. Raises ConfigError for a file that cannot be read."""
        return read_cluster(self.cluster, self.secret_file)
