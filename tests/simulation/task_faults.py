"""Tasks that fail: what nobody expected is raised in them, and they must go on.

A supervised task serves as long as its process. So one that fails says so as long as it does, waits
longer each time, and runs again; that it then does its work is checked as for every other fault,
by the state of the cluster afterwards (design: simulation).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from kvpool.backoff import Backoff
from kvpool.supervision import Supervisor

if TYPE_CHECKING:
    from tests.simulation.world import World

#: Further kind of fault: tasks of a server or master raise for a while.
TASK_FAULT: Final = "task fails"
#: The pauses of a task that fails are 0.05 s at least, and double. So often may one fail while a
#: fault lasts, however they are drawn.
_DURATION_MAX_S: Final = 6.0
_FAILURES_MAX: Final = 24
#: Within so many seconds after a failure it must be told; later the process may have been frozen.
_TOLD_WITHIN_S: Final = 0.01


class TaskFault(Exception):
    """What no task expects."""


class FaultySupervisor(Supervisor):
    """The real one, whose tasks can be made to fail."""

    fail: Callable[[str], None]  # of the loop: a promise is broken

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: Tasks that fail each time they run, and how often they have.
        self.struck: dict[str, int] = {}

    async def _attempt(
        self, name: str, step: Callable[[], Coroutine[Any, Any, None]], backoff: Backoff
    ) -> bool:
        if name not in self.struck:
            return await super()._attempt(name, step, backoff)

        async def watched() -> None:
            self._strike(name)
            await step()

        return await super()._attempt(name, watched, backoff)

    def _strike(self, name: str) -> None:
        self.struck[name] += 1
        if self.struck[name] > _FAILURES_MAX:
            self.fail(f"house: the task {name!r} has failed {self.struck[name]} times at once")
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        loop.call_soon(self._look, name, task, loop.time())
        raise TaskFault(name)

    def _look(self, name: str, task: asyncio.Task[Any] | None, failed_at: float) -> None:
        """The task has just failed: it goes on, and a probe of this process hears of it."""
        if asyncio.get_running_loop().time() > failed_at + _TOLD_WITHIN_S:
            return
        if task is None or task.cancelling():
            return
        if task.done():
            self.fail(f"house: the task {name!r} has failed once, and has ended")
        if repr(name) not in self.problem:
            self.fail(f"house: the task {name!r} is failing, and nobody is told")


async def strike(world: World) -> None:
    """Let tasks of one process fail for some seconds."""
    rng = world.rng["task faults"]
    supervisors = [
        (node.name, node.process, node.server.tasks)
        for node in world.servers
        if node.server is not None and node.process.alive
    ]
    supervisors += [
        (node.name, node.process, node.master.tasks)
        for node in world.masters
        if node.master is not None and node.process.alive
    ]
    if not supervisors:
        return
    name, _, tasks = rng.choice(supervisors)
    assert isinstance(tasks, FaultySupervisor)
    names = sorted(tasks.failures)
    with world.incident(TASK_FAULT, name):
        tasks.struck = dict.fromkeys(rng.sample(names, rng.randint(0, len(names))), 0)
        world.truth.probes.add("a task failed and went on")
        await asyncio.sleep(rng.uniform(0.5, _DURATION_MAX_S))
        tasks.struck = {}
