"""The joint of `codecs`: without that folder, or a codec, blocks are stored as they are."""

from __future__ import annotations

from kvpool_connector.memory.block_form import BlockForm, PlainForm


def form_of(codec: str) -> BlockForm:
    """The form that the setting `codec` asks for. Raises ConfigError."""
    if not codec:
        return PlainForm()
    from kvpool_connector.codecs.coded_form import CodedForm

    return CodedForm(codec)


def fields_of(codec: str) -> dict[str, str]:
    """What the namespace says of it: engines with another codec, or another version of it, share
    nothing with this one. Raises ConfigError."""
    if not codec:
        return {}
    from kvpool_connector.codecs.codec import codec_of, full_name

    return {"codec": full_name(codec_of(codec))}
