"""The tenants file of a process: read at the start, and again whenever it or a secret changes.

A file that is not valid changes nothing: one warning says what is wrong with it, and the tenants
and secrets of before stay (design: tenants).
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kvpool import logs
from kvpool.errors import ConfigError
from kvpool.file_stamp import Stamp, stamp
from kvpool.secret_file import read_secret
from kvpool.supervision import Supervisor
from kvpool.tenants import Tenant, TenantKeys, parse_tenants
from kvpool.threads import in_thread
from kvpool.types import Cluster
from kvpool.yaml_file import read_yaml

log = logs.get("kvpool.tenants")

#: Files are looked at so often.
_LOOK_EVERY_S: Final = 1.0
#: Bytes of a tenants file: some 1,000 tenants.
_FILE_SIZE_MAX: Final = 1 << 20


class _Loaded(NamedTuple):
    """What one version of the files says."""

    tenants: dict[str, Tenant]
    secrets: dict[str, tuple[bytes, ...]]


class TenantsFile:
    """The tenants of a process, as the file says now.

    `keys` is one object that changes; who needs more registers with `on_change`.
    """

    def __init__(self, path: str, cluster: Cluster) -> None:
        """Read it. Raises ConfigError: one sentence with the file, the tenant and what is wrong."""
        self._path = Path(path)
        self._cluster = cluster
        self.tenants: Mapping[str, Tenant] = {}
        self.keys = TenantKeys()
        self._on_change: list[Callable[[Mapping[str, Tenant]], None]] = []
        self._look_now = asyncio.Event()
        #: Every file that was looked at, as it was just before it was read.
        self._stamps: dict[Path, Stamp] = {}
        self._apply(self._read(self._stamps))

    @classmethod
    def of_process(cls, path: str, cluster: Cluster) -> TenantsFile:
        """That of this process. SIGHUP, at which it is read again, ends the process at no time from
        now on: also not while that starts, or writes blocks back at its end."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return cls(path, cluster)

    def __repr__(self) -> str:
        return f"<TenantsFile {self._path} {len(self.tenants)} tenants>"

    def on_change(self, use: Callable[[Mapping[str, Tenant]], None]) -> None:
        """Call `use` with the tenants, now and after each change."""
        self._on_change.append(use)
        use(self.tenants)

    @asynccontextmanager
    async def watched(self, tasks: Supervisor) -> AsyncIterator[None]:
        """Inside it, changes are noticed within a second, and at once on SIGHUP."""
        loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGHUP)
        loop.add_signal_handler(signal.SIGHUP, self._look_now.set)
        # A bug must not end it: a later file may revoke a secret.
        watching = tasks.forever("tenants file", self._watch)
        try:
            yield
        finally:
            # Not by `remove_signal_handler`: until the next line SIGHUP would end the process.
            signal.signal(signal.SIGHUP, before if before is not None else signal.SIG_DFL)
            watching.cancel()
            await asyncio.wait([watching])

    async def _watch(self) -> None:
        try:
            async with asyncio.timeout(_LOOK_EVERY_S):
                await self._look_now.wait()
        except TimeoutError:
            pass
        asked = self._look_now.is_set()
        self._look_now.clear()
        await self.look(asked=asked)

    async def look(self, *, asked: bool = False) -> bool:
        """Read the files if they have changed, or if `asked`; True when they are used now."""
        now = await in_thread(lambda: {path: stamp(path) for path in self._stamps})
        if now == self._stamps and not asked:
            return False
        stamps: dict[Path, Stamp] = {}
        try:
            # In a thread: files may be slow.
            loaded = await in_thread(self._read, stamps)
        except ConfigError as error:
            log.warning("the tenants file is refused, the one before stays", why=str(error))
            self._stamps = stamps  # it is warned of once
            return False
        self._apply(loaded)
        self._stamps = stamps  # not before: what failed half way is done again
        return True

    def _apply(self, loaded: _Loaded) -> None:
        before, self.tenants = self.tenants, loaded.tenants
        self.keys.replace(loaded.secrets)
        if before:
            log.info(
                "the tenants file was read",
                tenants=len(loaded.tenants),
                added=sorted(loaded.tenants.keys() - before.keys()),
                removed=sorted(before.keys() - loaded.tenants.keys()),
            )
        for use in self._on_change:
            use(self.tenants)

    def _read(self, stamps: dict[Path, Stamp]) -> _Loaded:
        """Read every file, in a thread, and write down in `stamps` what it was before."""
        stamps[self._path] = stamp(self._path)
        what = f"tenants file {self._path}"
        # Cut off in its last line, `limit: 60%` is 60 bytes, which is a limit, too.
        raw = read_yaml(self._path, what, size_max=_FILE_SIZE_MAX, whole=True)
        tenants = parse_tenants(raw, str(self._path))
        secrets: dict[str, tuple[bytes, ...]] = {}
        owners = {self._cluster.secret: "the cluster"}
        for name, tenant in tenants.items():
            what = f"tenants file {self._path}: tenant {name!r}"
            read = []
            for file in tenant.secret_files:
                path = self._path.parent / file
                stamps[path] = stamp(path)
                try:
                    secret = read_secret(str(path))
                except ConfigError as error:
                    raise ConfigError(f"{what}: {error}") from None
                if secret in owners:
                    raise ConfigError(
                        f"{what}: the secret in {file} is that of {owners[secret]}, expected one "
                        "of its own: `kvpool secret FILE` makes one"
                    )
                owners[secret] = f"tenant {name!r}, too"
                read.append(secret)
            secrets[name] = tuple(read)
        return _Loaded(tenants, secrets)
