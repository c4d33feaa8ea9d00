"""All studies of a run as one page that any browser shows: no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich.console import Console
from rich.table import Table

from benchmarks.fleet.cases import FleetStudy
from benchmarks.fleet.constants import Constants
from benchmarks.fleet.pictures import pictures
from benchmarks.fleet.report import constants_table, table

_STYLE = """body { font: 15px Helvetica, Arial, sans-serif; color: #1b2733; max-width: 1100px;
  margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: 3px 10px;
  border-bottom: 1px solid #e3e8ed; text-align: left } svg { max-width: 100% }"""


def page(studies: Sequence[FleetStudy], constants: Constants, command: str) -> str:
    """HTML: each study's table and pictures, then every constant with its source."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>A fleet of engines</title>",
        f"<style>{_STYLE}</style><h1>A fleet in virtual time</h1>",
        "<p>Directory, stores, policies, placement, hints and the decision to load are the code "
        "of the pool; engines, links and clients are a cost model, whose constants stand at the "
        f"end with their sources. The same seed gives the same page: <code>{escape(command)}"
        "</code></p>",
    ]
    for study in studies:
        parts.append(f"<h2>{escape(study.name)}</h2>{_html(table(study))}")
        parts += [drawn for _, drawn in pictures(study)]
    parts.append(f"<h2>constants</h2>{_html(constants_table(constants))}</html>")
    return "\n".join(parts)


def _html(shown: Table) -> str:
    """The cells of a table as they are printed."""
    console = Console(width=10_000, color_system=None, emoji=False)

    def cell(value: object) -> str:
        return escape(console.render_str(str(value)).plain)

    heads = "".join(f"<th>{cell(column.header)}" for column in shown.columns)
    cells = zip(*(column.cells for column in shown.columns), strict=True)
    rows = ["<tr>" + "".join(f"<td>{cell(value)}" for value in row) for row in cells]
    return f"<p>{escape(str(shown.title))}</p><table><tr>{heads}{''.join(rows)}</table>"
