"""Tables that can be read at any width: one line a row where it fits, otherwise folded."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvpool.ops.bars import FillBar

_INDENT = 2
_BETWEEN = 3
#: Wider than any table: what it would like to have.
_WISHED = 10_000


class Fitted:
    """A table as it is where its rows fit; where they do not, each row folded, with nothing cut.

    A folded row begins with its first `names` cells; the others follow, each behind its heading,
    and go on in indented lines.
    """

    def __init__(self, table: Table, names: int = 1) -> None:
        self._table = table
        self._names = names

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(width=_WISHED, max_width=_WISHED)
        if Measurement.get(console, unbounded, self._table).maximum <= options.max_width:
            yield self._table
            return
        columns = [(column.header, column.cells) for column in self._table.columns]
        headings = [str(heading) for heading, _ in columns]
        yield Text("  ".join(headings[: self._names]), "bold")
        for row in zip(*(cells for _, cells in columns), strict=True):
            yield from self._folded(headings, row, console, options)

    def _folded(
        self,
        headings: list[str],
        row: tuple[RenderableType, ...],
        console: Console,
        options: ConsoleOptions,
    ) -> Iterator[RenderableType]:
        drawn = [_text(cell, console, options) for cell in row]
        pieces = [Text("  ").join(one for one in drawn[: self._names] if one)]
        for heading, one, cell in list(zip(headings, drawn, row, strict=True))[self._names :]:
            if isinstance(cell, FillBar):
                pieces[-1].append(" ").append_text(one)  # it draws the figure before it
            elif one:
                label = Text(f"{heading} ", "dim") if heading else Text()
                pieces.append(label.append_text(one))
        line, indent = Text(overflow="fold"), 0
        for piece in pieces:
            needed = line.cell_len + (_BETWEEN if line else 0) + piece.cell_len
            if line and needed > options.max_width - indent:
                yield Padding(line, (0, 0, 0, indent), expand=False)
                line, indent = Text(overflow="fold"), _INDENT
            line.append(" " * _BETWEEN if line else "").append_text(piece)
        yield Padding(line, (0, 0, 0, indent), expand=False)


def _text(cell: RenderableType, console: Console, options: ConsoleOptions) -> Text:
    if isinstance(cell, FillBar):
        return cell.drawn(options)
    return console.render_str(str(cell), highlight=False)
