"""The joint of `kvpool_codecs`: without it, or a codec, blocks are stored as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool_connector.memory.block_form import BlockForm


def form_of(codec: str) -> BlockForm:
    """The form that the setting `codec` asks for. Raises ConfigError."""
    from kvpool_connector.memory.block_form import BlockForm  # settings are read without torch

    if not codec:
        return BlockForm()
    from kvpool_codecs.coder import Coder

    return BlockForm(Coder(codec))


def fields_of(codec: str) -> dict[str, str]:
    """What the namespace says of it: engines with another codec, or another version of it, share
    nothing with this one. Raises ConfigError."""
    if not codec:
        return {}
    from kvpool_codecs.codec import codec_of, full_name

    return {"codec": full_name(codec_of(codec))}
