"""The blocks of one namespace, and which of them follow each other.

A match asks for thousands of blocks, and each is somewhere else in memory. So the map learns from
the chains that clients ask for: 32 consecutive blocks that lie in the same places are one *span*,
which one lookup finds. A span is never assumed: it is learned from a lookup that found every one of
its blocks, and forgotten as soon as one of them leaves or lies elsewhere. (design: match)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpool.piecewise_dict import PiecewiseDict

#: Of the tag of a block: below the id of its locations the mark of its span, 0 if it is in none.
MARK_BITS: Final = 64
_MARK_MASK: Final = (1 << MARK_BITS) - 1


class BlockMap(PiecewiseDict[bytes, int]):
    """From the key of a block to its *tag*: the id of its locations, and the mark of its span.

    A block is in one span at most, so there are never more than a 32nd of the blocks. Equal tags
    are one int object. `split` before a block with a mark gets another tag, or none.
    """

    __slots__ = ("spans",)

    def __init__(self) -> None:
        super().__init__()
        #: From the mark of a span to the tag of all its blocks.
        self.spans: PiecewiseDict[int, int] = PiecewiseDict()

    def join(self, mark: int, digests: Sequence[bytes], tags: Sequence[int | None]) -> None:
        """These are the blocks of a span, with their present tags.

        Nothing changes unless all lie in the same places, and none is in another span: two chains
        that have blocks in common at different distances from their heads would take them from
        each other for ever.
        """
        first = tags[0]
        if first is None or not mark or len(set(digests)) != len(digests):
            return
        id = first >> MARK_BITS
        for tag in {*tags}:
            if tag is None or tag >> MARK_BITS != id:
                return
            if tag & _MARK_MASK and tag & _MARK_MASK in self.spans:
                return
        tag = id << MARK_BITS | mark
        table, mask = self.table, self.mask
        for digest in digests:
            table[hash(digest) & mask][digest] = tag
        self.spans[mark] = tag

    def split(self, tag: int) -> None:
        """A block with this tag leaves, or moves: its span is none any more."""
        if tag & _MARK_MASK:
            self.spans.discard(tag & _MARK_MASK)
