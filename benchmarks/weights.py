"""How long an engine's weights take to describe, at its start and after they were changed in place.

    python -m benchmarks.weights [--rounds 5]

Tensors as vLLM keeps those of a model with 80 layers, eight for each layer, of which it fuses some;
narrow, so that they fit into a small machine. One thread. CPU seconds are beside the time, because
a busy machine takes turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table

from kvpool_engines import fingerprint

_LAYERS, _HIDDEN, _INNER, _HEAD, _KV_HEADS, _VOCABULARY = 80, 1024, 3584, 128, 1, 128_256


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of the model, all values alike."""
    shapes = {
        "qkv": (_HIDDEN + 2 * _KV_HEADS * _HEAD, _HIDDEN),
        "o": (_HIDDEN, _HIDDEN),
        "gate_up": (2 * _INNER, _HIDDEN),
        "down": (_HIDDEN, _INNER),
        "input_norm": (_HIDDEN,),
        "after_norm": (_HIDDEN,),
        "q_norm": (_HEAD,),
        "k_norm": (_HEAD,),
    }
    for layer in range(_LAYERS):
        for name, shape in shapes.items():
            yield f"layers.{layer}.{name}.weight", torch.ones(shape, dtype=torch.bfloat16)
    for name in ("embed", "head"):
        yield f"{name}.weight", torch.ones(_VOCABULARY, _HIDDEN, dtype=torch.bfloat16)
    yield "norm.weight", torch.ones(_HIDDEN, dtype=torch.bfloat16)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    rounds = arguments.parse_args().rounds
    torch.set_num_threads(1)
    weights = list(tensors())
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in weights)
    shown = Table(title=f"{len(weights)} tensors, {size / 2**30:.2f} GiB, on a CPU")
    for column in ("", "median s", "CPU s"):
        shown.add_column(column)
    for when, summed_bytes in (("at the start", None), ("again, every row", 1 << 60)):
        seconds, cpu = [], []
        for _ in range(rounds):
            began, cpu_began = time.perf_counter(), time.thread_time()
            fingerprint.memory(weights, summed_bytes=summed_bytes)
            seconds.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - cpu_began)
        shown.add_row(when, f"{statistics.median(seconds):.2f}", f"{statistics.median(cpu):.2f}")
    Console().print(shown)


if __name__ == "__main__":
    main()
