"""Where blocks are, or why a master's map does not have them, as sentences. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from kvpool.master.state.directory import Directory
from kvpool.master.state.locations import BlockLocations
from kvpool.master.state.namespace_map import in_order
from kvpool.tenant_names import marker_of, tenant_of
from kvpool.types import TEXT_MAX, BlockKey, Explanation, Namespace, ReadStatus


def explain(
    directory: Directory, namespace: Namespace, digests: Sequence[bytes]
) -> list[Explanation]:
    """For each block: where it is, or why it is a miss, as text of TEXT_MAX characters at most.

    It names no namespace of another tenant than that of `namespace`.
    """
    _, reasons = directory.find(namespace, digests)
    blocks = directory.blocks.get(namespace)
    texts: dict[tuple[BlockLocations | None, ReadStatus], str] = {}  # not one for each block
    answers = []
    for position, digest in enumerate(digests):
        held = directory.held(blocks, digest)
        status = reasons.get(position, ReadStatus.HIT)
        replicas = held.replicas if held is not None else ()
        text = texts.get((held, status))
        if text is None:
            text = texts[held, status] = _text(directory, namespace, held, status)[:TEXT_MAX]
        answers.append(Explanation(BlockKey(namespace, digest), status, replicas, text))
    return answers


def _text(
    directory: Directory, namespace: Namespace, held: BlockLocations | None, status: ReadStatus
) -> str:
    if status is ReadStatus.HIT and held is not None:
        where = ", ".join(f"{r.server} ({r.tier})" for r in held.replicas)
        return f"present on {where}"
    if status is ReadStatus.PART_MISSING and held is not None:
        present = sorted({replica.part for replica in held.replicas})
        return f"parts {present} of {namespace.parts} are present, the others are missing"
    if status is ReadStatus.SERVER_LOST:
        if held is None:
            return "its server was lost or restarted empty"
        here = {(replica.server, replica.part) for replica in held.replicas}
        lost = [
            one.inventory for one in held.locations if (one.inventory.server, one.part) not in here
        ]
        servers = ", ".join(sorted({one.server for one in lost if not one.replaced}))
        return f"held by {servers}, which is lost or was restarted"
    if status is ReadStatus.NEVER_WRITTEN:
        if namespace not in directory.blocks:
            return _unknown_namespace(directory, namespace)
        if held is not None or directory.tombstones.forgotten:
            return "no record: never written, or removed so long ago that the reason is lost"
        return "never written (since this master started)"
    return f"{status.label}: it was stored earlier"


def _unknown_namespace(directory: Directory, namespace: Namespace) -> str:
    marker = marker_of(tenant_of(namespace.name))
    first = islice(in_order(directory).after(marker), 3)
    others = ", ".join([repr(one.name) for one in first if one.name.startswith(marker)])
    if not others:
        return f"{'this tenant has' if marker else 'the pool holds'} no blocks"
    return (
        f"namespace {namespace.name!r} with {namespace.parts} part(s) has no blocks; "
        f"namespaces with blocks: {others}"
    )
