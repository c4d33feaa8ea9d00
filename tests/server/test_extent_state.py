"""The table of block states is complete: nothing else may happen to an extent."""

from __future__ import annotations

import itertools

import pytest

from kvpool.errors import InvariantViolated
from kvpool.server.state.extent_state import TRANSITIONS, Event, State, after


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_only_the_table_moves_a_state(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert after(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(InvariantViolated, match=event.name):
            after(state, event)


def test_every_state_is_reached_and_leads_back_to_free() -> None:
    def reachable(start: State) -> set[State]:
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            for (source, _), target in TRANSITIONS.items():
                if source is state and target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    assert reachable(State.FREE) == set(State)
    assert all(State.FREE in reachable(state) for state in State)
