"""Settings of connectors whose engine hands a dictionary on, such as LMCache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvpool import ClientConfig, Cluster, read_cluster
from kvpool_connector.settings import checked, naming

_Seconds = Annotated[float, Meta(ge=0, le=3600)]


class AdapterSettings(msgspec.Struct, frozen=True):
    """What an operator can set. Times are in seconds."""

    masters: Annotated[list[str], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:7450"]
    )
    transports: Annotated[list[str], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: ["shm", "tcp"]
    )
    cluster: str = "default"
    #: A file with the cluster's secret, if it has one, or with the key of a tenant.
    secret_file: str = ""
    #: Tenants share nothing.
    tenant: str = "default"
    #: Of the weights: these engines tell their model's name only. Change it with the weights.
    revision: str = ""
    #: The longest time that the engine's start waits for the pool.
    start_wait_s: _Seconds = 1.0
    lookup_timeout_s: _Seconds = 1.0
    load_timeout_s: _Seconds = 10.0
    store_timeout_s: _Seconds = 10.0
    #: Without calls after a failure.
    pause_s: _Seconds = 5.0

    @classmethod
    def parse(cls, params: Mapping[str, Any], where: str) -> AdapterSettings:
        """Raises ConfigError for an unknown name or a wrong value, with what is expected.

        `where` is what the engine calls the dictionary.
        """
        with naming(where):
            return checked(cls, params)

    def client(self) -> ClientConfig:
        """The configuration of the pool's client."""
        return ClientConfig(masters=self.masters, transports=self.transports)

    def owner(self) -> Cluster:
        """The cluster, with its secret. Raises ConfigError for a file that cannot be read."""
        return read_cluster(self.cluster, self.secret_file)
