"""Pictures, audio and video count by their contents, not by a name that a client has chosen.

vLLM takes the `uuid` of a content part for the hash of its contents. In one engine a lie costs its
own cache; in a pool it would give every engine the KV of another picture, and stay on disks. So in
the process that hashes, what comes from a `uuid` is marked, and no digest looks like a mark.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, Final

from kvpool_connector.vllm_engine.interface import ProcessorInputs

_MARK: Final = "client:"
#: What vLLM's hashers of contents return.
_DIGEST: Final = re.compile("[0-9a-f]{40,128}")


@functools.cache
def mark_client_names() -> None:
    """From now on hashes that are made of a client's `uuid` can be told from those of contents.

    Called again, this does nothing.
    """
    hashes = ProcessorInputs.get_mm_hashes

    @functools.wraps(hashes)
    def marked(inputs: Any, *args: Any, **kwargs: Any) -> dict[str, list[str]]:
        found: dict[str, list[str]] = hashes(inputs, *args, **kwargs)
        for modality, names in (inputs.mm_uuid_items or {}).items():
            if modality in found:
                found[modality] = [
                    digest if name is None else f"{_MARK}{digest}"
                    for digest, name in zip(found[modality], names, strict=True)
                ]
        return found

    ProcessorInputs.get_mm_hashes = marked


def named_by_client(features: Sequence[Any]) -> bool:
    """Whether one of a request's media has a name that is no digest of its contents."""
    return any(
        _DIGEST.fullmatch(feature.mm_hash or feature.identifier) is None for feature in features
    )
