"""A picture is who its contents say it is, and not who a client says."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataItems
from vllm.multimodal.processing.inputs import ProcessorInputs

from kvpool_connector.vllm import register
from kvpool_connector.vllm_engine.replaced import named_by_client
from tests.connector.vllm.played import BLOCK, Played, store
from tests.support.local_pool import LocalPool

#: What a liar would choose: it looks like a digest of contents.
LIE = "ab" * 32


def feature(identifier: str, mm_hash: str | None = None) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        None, "image", identifier, PlaceholderRange(BLOCK + 4, 20), mm_hash
    )


def hashed(*names: str | None, options: bool = False) -> list[str]:
    """What vLLM calls these pictures, in a process with the plug-in."""
    register()
    pictures = [Image.fromarray(np.full((4, 4, 3), 9 * n, np.uint8)) for n in range(len(names))]
    inputs = ProcessorInputs(
        [1, 2],
        MultiModalDataItems({"image": ImageProcessorItems(pictures)}),
        {"image": list(names)},
        {"images_kwargs": {"size": 7}} if options else {},
    )
    return inputs.get_mm_hashes("model", "blake3")["image"]


@pytest.mark.parametrize("options", [False, True])
@pytest.mark.parametrize("name", ["logo", LIE])
def test_a_name_of_a_client_is_told_from_a_digest_of_contents(name: str, options: bool) -> None:
    """Also with options of a processor, which vLLM hashes together with the name."""
    own, clients = hashed(None, name, options=options)
    assert not named_by_client([feature(own)])
    assert named_by_client([feature(clients)])
    assert named_by_client([feature(own), feature(clients)])
    assert hashed(None, None, options=options)[0] == own
    assert hashed(None, name, options=options)[1] == clients, "vLLM's own cache works as before"


def test_the_name_without_an_adapter_counts() -> None:
    assert not named_by_client([feature("adapter:" + LIE, LIE)])
    assert named_by_client([feature(LIE, "client:" + LIE)])


@pytest.mark.timeout(120)
def test_nothing_is_loaded_or_saved_for_a_picture_that_a_client_has_named(
    pool: LocalPool, played: Played
) -> None:
    played.step()
    honest, lie = {"mm_features": [feature(LIE)]}, {"mm_features": [feature("client:" + LIE)]}
    store(pool, played, played.request("a", 65, **lie), 4)
    store(pool, played, played.request("b", 65, **honest), 4)
    assert played.offered(played.request("c", 65, **honest)) == 64
    assert played.offered(played.request("d", 65, **lie)) == 0
    counters = played.connector.hooks.scheduler.planner.counters
    assert counters["miss a client's name for a picture"] == 1
    played.finish()
    assert played.counters["saved_blocks"] == 0
