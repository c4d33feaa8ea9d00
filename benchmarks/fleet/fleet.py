"""One run of a fleet: sessions, a router, prefill and decode engines, and what lies under them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.fleet.admission import FleetAdmission
from benchmarks.fleet.decode import DecodeEngine
from benchmarks.fleet.events import EventQueue
from benchmarks.fleet.memory import FleetMemory
from benchmarks.fleet.mixed import MixedDecoder
from benchmarks.fleet.options import DRAIN_S, FleetOptions, Hints, Incident, Scope
from benchmarks.fleet.pools import pools_of
from benchmarks.fleet.prefill import PrefillEngine
from benchmarks.fleet.prompts import Prompt, session_name
from benchmarks.fleet.results import FleetResult, MovedBytes, measured
from benchmarks.fleet.routers import ROUTERS, RouterFacts
from benchmarks.fleet.sessions import (
    CHILDREN_WITHIN_S,
    LOADS,
    PromptBlocks,
    SessionPlan,
    trace_sessions,
)
from kvpool.tools import traces
from kvpool.tools.workloads import Turn
from kvpool.types import SessionHint


class Fleet:
    """`run` once. A session sends its next prompt some time after an answer has ended; after the
    session's end the next one takes its place."""

    def __init__(self, options: FleetOptions) -> None:
        self._options = options
        self._constants = options.constants
        self._rng = random.Random(options.seed)
        self._events = EventQueue()
        self._memory = self._make_memory()
        self._choose = ROUTERS[options.router](
            RouterFacts(
                self._events,
                options.constants,
                self._memory,
                options.block,
                options.events_late_s,
            )
        )
        decoder = MixedDecoder if options.engines == "mixed" else DecodeEngine
        self._decoders: Sequence[DecodeEngine | MixedDecoder] = [
            decoder(self._events, options.constants, self._answered)
            for _ in range(options.instances)
        ]
        self._engines = [self._make_engine(number) for number in range(options.instances)]
        memory = max(options.memory, options.disk_tokens) // options.block
        self._admission = FleetAdmission(self._events, memory, options.instances, self._route)
        load = LOADS[options.load]
        self._blocks = PromptBlocks(load.shared_tokens, options.block)
        self._waiting = load.sessions(options.sessions, options.seed)
        if options.trace is not None:
            recorded = traces.load(
                options.trace,
                options.trace_format,
                block=options.block,
                unit=options.time_unit,
                quiet=True,
            )
            self._waiting = trace_sessions(recorded, options.trace_rate, options.sessions)
        self._numbers = itertools.count()
        self._running: dict[int, _RunningSession] = {}
        self._done: list[Prompt] = []
        self._last_began_at = 0.0

    def run(self) -> FleetResult:
        """Serve every session to its end."""
        if self._options.trace is not None:
            for plan in self._waiting:
                self._events.at(plan.begins_s or 0.0, self._begin_root, plan)
        for _ in range(self._options.concurrent):
            self._events.at(self._rng.uniform(0.0, _RAMP_S), self._begin_session)
        if self._options.hog_prompts_s:
            self._events.at(_RAMP_S, self._send_hog)
        for incident in self._options.incidents:
            self._events.at(incident.at_s, self._incident, incident)
        self._events.run()
        return measured(
            self._done,
            gpus=self._options.gpus,
            first=self._constants.warm_s,
            last=self._last_began_at,
            moved=self._memory.moved_bytes() if self._memory is not None else MovedBytes(),
            saves_dropped=self._memory.saves_dropped if self._memory is not None else 0,
            incident_at=min((one.at_s for one in self._options.incidents), default=None),
        )

    # --- its parts -----------------------------------------------------------------------

    def _make_memory(self) -> FleetMemory | None:
        options = self._options
        if options.scope is Scope.NONE:
            return None
        return FleetMemory(
            pools_of(options),
            options.instances,
            self._events,
            self._constants,
            options.block * self._constants.kv_bytes,
            shared=options.scope is Scope.POOL,
            direct=options.direct,
            disk_turns=options.disk_turns,
        )

    def _make_engine(self, number: int) -> PrefillEngine:
        beside = self._decoders[number]
        return PrefillEngine(
            number,
            self._events,
            self._constants,
            self._memory,
            block=self._options.block,
            load=self._options.planner,
            prefilled=self._prefilled,
            hint=self._hint,
            beside=beside if isinstance(beside, MixedDecoder) else None,
        )

    # --- sessions ------------------------------------------------------------------------

    def _begin_session(self) -> None:
        plan = next(self._waiting, None)
        if plan is not None:
            self._begin_root(plan)

    def _begin_root(self, plan: SessionPlan) -> None:
        self._last_began_at = self._events.now
        self._begin(plan, None)

    def _begin(self, plan: SessionPlan, parent: _RunningSession | None) -> None:
        number = next(self._numbers)
        session = _RunningSession(number, plan, parent)
        if parent is not None:
            session.chain = parent.chain
        self._running[number] = session
        self._send(session)

    def _send(self, session: _RunningSession) -> None:
        """The session's next prompt."""
        turn = session.plan.turns[session.sent]
        named = session.plan.chain if not session.sent else None
        session.chain = list(named) if named else self._blocks.prompt(session.chain, turn)
        prompt = self._prompt(session.number, session.sent, session.chain, turn)
        session.sent += 1
        prompt.last = session.sent == len(session.plan.turns)
        self._events.after(self._constants.front_end_s, self._arrive, prompt)

    def _send_hog(self) -> None:
        """A long prompt of a client that never comes again, as long as others are there."""
        if not self._running:
            return
        turn = Turn(_HOG_TOKENS, 0, _HOG_OUTPUT, 0.0)
        number = -1 - next(self._numbers)
        prompt = self._prompt(number, 0, self._blocks.prompt([], turn), turn)
        prompt.last = True
        self._events.after(self._constants.front_end_s, self._route, prompt)
        self._events.after(1 / self._options.hog_prompts_s, self._send_hog)

    def _prompt(self, session: int, number: int, chain: list[bytes], turn: Turn) -> Prompt:
        id = f"{session}-{number}"
        return Prompt(id, session, number, chain, turn.length, turn.output, self._events.now)

    def _arrive(self, prompt: Prompt) -> None:
        if self._options.admit:
            self._admission.add(prompt, self._running[prompt.session].root.number)
        else:
            self._route(prompt)

    def _route(self, prompt: Prompt) -> None:
        engine = self._choose(prompt, self._engines)
        engine.add(prompt)
        if self._options.hints & Hints.ARRIVAL:
            self._repeat_arrival(prompt)
        elif self._memory is not None and not prompt.began_at:
            self._memory.looked_up(prompt.engine, prompt.chain, prompt.namespace)

    def _prefilled(self, prompt: Prompt) -> None:
        if self._options.admit and prompt.session >= 0:
            self._admission.first_token()
        decoder = self._decoders[prompt.engine]
        if isinstance(decoder, DecodeEngine):
            decoder = min(self._decoders, key=lambda engine: engine.requests)
        decoder.add(prompt)

    def _answered(self, prompt: Prompt) -> None:
        if prompt.session < 0:
            return  # it is no session's
        self._done.append(prompt)
        session = self._running[prompt.session]
        gap_s = session.plan.turns[prompt.turn].gap_s
        if self._options.admit:
            ends = prompt.last and session.parent is None and bool(self._options.hints & Hints.END)
            self._admission.answered(prompt, ends=ends)
        if prompt.last:
            self._end(session, prompt, gap_s)
        elif session.plan.children and not prompt.turn:
            session.children = len(session.plan.children)
            if self._memory is not None and self._options.spread:
                self._memory.spread(prompt.engine, prompt.namespace, prompt.chain)
            for child in session.plan.children:
                begins_s = self._rng.uniform(0.0, CHILDREN_WITHIN_S)
                self._events.after(gap_s + begins_s, self._begin, child, session)
        else:
            self._announce_return(prompt, gap_s)
            self._events.after(gap_s, self._send, session)

    def _end(self, session: _RunningSession, prompt: Prompt, gap_s: float) -> None:
        del self._running[session.number]
        if (memory := self._hinted(Hints.END)) is not None:
            memory.end(prompt.engine, session_name(session.number), self._events.now)
        parent = session.parent
        if parent is not None:
            parent.children -= 1
            if not parent.children:
                self._events.after(gap_s, self._send, parent)
            return
        self._events.after(gap_s, self._begin_session)

    # --- hints ---------------------------------------------------------------------------

    def _hinted(self, hint: Hints) -> FleetMemory | None:
        """What such a hint goes to, if it is given at all."""
        return self._memory if self._options.hints & hint else None

    def _hint(self, prompt: Prompt) -> SessionHint | None:
        named = self._options.hints and prompt.session >= 0
        return SessionHint(session_name(prompt.session)) if named else None

    def _repeat_arrival(self, prompt: Prompt) -> None:
        """As the connector does, at once and while the prompt waits."""
        memory = self._hinted(Hints.ARRIVAL)
        if memory is None or prompt.session < 0 or prompt.began_at:
            return
        memory.arrived(prompt.engine, session_name(prompt.session), self._events.now)
        self._events.after(_REPEAT_ARRIVAL_S, self._repeat_arrival, prompt)

    def _announce_return(self, prompt: Prompt, gap_s: float) -> None:
        memory = self._hinted(Hints.RESUME)
        if memory is not None:
            in_s = gap_s * self._rng.lognormvariate(0.0, self._options.resume_error)
            memory.resumes(prompt.engine, session_name(prompt.session), in_s, self._events.now)

    # --- bad days ------------------------------------------------------------------------

    def _incident(self, incident: Incident) -> None:
        if incident.kind == "engine":
            lost = self._engines[incident.number].stop()
            self._engines[incident.number] = self._make_engine(incident.number)
            for prompt in lost:
                self._events.after(_ENGINE_LOST_S, self._route, prompt)
        elif self._memory is None:
            return
        elif incident.kind == "server":
            self._memory.lose_server(incident.number)
        elif incident.kind == "restart":
            self._memory.restart_server(incident.number)
        elif incident.kind == "drain":
            self._memory.drain_server(incident.number, DRAIN_S)
        else:
            self._memory.masters_out_until = self._events.now + incident.number


#: The first sessions begin in this time.
_RAMP_S: Final = 60.0
#: A prompt that nobody repeats.
_HOG_TOKENS: Final = 60_000
_HOG_OUTPUT: Final = 100
#: The connector repeats the arrival of a prompt that waits.
_REPEAT_ARRIVAL_S: Final = 30.0
#: Until a router sends the prompts of an engine that is lost to another one.
_ENGINE_LOST_S: Final = 1.0


@dataclass(slots=True, eq=False)
class _RunningSession:
    number: int
    plan: SessionPlan
    parent: _RunningSession | None
    sent: int = 0
    chain: list[bytes] | None = None
    children: int = 0  # that have not ended

    @property
    def root(self) -> _RunningSession:
        """The session that began them all."""
        return self if self.parent is None else self.parent.root
