"""What the keys and values of a model depend on, as a namespace; and models that are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvpool import Namespace, UsageError
from kvpool_engines import namespace
from kvpool_transformers.blocks import BlockLayout
from kvpool_transformers.model_state import NAMES_ONLY, ModelState

#: Change it when any field, or the bytes of a block, get another meaning.
_FORMAT: Final = "transformers/2"
_SUPPORTED: Final = (5, 19)
#: Their keys depend on how long the text is *in all*, so a prefix has no keys of its own.
_ROPES_BY_LENGTH: Final = ("dynamic", "longrope")


def check_version() -> str:
    """A warning for a release that was not tested, or "". Raises UsageError for a wrong one."""
    found = transformers.__version__
    major, minor = (int(part) for part in found.split(".")[:2])
    supported = ".".join(map(str, _SUPPORTED))
    if major != _SUPPORTED[0] or (major, minor) < _SUPPORTED:
        raise UsageError(
            f"transformers {found} is not supported: expected {supported} or a later 5.x "
            "(pip install 'kvpool[transformers]')"
        )
    return "" if (major, minor) == _SUPPORTED else f"transformers {found}: tested with {supported}"


def check_model(model: Any) -> None:
    """Raises UsageError, with the reason, for a model whose prefixes cannot be shared."""
    config = model.config
    name = type(model).__name__
    if config.is_encoder_decoder:
        raise UsageError(f"{name} has an encoder: its keys depend on more than the tokens before")
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise UsageError(
            f"{name} has adapters that can be switched off without a change of its weights: merge "
            "them first (merge_and_unload)"
        )
    text = config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", False) or not getattr(text, "is_causal", True):
        raise UsageError(f"{name} also attends to later tokens: a prefix has no keys of its own")
    settings = text.to_dict()
    for rope in _ropes_of([settings.get("rope_parameters"), settings.get("rope_scaling")]):
        if rope in _ROPES_BY_LENGTH:
            raise UsageError(
                f"{name} has rotary embeddings of the type {rope!r}: its keys change with the "
                "length of the whole text"
            )
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is not DynamicLayer:
            raise UsageError(
                f"layer {number} of {name} keeps its cache as {type(layer).__name__}: only models "
                "all of whose layers keep every token are supported, not sliding windows, linear "
                "attention or hybrids of them"
            )


def why_not_now(model: Any, state: ModelState) -> str:
    """What about this moment makes keys that nobody else may have; empty if nothing does."""
    if torch.is_autocast_enabled(next(model.parameters()).device.type):
        return "autocast is on, which computes in another type than the model's"
    return state.moment


def namespace_of(
    model: Any, state: ModelState, digest: str, layout: BlockLayout, salt: str
) -> Namespace:
    """Everything that must be equal for two processes to share blocks, as readable text.

    `digest` is that of the state's bytes.
    """
    config = model.config.get_text_config(decoder=True)
    settings = {key: value for key, value in config.to_dict().items() if key not in NAMES_ONLY}
    return namespace.name(
        {
            "model": type(model).__name__,
            "config": namespace.digest(json.dumps(settings, sort_keys=True, default=str)),
            "modules": state.structure,
            "memory": digest,
            "attention": getattr(config, "_attn_implementation", None) or "eager",
            "device": next(model.parameters()).device.type,
            "layout": layout.name,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "salt": salt,
        },
        parts=1,
        format=_FORMAT,
    )


def _ropes_of(settings: Iterable[Any]) -> Iterator[object]:
    """The types of rotary embeddings in a configuration, which may have one for each layer type."""
    for one in settings:
        if isinstance(one, dict):
            yield one.get("rope_type", one.get("type"))
            yield from _ropes_of(one.values())
