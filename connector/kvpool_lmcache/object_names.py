"""Names of LMCache's objects in the pool: namespaces and digests.

LMCache's key has the model's name, rank, group, salt and a hash of the tokens. It has neither the
type nor the shape of the bytes, which come with the objects; nor the weights, of which LMCache
knows nothing: for these there is the setting `revision`. (design: other-engines)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvpool import Namespace
from kvpool_connector import namespace

#: Change it when any field, or the bytes of an object, get another meaning.
_FORMAT: Final = "lmcache/1"
_DIGEST_SIZE: Final = 32
#: Layouts that are remembered, of models, ranks and groups.
_LAYOUTS_MAX: Final = 4096


class ObjectNames:
    """Names objects for the pool, and remembers the layout of each group that it has seen.

    A lookup names no objects. Where it brings no layout either, it is that of the group's last
    store or load in this process. Not for several threads at once.
    """

    def __init__(self, tenant: str, revision: str) -> None:
        self._fields = {"tenant": tenant, "revision": revision}
        self._layouts: dict[tuple[str, int, int], str] = {}
        self._names: dict[tuple[object, ...], Namespace] = {}

    def of_objects(
        self, keys: Sequence[Any], objects: Sequence[Any]
    ) -> Mapping[Namespace, list[int]]:
        """The positions of objects that are stored or loaded, by the namespace of their keys."""
        found: dict[Namespace, list[int]] = {}
        for position, (key, thing) in enumerate(zip(keys, objects, strict=True)):
            layout = _layout(*_shapes_and_types(thing.metadata))
            self._remember(key, layout)
            found.setdefault(self._name(key, layout), []).append(position)
        return found

    def of_lookup(
        self, keys: Sequence[Any], layouts: Mapping[int, Any]
    ) -> Mapping[Namespace, list[int]]:
        """The positions of keys that are looked up. Those of unknown layouts are left out."""
        found: dict[Namespace, list[int]] = {}
        texts = {group: _layout(desc.shapes, desc.dtypes) for group, desc in layouts.items()}
        for position, key in enumerate(keys):
            layout = texts.get(key.object_group_id) or self._layouts.get(_group(key), "")
            if layout:
                found.setdefault(self._name(key, layout), []).append(position)
        return found

    def of_removal(self, keys: Sequence[Any]) -> Mapping[Namespace, list[int]]:
        """The positions of keys to be removed, as far as their layouts are known."""
        return self.of_lookup(keys, {})

    def _remember(self, key: Any, layout: str) -> None:
        if len(self._layouts) >= _LAYOUTS_MAX:
            self._layouts.clear()
        self._layouts[_group(key)] = layout

    def _name(self, key: Any, layout: str) -> Namespace:
        of = (*_group(key), key.cache_salt, layout)
        if (known := self._names.get(of)) is not None:
            return known
        if len(self._names) >= _LAYOUTS_MAX:
            self._names.clear()
        made = self._names[of] = namespace.name(
            {
                **self._fields,
                "model": key.model_name,
                "rank": f"{key.kv_rank:#x}",
                "group": key.object_group_id,
                "layout": layout,
                "salt": key.cache_salt,
            },
            parts=1,
            format=_FORMAT,
        )
        return made


def digest(key: Any) -> bytes:
    """32 bytes for a key's hash, whatever its length: all digests of one call are equally long."""
    raw: bytes = key.chunk_hash
    return raw if len(raw) == _DIGEST_SIZE else hashlib.sha256(b"short" + raw).digest()


def _group(key: Any) -> tuple[str, int, int]:
    return key.model_name, key.kv_rank, key.object_group_id


def _shapes_and_types(metadata: Any) -> tuple[Iterable[Any], Iterable[Any]]:
    if metadata.shapes:
        return metadata.shapes, metadata.dtypes
    return [metadata.shape], [metadata.dtype]


def _layout(shapes: Iterable[Any], types: Iterable[Any]) -> str:
    pairs = zip(shapes, types, strict=True)
    return " ".join(f"{'x'.join(map(str, shape))}:{kind}" for shape, kind in pairs)
