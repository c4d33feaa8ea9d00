"""Under which names an engine shares its blocks: known when every rank has described its model.

Pure: no engine, clock or socket. (design: namespace)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from kvpool.types import Namespace
from kvpool_connector.records.messages import WorkerInfo
from kvpool_connector.records.provenance import BlockWriter
from kvpool_connector.records.values import CacheGroup
from kvpool_engines import namespace
from kvpool_engines.whole_files import FileDigest

#: Infos that were sent before a reset have serials below those that it asks for, also if ranks have
#: described their models in the meantime without being asked.
_SERIALS_A_RESET: Final = 1 << 16


class EngineInfo(NamedTuple):
    """What the scheduler half knows about its engine.

    `fields` are those of the namespace that are known at the start; `seed()` is what all hashes
    begin with. `ranks` workers run the model, `parts` of them have bytes of their own. `blocks` are
    those of the engine's KV cache. `file_weights()` is what their files say of weights that memory
    hides; None: they are being read. With `stage_ranks` the name is that of any tensor parallel
    size: so many consecutive ranks have the same layers, and what they all say counts once; 0 is a
    name for this size alone.
    `drops_last_block`: a draft's KV of a block's last token depends on the token behind the block,
    so the engine computes the last block of each prefix anew. `recomputes` what a load does not
    bring; otherwise its request fails.
    """

    groups: tuple[CacheGroup, ...]
    kinds: tuple[str, ...]
    fields: Mapping[str, object]
    seed: Callable[[], str]
    ranks: int
    parts: int
    blocks: int
    loads: bool = True
    saves: bool = True
    file_weights: Callable[[], FileDigest | None] = lambda: FileDigest("")
    stage_ranks: int = 0
    drops_last_block: bool = False
    recomputes: bool = True


class EngineNames:
    """The names of one engine, one for each group.

    | state   | `namespaces` | `problem` | next state                                            |
    |---------|--------------|-----------|-------------------------------------------------------|
    | waiting | empty        | empty     | named or refused, with the last rank's info, which it  |
    |         |              |           | repeats while files are read                           |
    | named   | one a group  | empty     | waiting, with `forget` or when a rank describes itself |
    |         |              |           | anew, until the others have as well                    |
    | refused | empty        | a reason  | waiting, when a rank describes itself anew              |
    """

    def __init__(self, engine: EngineInfo) -> None:
        self.namespaces: tuple[Namespace, ...] = ()
        #: Why this engine shares nothing, in one sentence.
        self.problem = ""
        #: For `kvpool doctor`: the name of the first group, the fields that all names have, and
        #: what their digests are made of; or the problem.
        self.description: dict[str, str] = {}
        #: Of the infos that the names are made of, by rank; empty while there are none.
        self.serials: tuple[int, ...] = ()
        #: All ranks have told; the files of what their kernels hide are being read.
        self.reads_files = False
        #: Whether its LoRA adapters can be told apart.
        self.knows_adapters = False
        #: What this engine is called behind its blocks.
        self.writer = BlockWriter.new()
        self._engine = engine
        self._infos: dict[int, WorkerInfo] = {}  # all with the same serial
        self._generation = ""
        self._alone = False  # under the other name were wrong blocks
        #: Infos below it are of weights that the engine has no longer.
        self.serial = 1

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that have not described their model."""
        return [rank for rank in range(self._engine.ranks) if rank not in self._infos]

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The largest block of each group, of one rank."""
        sizes = [info.block_bytes for info in self._infos.values()]
        return tuple(max(column) for column in zip(*sizes, strict=True))

    def on_info(self, info: WorkerInfo) -> bool:
        """Take what a rank has found. True if the names are others now, or refused."""
        if not 0 <= info.rank < self._engine.ranks or info.serial < self.serial:
            return False
        if info.serial > self.serial:
            # The weights of one rank are others: those of its peers are, too, or will be.
            self.serial = info.serial
            self._infos.clear()
        if info.rank in self._infos:
            return self.reads_files and self._make()
        self._infos[info.rank] = info
        return self._make()

    def forget(self, generation: str, *, alone: bool = False, serial: int | None = None) -> None:
        """The weights may have changed: every rank must describe its model anew, or has done so
        with `serial`.

        The names are then those of all engines that have these weights. Only where weights are
        hidden from their fingerprint, and if the engine is to share `alone`, `generation` becomes a
        field: then nobody else has the name. (design: namespace)
        """
        self._alone |= alone
        self._generation = generation
        self.serial = self.serial + _SERIALS_A_RESET if serial is None else serial
        self._infos.clear()
        self._make()

    def _make(self) -> bool:
        self.namespaces, self.problem, self.description, self.serials = (), "", {}, ()
        self.reads_files = False
        if self.missing_ranks:
            return False
        engine = self._engine
        models = [self._infos[rank].model for rank in range(engine.ranks)]
        # Of files only what memory hides: weights that were updated in place, or come from other
        # files, are those that the workers see.
        hidden = any(model.hidden for model in models)
        files = engine.file_weights() if hidden else FileDigest("")
        if files is None:
            self.reads_files = True
            return False
        self.serials = tuple(self._infos[rank].serial for rank in range(engine.ranks))
        unknown = next((model.unknown for model in models if model.unknown), "")
        if not unknown and files.problem:
            unknown = (
                f"the kernels of this engine hide weights, and their files cannot be read "
                f"({files.problem}); set revision in kv_connector_extra_config to a name "
                "that is the same for the same weights only"
            )
        if unknown:
            self.problem = f"nothing is loaded or saved: {unknown}"
            self.description = {"problem": self.problem}
            return True
        self.knows_adapters = all(model.adapters for model in models)
        shape = "\n".join(f"{name}={value}" for name, value in models[0].description)
        fields: dict[str, object] = {
            **engine.fields,
            **({"weights": files.digest} if files.digest else {}),
            "memory": namespace.digest(" ".join(self._of_stages(m.weights for m in models))),
            "shape": namespace.digest(shape),
            "seed": engine.seed(),
            "packing": namespace.digest("\n".join(self._of_stages(m.packing for m in models))),
        }
        if self._alone or (self._generation and hidden):
            fields["generation"] = self._generation
        self.namespaces = tuple(
            namespace.name({**fields, "group": f"{number}:{kind}"}, parts=engine.parts)
            for number, kind in enumerate(engine.kinds)
        )
        self.description = {
            "namespace": self.namespaces[0].name,
            **{name: str(value) for name, value in fields.items()},
            "groups": " ".join(f"{number}:{kind}" for number, kind in enumerate(engine.kinds)),
            **{f"shape.{name}": value for name, value in models[0].description},
        }
        return True

    def _of_stages(self, values: Iterable[str]) -> list[str]:
        """One text for each pipeline stage, if its ranks agree; one for each rank otherwise."""
        of_ranks = list(values)
        size = self._engine.stage_ranks
        if not size:
            return of_ranks
        stages = [of_ranks[first : first + size] for first in range(0, len(of_ranks), size)]
        return [",".join(dict.fromkeys(stage)) for stage in stages]
