"""Object stores as cold tiers: S3, Google Cloud Storage, Azure, and a directory that is shared."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar, Final

from kvpool.errors import Closed, ConfigError, Unavailable
from kvpool.protocols.cold_tier import ColdSettings, ObjectStore, ReadInto
from kvpool.types import ALIGNMENT
from kvpool.units import human

_SIZE_MIN: Final = 1 << 20
_ENDPOINT: Final = re.compile(r"https?://[^\s/?#]+(/\S*)?")
_DEFAULT: Final = ColdSettings()


class Objects:
    """A cold tier: `--tier 's3://bucket/prefix:1TiB?endpoint=http://...'`.

    This server uses 1 TiB at most. The names of the settings are those of `ColdSettings`.
    """

    name = "objects"
    alignment = ALIGNMENT
    survives_restart = True
    is_cold = True
    #: Of settings. An object is in memory once; signs of life are outside of the budget.
    bounds: ClassVar[dict[str, tuple[float, float]]] = {
        "object_size": (64 << 10, 1 << 30),
        "wait_s": (0.01, 3600),
        "keep_s": (60, 1e9),
        "requests": (0, 1e9),
        "hedge_s": (0.01, 60),
        "beat_s": (0.5, 3600),
    }

    def __init__(
        self,
        capacity: int,
        place: str,
        *,
        endpoint: str = "",
        region: str = "",
        encrypt: bool = _DEFAULT.encrypt,
        object_size: int = _DEFAULT.object_size,
        wait_s: float = _DEFAULT.wait_s,
        keep_s: float = _DEFAULT.keep_s,
        requests: int = _DEFAULT.requests,
        hedge_s: float = _DEFAULT.hedge_s,
        beat_s: float = _DEFAULT.beat_s,
    ) -> None:
        """Raises ConfigError, also where the store's address or a package is not right."""
        settings = ColdSettings(encrypt, object_size, wait_s, keep_s, requests, hedge_s, beat_s)
        self._check(capacity, settings)
        if endpoint and not _ENDPOINT.fullmatch(endpoint):
            raise ConfigError(
                f"tier {self.name!r}: endpoint={endpoint}, expected one like http://10.0.0.1:9000"
            )
        self.capacity = capacity - capacity % self.alignment
        self.url = f"{self.name}:{place}"
        self.cold_settings = settings
        self._where = endpoint, region
        self._read_into: ReadInto | None = None
        self._text: Callable[[], str] = str
        self._closed = False
        self.objects("")  # a mistake shows at once

    def __repr__(self) -> str:
        return f"<Objects {self.url}>"

    def _check(self, capacity: int, settings: ColdSettings) -> None:
        """Raises ConfigError."""
        for setting, (least, most) in self.bounds.items():
            if not least <= (value := getattr(settings, setting)) <= most:
                raise ConfigError(
                    f"tier {self.name!r}: {setting}={value}, expected {least:,} to {most:,.0f}"
                )
        smallest = max(_SIZE_MIN, settings.object_size)
        if capacity < smallest:
            raise ConfigError(
                f"tier {self.name!r}: a size of {human(capacity)}, expected at least that of one "
                f"object, {human(smallest)} (setting object_size)"
            )

    def objects(self, prefix: str) -> ObjectStore:
        from kvpool_tiers.objects.remote import ObstoreObjects

        return ObstoreObjects(self.url, prefix, *self._where)

    def begin(self, read_into: ReadInto, status_text: Callable[[], str]) -> None:
        self._read_into, self._text = read_into, status_text

    @property
    def status_text(self) -> str:
        text = self._text()
        return f"{self.url}{', ' * bool(text)}{text}"

    async def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._closed:
            raise Closed("the tier is closed")
        if self._read_into is None:
            raise Unavailable("object store: nothing is known to be there")
        await self._read_into(offset, buffer)

    async def write_from(self, offset: int, buffer: memoryview) -> None:
        raise Unavailable("object store: it has no addresses to write to")

    def close(self) -> None:
        self._closed = True


class S3(Objects):
    name = "s3"


class GoogleStorage(Objects):
    name = "gs"


class Azure(Objects):
    name = "az"


class SharedDirectory(Objects):
    """A directory that all servers have mounted: `--tier file:///mnt/shared/kvpool:1TiB`."""

    name = "file"
