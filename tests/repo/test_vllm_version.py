"""One version of vLLM is supported, and every place that names it names the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_all_places_name_one_version_of_vllm() -> None:
    interface = (ROOT / "connector/kvpool_connector/vllm_engine/interface.py").read_text()
    makefile, readme = (ROOT / "Makefile").read_text(), (ROOT / "connector/README.md").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (supported,) = re.findall(r'^SUPPORTED: Final = "([\d.]+)"$', interface, re.M)
    assert re.findall(r"^VLLM_VERSION := ([\d.]+)\.\d+$", makefile, re.M) == [supported]
    assert extras["optional-dependencies"]["vllm"] == [f"vllm=={supported}.*"]
    assert f"| {supported} | supported" in readme
