"""Which variables and plug-ins of a vLLM process are a part of its engine's name."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_connector.identity.environment import environment


def named(variables: dict[str, str], plugins: Any = ()) -> dict[str, str]:
    return dict(environment(variables, plugins))


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_MARLIN_INPUT_DTYPE",
        "VLLM_HUMMING_INPUT_QUANT_CONFIG",
        "VLLM_HUMMING_USE_F16_ACCUM",
        "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
        "VLLM_DEEPEPLL_NVFP4_DISPATCH",
        "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
        "VLLM_CPU_INT4_W4A8",
        "VLLM_PLUGINS",
        "VLLM_OF_THE_NEXT_RELEASE",
        "NVIDIA_TF32_OVERRIDE",
    ],
)
def test_what_may_change_numbers_keeps_engines_apart(name: str) -> None:
    assert named({name: "1"}) != named({name: "0"}) != named({})


def test_hosts_ranks_and_operators_do_not() -> None:
    """What vLLM sets for its workers, what deployments set by host, and what is not vLLM's."""
    here = {
        "VLLM_HOST_IP": "10.0.0.1",
        "VLLM_DP_RANK": "1",
        "VLLM_DIST_IDENT": "of this process alone",
        "VLLM_CACHE_ROOT": "/var/cache",
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_API_KEY": "a secret, which is in no name and no log",
        "PATH": "/bin",
        "HOME": "/root",
        "MY_VLLM_SETTING": "1",
    }
    assert named(here) == {}


def test_no_secret_is_shown() -> None:
    shown = named({"VLLM_OF_A_PLUGIN_TOKEN": "secret-1"})
    assert shown != named({"VLLM_OF_A_PLUGIN_TOKEN": "secret-2"})
    assert "secret" not in str(shown)


def test_plugins_count_with_their_versions() -> None:
    def plugin(made: str, version: str) -> Any:
        dist = SimpleNamespace(metadata={"Name": made}, version=version)
        found = EntryPoint("theirs", "package:register", "vllm.general_plugins")
        return SimpleNamespace(name=found.name, value=found.value, dist=dist)

    assert named({}, [plugin("theirs", "1.0")]) != named({}, [plugin("theirs", "1.1")]) != {}
    assert named({}, [plugin("vllm", "0.32.0"), plugin("kvpool", "1.0")]) == {}
