"""The name under which an engine shares: of weights in memory, of what every rank reports."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpool_connector.identity.adapters import Adapter, AdapterKeys, KnownAdapters
from kvpool_connector.identity.naming import EngineInfo, EngineNames
from kvpool_connector.records.messages import AdapterInfo, ModelInfo, WorkerInfo
from kvpool_connector.records.values import CacheGroup
from kvpool_engines import fingerprint
from kvpool_engines.whole_files import FileDigest

SIZE = 2048
FILES = FileDigest("files")


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(SIZE, 64, generator=generator).to(torch.bfloat16),
        "up": torch.randn(300, SIZE, generator=generator).to(torch.bfloat16),
        "norm": torch.randn(SIZE, generator=generator).to(torch.bfloat16),
        "scale": torch.tensor(0.5),
        "codes": torch.randint(0, 255, (33, 17), generator=generator).to(torch.uint8),
        "odd": torch.randn(7, 3, 5, generator=generator, dtype=torch.float64),
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return fingerprint.memory(tensors.items()).digest


@pytest.fixture(scope="module")
def plain() -> str:
    """The fingerprint of the weights as they are."""
    return digest(weights())


def test_equal_weights_have_one_fingerprint_wherever_they_lie(plain: str) -> None:
    copy = {name: tensor.clone() for name, tensor in weights().items()}
    wide = torch.zeros(SIZE, 96, dtype=torch.bfloat16)
    wide[:, 32:] = copy["embed"]
    copy["embed"] = wide[:, 32:]  # a part of a larger tensor
    assert digest(copy) == plain


PLACES: dict[str, list[tuple[int, ...]]] = {
    "embed": [(0, 0), (SIZE - 1, 63), (1217, 33)],
    "up": [(299, SIZE - 1), (151, 777)],
    **{"norm": [(1001,)], "scale": [()], "codes": [(20, 11)], "odd": [(3, 1, 2)]},
}


@pytest.mark.parametrize("name", PLACES)
def test_one_value_makes_another_fingerprint(plain: str, name: str) -> None:
    for place in PLACES[name]:
        changed = weights()
        changed[name][place] += 1
        assert digest(changed) != plain


def test_exchanged_rows_names_types_and_shapes_make_another_fingerprint(plain: str) -> None:
    rows = weights()
    rows["embed"][[900, 901]] = rows["embed"][[901, 900]]
    renamed = {name.replace("up", "down"): tensor for name, tensor in weights().items()}
    reshaped = {**weights(), "up": weights()["up"].reshape(600, SIZE // 2)}
    retyped = {**weights(), "up": weights()["up"].view(torch.float16)}
    assert len({plain, *map(digest, (rows, renamed, reshaped, retyped))}) == 5


def test_the_sums_of_rows_see_what_no_sample_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_SAMPLED_BYTES", 0)
    monkeypatch.setattr(fingerprint, "_SAMPLED_VALUES_MIN", 2)
    one, exchanged = weights(), weights()
    one["embed"][1217, 33] += 1
    exchanged["embed"][[900, 901]] = exchanged["embed"][[901, 900]]
    assert len({digest(tensors) for tensors in (weights(), one, exchanged)}) == 3


def test_of_a_large_tensor_on_a_cpu_a_part_is_read_from_its_beginning_to_its_end() -> None:
    """One hundredth of the rows is summed; values at random places are read all the same."""

    def of(tensor: torch.Tensor) -> str:
        return fingerprint.memory([("w", tensor)], summed_bytes=tensor.nbytes // 100).digest

    base = torch.zeros(4096, 256, dtype=torch.int16)
    plain = of(base)
    for row in range(0, 4096, 256):  # one sixteenth of the rows, like trained new tokens
        changed = base.clone()
        changed[row : row + 256] = 1
        assert of(changed) != plain


def test_tensors_that_cannot_be_read_are_counted() -> None:
    found = fingerprint.memory([("packed", torch.empty(0)), ("norm", torch.ones(4))])
    assert found.hidden == 1


def test_wrapped_tensors_are_read_inside() -> None:
    class Wrapped:
        def __init__(self, codes: torch.Tensor) -> None:
            self.codes = codes

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["codes"], None

    one = [("w", Wrapped(torch.zeros(8)))]
    other = [("w", Wrapped(torch.ones(8)))]
    assert fingerprint.memory(one) != fingerprint.memory(other)  # type: ignore[arg-type]


# --- names ------------------------------------------------------------------------------------


def engine(ranks: int = 2, files: FileDigest | None = FILES) -> EngineInfo:
    return EngineInfo(
        groups=(CacheGroup(16, 1),),
        kinds=("full",),
        fields={"model": "tiny"},
        seed=lambda: "0",
        ranks=ranks,
        parts=ranks,
        blocks=8,
        file_weights=lambda: files,
    )


def info(rank: int, serial: int = 1, **model: object) -> WorkerInfo:
    known = {"weights": f"w{rank}", "packing": "p", "description": (("hf.rope_theta", "1"),)}
    return WorkerInfo(rank, ModelInfo(**{**known, **model}), (64 + rank,), serial)  # type: ignore[arg-type]


def named(*infos: WorkerInfo) -> EngineNames:
    names = EngineNames(engine())
    for one in infos:
        names.on_info(one)
    return names


def test_a_name_needs_every_rank() -> None:
    names = named(info(1))
    assert (names.namespaces, names.missing_ranks, names.serials) == ((), [0], ())
    assert names.on_info(info(0))
    assert names.serials == (1, 1)
    assert names.block_bytes == (65,)
    assert "memory=" in names.namespaces[0].name
    assert not names.on_info(info(0))  # sent again: nothing new


@pytest.mark.parametrize(
    ("rank", "other"),
    [
        (0, {"weights": "others"}),
        (1, {"weights": "others"}),
        (0, {"packing": "amx"}),
        (1, {"packing": "amx"}),
        (0, {"description": (("hf.rope_theta", "2"),)}),
    ],
)
def test_what_a_rank_finds_is_in_the_name(rank: int, other: dict[str, object]) -> None:
    one, two = named(info(0), info(1)), named(info(1 - rank), info(rank, **other))
    assert one.namespaces != two.namespaces


@pytest.mark.parametrize(
    "other",
    [
        {"seed": lambda: "1"},
        {"fields": {"model": "other"}},
        {"fields": {"model": "tiny", "revision": "2"}},
        {"kinds": ("window",)},
    ],
)
def test_what_the_scheduler_half_knows_is_in_the_name(other: dict[str, Any]) -> None:
    names = EngineNames(engine()._replace(**other))
    names.on_info(info(0))
    assert names.on_info(info(1))
    assert names.namespaces != named(info(0), info(1)).namespaces


@pytest.mark.parametrize("hidden", [0, 3])
def test_files_count_where_memory_hides_weights_and_only_there(hidden: int) -> None:
    """An engine that was updated in place shares with one that was started with those weights."""
    others = EngineNames(engine(files=FileDigest("others")))
    for rank in (0, 1):
        others.on_info(info(rank, hidden=hidden))
    names = named(info(0, hidden=hidden), info(1, hidden=hidden))
    assert (others.namespaces == names.namespaces) is (hidden == 0)


def test_what_may_have_changed_has_no_name_until_every_rank_has_described_it_anew() -> None:
    names = named(info(0), info(1))
    first = names.namespaces
    names.forget("generation")
    assert (names.namespaces, names.missing_ranks) == ((), [0, 1])
    assert not names.on_info(info(0))  # from before
    assert not names.on_info(info(0, 2, weights="half"))  # from before, and not asked for
    assert not names.on_info(info(0, names.serial))
    assert names.on_info(info(1, names.serial))
    assert names.namespaces == first


def test_a_model_that_is_described_anew_has_no_name_until_all_ranks_have_done_it() -> None:
    names = named(info(0), info(1))
    first = names.namespaces
    assert not names.on_info(info(1, 2, weights="new"))
    assert (names.namespaces, names.serials) == ((), ())
    assert not names.on_info(info(0))  # late, from before
    assert names.on_info(info(0, 2, weights="new"))
    assert names.namespaces != first
    names.on_info(info(0, 3))
    names.on_info(info(1, 3))
    assert names.namespaces == first  # the old weights are back


@pytest.mark.parametrize("hidden", [0, 3])
def test_weights_that_nothing_tells_are_refused(hidden: int) -> None:
    names = EngineNames(engine(1, FileDigest("unknown", "no weights in /nowhere")))
    assert names.on_info(info(0, hidden=hidden))
    assert bool(names.namespaces) == (not hidden)
    assert ("no weights in /nowhere" in names.problem) == bool(hidden)


def test_what_memory_hides_has_no_name_until_its_files_are_read() -> None:
    said = [None, None, FILES]
    names = EngineNames(engine()._replace(file_weights=lambda: said.pop(0)))
    for rank in (0, 1, 1):
        assert not names.on_info(info(rank, hidden=1))
        assert (names.namespaces, names.serials, names.missing_ranks[1:]) == ((), (), [])
    assert names.reads_files
    assert names.on_info(info(0, hidden=1))
    assert not names.on_info(info(1, hidden=1))
    assert names.namespaces == named(info(0, hidden=1), info(1, hidden=1)).namespaces
    assert (names.reads_files, said) == (False, [])


def test_a_worker_that_cannot_describe_its_model_is_a_reason() -> None:
    names = named(info(0), info(1, unknown="no model"))
    assert (names.namespaces, names.serials) == ((), (1, 1))
    assert "no model" in names.problem
    assert names.description == {"problem": names.problem}


def test_the_description_has_every_field_of_the_name_and_what_its_hashes_are_made_of() -> None:
    names = named(info(0), info(1))
    described = names.description
    assert described["namespace"] == names.namespaces[0].name
    assert described["shape.hf.rope_theta"] == "1"
    words = [word.partition("=") for word in names.namespaces[0].name.split(" ")[1:]]
    assert {
        field: text for field, _, text in words if field != "group"
    }.items() <= described.items()


# --- LoRA adapters ------------------------------------------------------------------------------

PROMPT = [b"one", b"two", b"three"]
CHAT = Adapter(1, "chat at /adapters/chat", lambda first: iter(PROMPT[first:]))


@pytest.fixture
def adapters() -> KnownAdapters:
    known = KnownAdapters(ranks=2)
    known.on_info(AdapterInfo(0, {1: "v1"}))
    known.on_info(AdapterInfo(1, {1: "v1"}))
    return known


def test_an_adapter_is_known_when_every_rank_has_loaded_it(adapters: KnownAdapters) -> None:
    assert adapters.fingerprints(CHAT) == ("v1", "v1")
    assert adapters.fingerprints(CHAT._replace(number=2)) == ()
    for evicted in (1, 0):
        adapters.on_info(AdapterInfo(1 - evicted, {1: "v1"}))
        adapters.on_info(AdapterInfo(evicted, {}))
        assert adapters.fingerprints(CHAT) == ()


def test_a_replaced_adapter_is_refused_until_the_cache_is_reset(
    adapters: KnownAdapters,
) -> None:
    adapters.fingerprints(CHAT)
    for rank in range(2):
        adapters.on_info(AdapterInfo(rank, {7: "v2"}))  # loaded again, under another number
    again = CHAT._replace(number=7)
    assert adapters.fingerprints(again) == ("v2", "v2")
    assert adapters.refused(again)
    adapters.reset()
    assert adapters.fingerprints(again) == ("v2", "v2")
    assert not adapters.refused(again)


def test_keys_are_of_contents_and_fingerprints_and_of_no_name(adapters: KnownAdapters) -> None:
    adapters.on_info(AdapterInfo(0, {1: "v1", 2: "v2", 3: "v1"}))
    adapters.on_info(AdapterInfo(1, {1: "v1", 2: "v2", 3: "v2"}))
    engines = [bytes([n]) * 16 for n in range(3)]
    moved = [bytes([n]) * 16 for n in range(9, 12)]  # hashed with another path
    named = (CHAT._replace(number=number, name=f"at /{number}") for number in (1, 2, 3))
    one, other, of_ranks = (AdapterKeys(engines, name, adapters)[:] for name in named)
    assert len({*engines, *one, *other, *of_ranks}) == 12
    single = KnownAdapters(ranks=1)
    single.on_info(AdapterInfo(0, {1: "v1"}))
    assert list(AdapterKeys(moved, CHAT, single)) == one
    assert [single.engine_hashes[key] for key in one] == moved
    single.reset()
    assert not single.engine_hashes


def test_keys_follow_what_the_engine_hashes_and_takes_back(adapters: KnownAdapters) -> None:
    engines, prompt = [b"h1", b"h2"], [b"one", b"two", b"three"]
    keys = AdapterKeys(engines, own := CHAT._replace(contents=lambda n: iter(prompt[n:])), adapters)
    before = keys[:]
    engines.append(b"h3")
    assert keys[:2] == before
    assert keys[:] == AdapterKeys(engines, own, adapters)[:] != before, "as if all came at once"
    engines[1:], prompt[1:] = [b"h4"], [b"four"]
    after = keys[:]
    assert after[0] == before[0]
    engines[1:], prompt[1:] = [b"h2", b"h3"], [b"two", b"three"]
    assert keys[:2] == before != after
