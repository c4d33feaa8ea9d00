"""Writes deploy/kubernetes: what the chart renders with its default values.

    python deploy/helm/manifests.py

Needs `helm-python-sdk`, of the group `helm` in pyproject.toml. `kubectl apply -k` makes the
namespace and the secret, which the chart leaves to its user.
"""

from pathlib import Path

import helm_python

HERE = Path(__file__).parent
TARGET = HERE.parent / "kubernetes"
HEAD = "# Made from deploy/helm/kvpool by deploy/helm/manifests.py: change it there.\n"


def manifests() -> dict[str, str]:
    """The text of each file, by name."""
    with helm_python.Chart.load(HERE / "kvpool") as chart:
        rendered = chart.render(name="kvpool", namespace="kvpool")
    return {
        Path(name).name: f"{HEAD}{text.strip()}\n"
        for name, text in rendered.items()
        if text.strip() and name.endswith(".yaml")
    }


if __name__ == "__main__":
    for name, text in manifests().items():
        (TARGET / name).write_text(text)
