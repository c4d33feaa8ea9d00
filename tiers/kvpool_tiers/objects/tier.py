"""Object stores as cold tiers: S3, Google Cloud Storage, Azure, and a directory that is shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvpool.errors import Closed, ConfigError, Unavailable
from kvpool.protocols.cold_tier import ColdSettings, ObjectStore, ReadInto
from kvpool.types import ALIGNMENT
from kvpool.units import human

_SIZE_MIN: Final = 1 << 20
_DEFAULT: Final = ColdSettings()


class Objects:
    """A cold tier: `--tier 's3://bucket/prefix:1TiB?endpoint=http://...'`.

    This server uses 1 TiB at most. The names of the settings are those of `ColdSettings`.
    """

    name = "objects"
    alignment = ALIGNMENT
    survives_restart = True
    is_cold = True

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
        smallest = max(_SIZE_MIN, object_size)
        if capacity < smallest:
            raise ConfigError(
                f"tier {self.name!r}: a size of {human(capacity)}, expected at least that of one "
                f"object, {human(smallest)} (setting object_size)"
            )
        above_0 = {
            "object_size": object_size,
            "wait_s": wait_s,
            "keep_s": keep_s,
            "hedge_s": hedge_s,
            "beat_s": beat_s,
        }
        for setting, value in above_0.items():
            if not value > 0:
                raise ConfigError(f"tier {self.name!r}: {setting}={value}, expected more than 0")
        if requests < 0:
            raise ConfigError(f"tier {self.name!r}: requests={requests}, expected 0 or more")
        self.capacity = capacity - capacity % self.alignment
        self.url = f"{self.name}:{place}"
        self.cold_settings = ColdSettings(
            encrypt, object_size, wait_s, keep_s, requests, hedge_s, beat_s
        )
        self._where = endpoint, region
        self._read_into: ReadInto | None = None
        self._text: Callable[[], str] = str
        self._closed = False
        self.objects("")  # a mistake shows at once

    def __repr__(self) -> str:
        return f"<Objects {self.url}>"

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
