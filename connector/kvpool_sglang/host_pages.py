"""Pages of SGLang's host memory: their bytes in place, and the name of everything that shapes
them."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import torch

from kvpool import ConfigError, Namespace
from kvpool_engines import namespace

#: Change it when any field, or the bytes of a page, get another meaning.
_FORMAT: Final = "sglang/1"
_DIGEST_SIZE: Final = 32


class HostPages:
    """The pages of one host pool. Raises ConfigError for memory that cannot be read in place."""

    def __init__(self, name: str, pool: Any) -> None:
        self._pool = pool
        self.page_tokens: int = pool.page_size
        try:
            page = pool.get_data_page(0, flat=False)
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise ConfigError(
                f"host pool {name} with layout {getattr(pool, 'layout', '?')} has no pages that "
                f"can be read in place ({error}): expected layer_first, page_first or "
                "page_first_direct"
            ) from None
        if page.device.type != "cpu":
            raise ConfigError(f"host pool {name} is on {page.device}, expected memory of the host")
        self.page_bytes = page.numel() * page.element_size()
        #: Equal for equal bytes in equal places.
        self.layout = f"{pool.layout}/{'x'.join(map(str, page.shape))}:{page.dtype}"

    def pieces(self, index: int) -> list[memoryview]:
        """The page whose first token is at `index`: contiguous ranges, in the page's order."""
        parts = [self._pool.get_data_page(index, flat=False)]
        while not parts[0].is_contiguous():  # all parts of a page have one shape and stride
            parts = [inner for part in parts for inner in part.unbind(0)]
        return [memoryview(part.view(-1).view(torch.uint8).numpy()) for part in parts]

    def first_tokens(self, host_indices: Any) -> list[int]:
        """Where the pages of these tokens begin."""
        starts: list[int] = host_indices[:: self.page_tokens].tolist()
        return starts


def name_of(config: Any, pool: str, layout: str, fields: dict[str, str]) -> Namespace:
    """The namespace of one pool's pages, of one rank: `fields`, which name the model, come first.

    Ranks of an MLA model have equal pages, and share them. The number of a data-parallel replica is
    not in it: replicas compute the same.
    """
    tensor = "mla" if config.is_mla_model else f"{config.tp_rank}of{config.tp_size}"
    return namespace.name(
        {
            **fields,
            "tensor": tensor,
            "pipeline": f"{config.pp_rank}of{config.pp_size}",
            "context": f"{config.attn_cp_rank}of{config.attn_cp_size}",
            "decode-context": f"{config.dcp_rank}of{config.dcp_size}",
            "pool": pool,
            "layout": layout,
        },
        parts=1,
        format=_FORMAT,
    )


def digest(key: str) -> bytes:
    """32 bytes for SGLang's key, which is a SHA-256 of a chain in hexadecimal digits."""
    try:
        raw = bytes.fromhex(key)
    except ValueError:
        raw = b""
    return (
        raw
        if len(raw) == _DIGEST_SIZE
        else hashlib.sha256(b"text" + key.encode(errors="surrogatepass")).digest()
    )
