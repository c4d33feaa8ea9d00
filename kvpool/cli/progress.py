"""How far a command is that takes long: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from kvpool.cli.shared import stderr
from kvpool.units import human

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task

#: Between two lines, where there is no terminal.
_EVERY_S: Final = 10.0
#: Columns of a terminal: for a name at least, and for the bar with what is between the three.
_NAME_MIN: Final = 9
_BAR_MIN: Final = 8

#: How much is done, and how much it is in all; None: nobody knows.
Show: TypeAlias = Callable[[int, int | None], None]


@contextmanager
def progress(
    what: str, *, quiet: bool, console: Console = stderr, amount: Callable[[float], str] = human
) -> Iterator[Show]:
    """What to call with the progress, as often as one likes. Nothing is written if `quiet`.

    It is in bytes, or in what `amount` says.
    """
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn

    live = console.is_terminal and not quiet
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console, disable=not live, transient=True) as bars:
        number = bars.add_task(escape(what), total=None, text="")
        (task,) = bars.tasks
        printed_at = bars.get_time()

        def show(done: int, total: int | None) -> None:
            nonlocal printed_at
            task.total = total  # not by `update`, which would forget the speed
            bars.update(number, completed=done)
            text = _text(task, amount)
            # What is left to do is worth more than the end of a long name.
            room = max(_NAME_MIN, console.width - len(text) - _BAR_MIN)
            name = what if len(what) <= room else f"{what[: room - 1]}…"
            bars.update(number, description=escape(name), text=text)
            if not live and not quiet and bars.get_time() - printed_at >= _EVERY_S:
                printed_at = bars.get_time()
                console.print(f"{what}: {text}", markup=False, highlight=False, soft_wrap=True)

        yield show


def blocks(count: float) -> str:
    """An amount of blocks."""
    return f"{count:,.0f} blocks"


def _text(task: Task, amount: Callable[[float], str]) -> str:
    from kvpool.ops.bars import age

    done, _, unit = amount(task.completed).partition(" ")
    of = "an unknown size" if task.total is None else amount(task.total)
    text = f"{done} of {of}" if of.endswith(f" {unit}") else f"{done} {unit} of {of}"
    if task.time_remaining:
        text += f", {age(task.time_remaining)} left"
    if task.speed:  # the first that a narrow terminal cuts
        text += f", {amount(task.speed)}/s"
    return text
