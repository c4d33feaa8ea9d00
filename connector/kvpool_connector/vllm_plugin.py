"""What vLLM loads in each of its processes: the entry point in `vllm.general_plugins`.

A vLLM that the connector does not support must run all the same when nothing asks for the
connector, and end with a sentence when something does. vLLM logs an error of a plugin and goes on,
and would end much later with "Unsupported connector type". So the name is registered in any case:
the error comes from what vLLM loads under that name.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

CONNECTOR, MODULE = "KVPoolConnector", "kvpool_connector.vllm"


def register() -> None:
    """Make the name known to vLLM, have settings checked early, and device memory reserved."""
    try:
        from kvpool_connector import vllm
    except ImportError:
        if CONNECTOR not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    else:
        vllm.register()
