"""The connector's settings, checked when vLLM parses its configuration: before it loads weights.

vLLM makes a connector after the weights are loaded, and no method that it calls on a connector
earlier is always called (`requires_piecewise_for_cudagraph` gets the settings only where CUDA
graphs are on). So the plugin, which vLLM loads before it parses, has two of vLLM's configuration
classes end with this check. Both classes are public.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any, Final

from kvpool import ConfigError, KvpoolError
from kvpool_connector import settings
from kvpool_connector.settings import given_settings
from kvpool_connector.vllm_engine.interface import KVTransferConfig, VllmConfig

#: A block's layers beside one another, heads outside of tokens: all that kernels for GPUs take.
_ONE_ROW: Final = "BLHNC"


class RefusedSettings(KvpoolError, argparse.ArgumentTypeError):
    """A setting is wrong; the text names it.

    Of this type, because `vllm serve` prints the text of such an error as its last line. A
    ValueError would get lost in the middle of the report that pydantic makes of it.
    """


@functools.cache
def check_when_parsed() -> None:
    """From now on vLLM refuses a configuration whose settings for this connector are wrong.

    `KVTransferConfig` is made by the parser of the command line. `VllmConfig` is checked too,
    because a program may have made its `KVTransferConfig` before vLLM loaded the plugin. Called
    again, this does nothing.
    """
    for owner in (KVTransferConfig, VllmConfig):
        owner.__post_init__ = _then_check(owner.__post_init__)


def _then_check(post_init: Any) -> Any:
    @functools.wraps(post_init)
    def checked(config: Any) -> None:
        post_init(config)
        transfer = getattr(config, "kv_transfer_config", config)
        if transfer is not config and transfer is not None:  # MultiConnector makes others of it
            transfer.kvpool_alone = transfer.kv_connector == settings.CONNECTOR
        for given in given_settings(transfer) if transfer is not None else ():
            try:
                settings.parse(given).member()
            except ConfigError as error:
                raise RefusedSettings(str(error)) from None

    return checked


def wanted_layout(vllm_config: Any) -> str | None:
    """The layout of a KV cache in which each block is one row; None: as vLLM likes.

    vLLM takes another where its attention backend cannot. Beside other connectors nothing is
    wanted: vLLM refuses to start when two want different layouts. On a CPU it has one only.
    """
    alone = getattr(vllm_config.kv_transfer_config, "kvpool_alone", False)
    return _ONE_ROW if alone and vllm_config.device_config.device_type != "cpu" else None
