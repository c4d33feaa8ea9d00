"""Names of LMCache's objects in the pool: namespaces and digests.

LMCache's key has the model's name, rank, group, salt and a hash of the tokens. It has neither the
type nor the shape of the bytes, which come with the objects; nor the weights, of which LMCache
knows nothing: for these there is the setting `revision`. Ranks and groups are part of the digest,
so that what one task asks for is as a rule in one namespace, and in one message.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvpool import Namespace
from kvpool_engines import namespace

#: Change it when any field, or the bytes of an object, get another meaning.
_FORMAT: Final = "lmcache/2"
#: Layouts that are remembered, of models, ranks and groups.
_LAYOUTS_MAX: Final = 4096


class Layout(NamedTuple):
    """Of the objects of one model, rank and group: what names it, and bytes of an object."""

    text: str
    size: int


class ObjectNames:
    """Names objects for the pool, and remembers the layout of each group that it has seen.

    A lookup names no objects. Where it brings no layout either, it is that of the group's last
    store or load in this process. Not for several threads at once.
    """

    def __init__(self, tenant: str, revision: str) -> None:
        self._fields = {"tenant": tenant, "revision": revision}
        self._layouts: dict[tuple[str, int, int], Layout] = {}
        self._names: dict[tuple[str, str, str], Namespace] = {}

    def of_objects(
        self, keys: Sequence[Any], objects: Sequence[Any]
    ) -> Mapping[Namespace, list[int]]:
        """The positions of objects that are stored or loaded, by the namespace of their keys."""
        found: dict[Namespace, list[int]] = {}
        for position, (key, thing) in enumerate(zip(keys, objects, strict=True)):
            layout = _layout(*_shapes_and_types(thing.metadata))
            self._remember(key, layout)
            found.setdefault(self._name(key, layout.text), []).append(position)
        return found

    def of_lookup(
        self, keys: Sequence[Any], layouts: Mapping[int, Any]
    ) -> Mapping[Namespace, list[int]]:
        """The positions of keys that are looked up. Those of unknown layouts are left out."""
        found: dict[Namespace, list[int]] = {}
        given = {group: _layout(desc.shapes, desc.dtypes) for group, desc in layouts.items()}
        for position, key in enumerate(keys):
            layout = given.get(key.object_group_id)
            if layout is None or not layout.text:
                layout = self._layouts.get(_group(key))
            if layout is not None:
                found.setdefault(self._name(key, layout.text), []).append(position)
        return found

    def of_removal(self, keys: Sequence[Any]) -> Mapping[Namespace, list[int]]:
        """The positions of keys to be removed, as far as their layouts are known."""
        return self.of_lookup(keys, {})

    def sizes(self, keys: Sequence[Any]) -> list[int]:
        """Bytes of the objects with these keys, 0 where no layout is known."""
        known = [self._layouts.get(_group(key)) for key in keys]
        return [layout.size if layout is not None else 0 for layout in known]

    def _remember(self, key: Any, layout: Layout) -> None:
        if len(self._layouts) >= _LAYOUTS_MAX:
            self._layouts.clear()
        self._layouts[_group(key)] = layout

    def _name(self, key: Any, layout: str) -> Namespace:
        of = (key.model_name, key.cache_salt, layout)
        if (known := self._names.get(of)) is not None:
            return known
        if len(self._names) >= _LAYOUTS_MAX:
            self._names.clear()
        made = self._names[of] = namespace.name(
            {**self._fields, "model": key.model_name, "layout": layout, "salt": key.cache_salt},
            parts=1,
            format=_FORMAT,
        )
        return made


def digest(key: Any) -> bytes:
    """32 bytes for a key's rank, group and hash, whatever the hash's length."""
    place = b"%x.%x." % (key.kv_rank, key.object_group_id)
    return hashlib.sha256(place + key.chunk_hash).digest()


def _group(key: Any) -> tuple[str, int, int]:
    return key.model_name, key.kv_rank, key.object_group_id


def _shapes_and_types(metadata: Any) -> tuple[Iterable[Any], Iterable[Any]]:
    if metadata.shapes:
        return metadata.shapes, metadata.dtypes
    return [metadata.shape], [metadata.dtype]


def _layout(shapes: Iterable[Any], types: Iterable[Any]) -> Layout:
    return _layout_of(tuple(shapes), tuple(types))


@functools.lru_cache(_LAYOUTS_MAX)
def _layout_of(shapes: tuple[Any, ...], types: tuple[Any, ...]) -> Layout:
    pairs = list(zip(shapes, types, strict=True))
    text = " ".join(f"{'x'.join(map(str, shape))}:{kind}" for shape, kind in pairs)
    return Layout(text, sum(math.prod(shape) * kind.itemsize for shape, kind in pairs))
