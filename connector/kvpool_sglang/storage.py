"""The storage: SGLang's HiCache asks for pages by their hashes, and moves them.

Bytes travel between SGLang's host memory and the pool, without a buffer in between. SGLang calls
from threads of its own, and waits.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
from sglang.srt.runtime_context import get_server_args

from kvpool import ROOT, ConfigError, Namespace, ReadResult, WriteStatus
from kvpool_engines.adapter_settings import AdapterSettings, check_release
from kvpool_engines.engine_pool import EnginePool
from kvpool_sglang import engine_name
from kvpool_sglang.host_pages import HostPages, digest, name_of

#: The release whose interface this is. Others may have another one.
_SUPPORTED: Final = "0.5.23"
#: What SGLang itself puts into the dictionary.
_OF_SGLANG: Final = ("backend_name", "module_path", "class_name", "interface_v1")
#: Pools whose pages are needed for the end of a prefix only. A prefix that others continue has no
#: such pages in its middle, so a chain of pages would be found that cannot be used.
_TRAILING: Final = ("swa", "mamba", "auxiliary_swa", "draft_swa")
_STORED: Final = frozenset({"STORED", "ALREADY_STORED"})

log = logging.getLogger(__name__)


class KVPoolStorage(HiCacheStorage):  # type: ignore[misc]
    """HiCache's pages in a pool: one block for each page, in the chain that SGLang's hashes name.

    No method raises or waits longer than its timeout because of the pool: without it nothing is
    there and nothing is stored. Raises ConfigError for wrong settings, another release of SGLang,
    and what is not supported: pages that are split by heads (`tp_lcm_size`), and host pools that
    cannot be read in place.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        check_release("SGLang", importlib.metadata.version("sglang"), _SUPPORTED, log)
        engine_name.watch_updates()
        if storage_config.should_split_heads:
            raise ConfigError(
                f"tp_lcm_size {storage_config.tp_lcm_size} splits pages by heads, which kvpool "
                "does not store: leave it out; engines of equal tensor parallel size share"
            )
        given = dict(storage_config.extra_config or {})
        for name in _OF_SGLANG:
            given.pop(name, None)
        self._settings = settings = AdapterSettings.parse(given, "extra-config")
        self._config = storage_config
        self._pages: dict[str, HostPages] = {}
        self._names: dict[str, Namespace] = {}
        self._engine = engine_name.fields(
            _arguments(), storage_config.model_name or "", settings.revision
        )
        self._refused = ""
        #: Pages, by what became of them: `found`, `loaded`, `stored`, and `_missed` ones.
        self.counters: Counter[str] = Counter()
        self._pool = EnginePool(
            settings.client(),
            cluster=settings.member(),
            log=log,
            start_wait_s=settings.start_wait_s,
            pause_s=settings.pause_s,
        )

    # --- host memory ---------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register("kv", mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name in _TRAILING:
            self._refused = (
                f"this model keeps {name} pages beside its KV cache, of the end of a prefix only: "
                "kvpool neither stores nor loads any of it"
            )
            log.warning("kvpool: %s", self._refused)
            return
        self._register(name, host_pool)

    def _register(self, name: str, pool: Any) -> None:
        pages = self._pages[name] = HostPages(name, pool)
        fields = {
            "tenant": self._settings.tenant,
            "revision": self._settings.revision or "none",
            "sglang": importlib.metadata.version("sglang"),
            **self._engine,
        }
        self._names[name] = made = name_of(self._config, name, pages.layout, fields)
        log.info("kvpool: sharing pages as: %s", made.name)

    # --- what is there -------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """The length of the longest prefix of `keys` that the pool has."""
        return self._prefix("kv", keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """As `batch_exists`, of all pools together: each must have every page."""
        length = self.batch_exists(keys, extra_info)
        found: dict[str, int] = {}
        for transfer in pool_transfers or ():
            name = str(transfer.name)
            if transfer.hit_policy != PoolHitPolicy.ALL_PAGES or name not in self._pages:
                return PoolTransferResult.empty()
            found[name] = length = min(length, self._prefix(name, keys[:length]))
        return PoolTransferResult(length, found)

    def _serves(self) -> bool:
        """False, with one warning, for an engine whose pages have no right name."""
        changed = engine_name.weights_changed()
        if changed and not self._refused:
            self._refused = (
                f"the weights were changed in place ({changed}): the name of this engine's pages "
                "is that of the files it began with, so it shares none until it is started again"
            )
            log.warning("kvpool: %s", self._refused)
        return not self._refused

    def _prefix(self, name: str, keys: Sequence[str]) -> int:
        if not keys or name not in self._names or not self._serves():
            return 0
        timeout_s = self._settings.lookup_timeout_s
        match = self._pool.call(
            lambda pool: pool.match(
                self._names[name], [digest(key) for key in keys], timeout=timeout_s
            ),
            None,
        )
        if match is None:
            return 0
        self._pool.look_at([match.stopped])
        self.counters["found"] += match.length
        return match.length

    # --- moving pages --------------------------------------------------------------------

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Fill the pages at these places; which of them were there."""
        return self._load("kv", keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store the pages at these places; which of them the pool has now."""
        return self._store("kv", keys, host_indices, extra_info)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            one.name: self._load(str(one.name), one.keys or [], one.host_indices)
            for one in transfers
        }

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return {
            one.name: self._store(str(one.name), one.keys or [], one.host_indices, extra_info)
            for one in transfers
        }

    def _buffers(
        self, pages: HostPages | None, keys: Sequence[str], host_indices: Any, done: str
    ) -> list[list[memoryview]]:
        """The memory of these pages; none, with a line in the log, where they have none.

        SGLang calls from threads that an exception would end, and with them all of HiCache.
        """
        if not keys or pages is None or not self._serves():
            return []
        try:
            buffers = [pages.pieces(index) for index in pages.first_tokens(host_indices)]
        except Exception as error:
            log.warning("kvpool: pages are not %s, they have no memory: %r", done, error)
            return []
        if len(buffers) != len(keys):
            log.warning("kvpool: %d pages for %d keys: not %s", len(buffers), len(keys), done)
            return []
        return buffers

    def _load(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pages = self._pages.get(name)
        buffers = self._buffers(pages, keys, host_indices, "loaded")
        if pages is None or not buffers:
            return [False] * len(keys)
        results = self._pool.call(
            lambda pool: pool.read(
                self._names[name],
                [digest(key) for key in keys],
                buffers,
                timeout=self._settings.load_timeout_s,
            ),
            list[ReadResult](),
        )
        self._pool.look_at(result.status for result in results)
        # A shorter block is a hit for the pool, and fills a part of the page.
        loaded = [one.status.hit and one.size == pages.page_bytes for one in results]
        self.counters["loaded"] += sum(loaded)
        self.counters["loaded_missed"] += len(keys) - sum(loaded)
        return loaded or [False] * len(keys)

    def _store(
        self, name: str, keys: Sequence[str], host_indices: Any, extra_info: Any
    ) -> list[bool]:
        buffers = self._buffers(self._pages.get(name), keys, host_indices, "stored")
        if not buffers:
            return [False] * len(keys)
        before = getattr(extra_info, "prefix_keys", None)
        parent = digest(before[-1]) if before else ROOT
        statuses = self._pool.call(
            lambda pool: pool.write(
                self._names[name],
                [digest(key) for key in keys],
                buffers,
                parent=parent,
                timeout=self._settings.store_timeout_s,
            ),
            list[WriteStatus](),
        )
        self._pool.look_at(statuses)
        stored = [status.name in _STORED for status in statuses]
        self.counters["stored"] += sum(stored)
        self.counters["stored_missed"] += len(keys) - sum(stored)
        return stored or [False] * len(keys)

    # --- what SGLang does not call for pages in place ------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError(_IN_PLACE)

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError(_IN_PLACE)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError(_IN_PLACE)

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError(_IN_PLACE)

    def clear(self) -> None:
        """Nothing: the pool is shared, and has no list of what this engine has stored."""
        log.warning("kvpool: a pool that engines share is not cleared; use another revision")

    def get_stats(self) -> None:
        return None

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._pool.close()


_IN_PLACE: Final = (
    'kvpool reads and writes pages in place: add "interface_v1": 1 to '
    "--hicache-storage-backend-extra-config"
)


def _arguments() -> Any:
    """What the engine of this process was started with; None where there is none."""
    try:
        return get_server_args()
    except ValueError:
        return None
