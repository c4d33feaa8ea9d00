"""Programs: conversations are told from the chains themselves, and ranked by when they go on.

A chain that extends another one at its end is the next prompt of the same *program*: a conversation
of a person or an agent. A program is known by its *root*, the first block that it did not share
when it began. Programs that are alike in how many prompts they had, and in how much the last one
added, form a class. Of each class is measured how many go on, and after which pause. From that
follows for each pause so far the best ratio of hits to time (Gittins' index, as in `density`). The
program with the lowest goes first, from its end; a new block that ranks below all is refused.

- The last block of a prompt is often not full, and the next prompt has another one in its place.
  If most are lost so, the ends of prompts are a class of their own.
- A block where programs part is *shared*, and is ranked by how soon shared blocks are used again.

The measurement must not depend on what was kept. So a program is remembered when its blocks are
gone: the name of its root and a few numbers (design: eviction).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvpool.protocols.policy import Decision, Inferred
from kvpool.server.eviction.density import LifetimeHistogram
from kvpool.server.eviction.held_programs import HeldPrograms, Program
from kvpool.server.eviction.lru import LRU
from kvpool.server.eviction.verdicts import REFUSED, Departures, Guesses, returning, worth
from kvpool.server.state.entry import Entry

#: Programs that are remembered for each stored block, and at least.
_REMEMBERED: Final = 0.25
_REMEMBERED_MIN: Final = 4096
#: Forgotten at the end of one prompt, at most: many blocks may have left at once.
_FORGOTTEN_MAX: Final = 8
#: After so many seconds without a use, no block keeps a new one out (G9).
_BYPASS_S_MAX: Final = 600.0
#: A new block is refused only if its density is below this fraction of the victim's.
_BYPASS_MARGIN: Final = 0.9
#: Parts of a chain within so many seconds are one prompt, and what is written so soon after a read.
_SAME_PROMPT_S, _PREFILL_S = 1.0, 120.0
#: Upper bounds of classes: which prompt of its program it is, and how many blocks it adds.
_PROMPTS: Final = (1, 2, 3, 5, 9, 24, 33)
_GROWTHS: Final = (15,)
#: The same for shared blocks: how often they were used.
_SHARED_USES: Final = (3, 9)
#: One class is learned after so many prompts, in turn.
_LEARN_EVERY: Final = 8
#: The common measurement counts for as many programs of each class: of how many go on, and when.
_PRIOR, _SHAPE = 50.0, 100.0
#: Victims in a row, and seconds, before all classes are compared again.
_ROW: Final = 8
_ROW_S: Final = 0.1
#: Blocks that one call brings into the queue of their class, at most.
_MOVED_MAX: Final = 256

_END: Final = (len(_PROMPTS) + 1) * (len(_GROWTHS) + 1)
_SHARED: Final = _END + 1
_CLASSES: Final = _SHARED + len(_SHARED_USES) + 1

# `policy_data`, from the lowest bits: the class, the class in whose queue the block is, the one
# that its parent inherits, whether it is not sealed yet, its place in the chain, and the name of
# its program's root. 0 before the first touch.
_MASK: Final = 0xFF
_QUEUED: Final = 8
_PASSED_ON: Final = 16
_NEW: Final = 1 << 24
_DEPTH: Final = 25
_DEPTH_MAX: Final = (1 << 23) - 1
_ROOT: Final = 48
#: Beside the classes: a block that was never stored.
_REFUSED: Final = _CLASSES
#: A class as that of a block and of its parent, and where they are.
_AS_CLASS: Final = 1 | 1 << _PASSED_ON
_CLASSES_OF: Final = _MASK * _AS_CLASS
#: No class was chosen before.
_NO_ROW: Final = (-1, 0.0, 0)


class Programs:
    """Evicts the program of lowest density, among the least recently used of each class."""

    def __init__(self, capacity: int) -> None:
        self._queues: list[LRU[Entry]] = [LRU() for _ in range(_CLASSES)]
        self._lives = [Lives() for _ in range(_CLASSES)]
        self._all = Lives()
        self._last_stamp = 0
        self._programs: OrderedDict[int, Program] = OrderedDict()
        self._prompt = _Prompt()
        self._stored = 0
        self._counted = 0  # prompts
        self._ends = self._ends_kept = 0.0  # prompts that went on, and such with their last block
        self._row = _NO_ROW  # class of the last victim, when it was chosen, victims left
        self._held = HeldPrograms(_CLASSES, _SHARED)
        self._guesses = Guesses(_SHARED)
        self._departures = Departures(self._words)

    @property
    def remembered(self) -> int:
        """Number of programs that are remembered."""
        return len(self._programs)

    def prompts_of(self, block: Entry) -> int:
        """Prompts of the block's program so far; 0: not known, or many programs share it."""
        program = self._programs.get(block.policy_data >> _ROOT)
        is_shared = block.policy_data & _MASK >= _SHARED
        return program.prompts if program is not None and not is_shared else 0

    def inferred(self) -> Inferred:
        expected = [returning(lives) for lives in self._lives[:_SHARED]]
        found = self._held.figures(expected)
        found.update(self._guesses.figures(expected))
        return Inferred(found, self._departures.why)

    # --- calls of the store ----------------------------------------------------------------

    def touch(self, block: Entry, now: float) -> None:
        data = block.policy_data
        if data & _NEW:
            block.policy_data = data & ~_NEW
        else:
            prompt = self._prompt_of(block, now)
            if prompt is not self._prompt:
                self._finish()
                self._prompt = prompt
            if data:
                prompt.deepest = block
            else:
                self._add(prompt, block)
            prompt.last = block
        self._last_stamp = block.last_used = max(self._last_stamp + 1, int(now * 1e6))

    def add_candidate(self, block: Entry) -> None:
        if block is self._prompt.last:
            self._finish()
        if not block.is_candidate:
            number = block.policy_data & _MASK
            block.policy_data = block.policy_data & ~(_MASK << _QUEUED) | number << _QUEUED
            self._queues[number].add_candidate(block)

    def remove(self, block: Entry) -> None:
        if block is self._prompt.last:
            self._finish()
        data = block.policy_data
        self._queues[data >> _QUEUED & _MASK].remove(block)
        if not data:
            return
        self._stored -= 1
        block.policy_data = 0
        program = self._programs.get(data >> _ROOT)
        if program is not None and self._held.left(program, data >> _DEPTH & _DEPTH_MAX):
            self._guesses.left[program.number] += 1
        parent = block.index.blocks.get(block.parent)
        if parent is not None and parent.policy_data and parent.last_used <= block.last_used:
            above = parent.policy_data
            if above & _MASK < _SHARED:  # the rest of the program ends here
                number = data >> _PASSED_ON & _MASK
                parent.policy_data = above & ~_CLASSES_OF | number * _AS_CLASS

    def victim(
        self, newcomer: Entry, evictable: Callable[[Entry], bool], now: float
    ) -> Entry | Decision | None:
        while (poorest := self._poorest(now)) is not None:
            if isinstance(poorest, Decision):
                return poorest
            number, last_used, kept = poorest
            age_s = now - last_used / 1e6
            if age_s < _BYPASS_S_MAX:
                prompt = self._prompt_of(newcomer, now)
                offered = self._lives[self._class_in(prompt, newcomer)].density(0.0)
                if offered < kept * _BYPASS_MARGIN:
                    self._refuse(prompt, newcomer)
                    self._departures.add(newcomer.digest, _REFUSED, 0.0)
                    return Decision.BYPASS
            block = self._queues[number].victim(newcomer, evictable, now)
            if block is not None:
                if not isinstance(block, Decision):
                    self._departures.add(block.digest, number, age_s)
                return block
            self._row = _NO_ROW
        return None

    def victim_age(self, now: float) -> float:
        row, self._row = self._row, _NO_ROW
        poorest = self._poorest(now)
        self._row = row
        if isinstance(poorest, Decision):  # near enough: a look must not take long
            return max(queue.victim_age(now) for queue in self._queues)
        return max(0.0, now - poorest[1] / 1e6) if poorest is not None else 0.0

    # --- prompts ---------------------------------------------------------------------------

    def _prompt_of(self, block: Entry, now: float) -> _Prompt:
        """The prompt that this block goes on with, or the one that it begins."""
        prompt = self._prompt
        if prompt.last is not None and block.parent == prompt.last.digest:
            return prompt
        return _Prompt(block.index.blocks.get(block.parent), now, not block.policy_data)

    def _add(self, prompt: _Prompt, block: Entry) -> None:
        """A new block of this prompt."""
        self._stored += 1
        self._place(prompt, block)
        prompt.fresh += 1
        place, number = min(prompt.depth + prompt.fresh, _DEPTH_MAX), 0
        if (program := prompt.program) is not None:
            program.gone |= program.blocks == program.common
            self._held.came(program, place)
            number = program.number
        number = number if number >= _SHARED else 0  # others get theirs at the end of the prompt
        data = place << _DEPTH | _NEW | number * _AS_CLASS
        block.policy_data = prompt.root << _ROOT | data

    def _place(self, prompt: _Prompt, block: Entry) -> None:
        """Find the program of a new block, which may have been here before."""
        if not prompt.fresh:
            self._join(prompt)
            if prompt.parts and prompt.deepest is not None:
                self._share(prompt, prompt.deepest)
        name = _name(block)
        program = self._programs.get(name)
        if program is not None:
            prompt.program, prompt.root = program, name
            if program.number >= _SHARED:
                prompt.shared = name
        elif (program := prompt.program) is None or program.number >= _SHARED:
            place = prompt.depth + prompt.fresh + 1
            program = prompt.program = Program(prompt.inherited, begin=place)
            self._programs[name] = program
            prompt.root = name
        prompt.is_end_kept |= block.digest == program.end

    def _join(self, prompt: _Prompt) -> None:
        """Find the program of the last block that was here before, if the prompt is of that one."""
        block = prompt.deepest
        if prompt.joined or block is None or not block.policy_data:
            return
        prompt.joined = True
        data = block.policy_data
        prompt.depth = data >> _DEPTH & _DEPTH_MAX
        if data & _MASK >= _SHARED:
            prompt.shared = _name(block)
            return
        program = self._programs.get(data >> _ROOT)
        if program is None or program.number >= _SHARED:
            return
        # Only its last block may be replaced by another one.
        if block.children and prompt.depth + 1 < program.depth:
            prompt.parts, prompt.inherited = True, program.prompts
        else:
            prompt.program, prompt.root = program, data >> _ROOT
            prompt.is_end_kept = block.digest == program.end

    def _share(self, prompt: _Prompt, block: Entry) -> None:
        """The prompt leaves the program of this block: from here on others go on differently."""
        prompt.shared, data = _name(block), block.policy_data
        known = self._programs.get(prompt.shared)
        owner, place = self._programs.get(data >> _ROOT), data >> _DEPTH & _DEPTH_MAX
        if owner is not None:
            self._held.parted(owner, place)
        if known is None or known.number < _SHARED:
            shared = Program(1, _SHARED, place)
            if known is not None:  # its root; the rest is nobody's
                self._held.dropped(known)
                self._held.came(shared, place)
            self._programs[prompt.shared] = shared
            shared.used = block.last_used / 1e6
        block.policy_data = data & ~_CLASSES_OF | _SHARED * _AS_CLASS

    def _refuse(self, prompt: _Prompt, newcomer: Entry) -> None:
        if prompt is not self._prompt:
            self._finish()
            self._prompt = prompt
        self._place(prompt, newcomer)
        prompt.refused = True

    def _class_in(self, prompt: _Prompt, newcomer: Entry) -> int:
        """The class of a new block, as far as its prompt is known."""
        self._join(prompt)
        program = self._programs.get(_name(newcomer)) or prompt.program
        if program is None:
            return _class_of(prompt.inherited + 1, prompt.fresh + 1)
        if program.number >= _SHARED or (program.number >= 0 and program.used == prompt.now):
            return program.number
        before = program.depth if program.number >= 0 else prompt.depth
        return _class_of(program.prompts + 1, prompt.depth + prompt.fresh + 1 - before)

    def _finish(self) -> None:
        """All of the prompt's chain, or of this part of it, was seen."""
        prompt, last = self._prompt, self._prompt.last
        if last is None and not prompt.refused:
            return
        self._prompt = _Prompt()
        # Here, where every prompt ends, refused ones too. One that forks has added two.
        over = len(self._programs) - max(_REMEMBERED_MIN, int(self._stored * _REMEMBERED))
        for _ in range(min(over, _FORGOTTEN_MAX)):
            self._held.dropped(self._programs.popitem(last=False)[1])
        if not prompt.fresh and not prompt.refused:
            self._join(prompt)
        if prompt.shared:
            self._count_shared(prompt)
        program = prompt.program
        if program is None or program.number >= _SHARED:
            return
        if self._programs.setdefault(prompt.root, program) is not program:
            self._held.dropped(self._programs[prompt.root])
            self._programs[prompt.root] = program  # it was forgotten, and begun anew
        self._programs.move_to_end(prompt.root)
        self._count(prompt, program)
        if last is None or not last.policy_data:
            return
        number = program.number
        is_end = prompt.fresh > 0 and not prompt.refused and self._ends_kept < self._ends / 2
        if last.policy_data & _MASK < _SHARED:
            own = _END if is_end else number
            last.policy_data = last.policy_data & ~_CLASSES_OF | own | number << _PASSED_ON
        program.end = b"" if prompt.refused else last.digest

    def _count(self, prompt: _Prompt, program: Program) -> None:
        """Count a prompt of a program, and when it came; or more of its last one."""
        pause_s = prompt.now - program.used
        depth = prompt.depth + prompt.fresh
        known = program.number >= 0
        limit_s = _PREFILL_S if program.reads and prompt.is_written else _SAME_PROMPT_S
        if known and prompt.is_part and pause_s < limit_s:
            self._lives[program.number].began -= 1
            self._all.began -= 1
        else:
            if known:
                gone = program.gone or program.blocks == program.common
                (self._guesses.asked if gone else self._guesses.came)[program.number] += 1
                self._lives[program.number].ended(pause_s)
                self._all.ended(pause_s)
                if prompt.is_end_kept:
                    self._lives[_END].ended(pause_s)
                if program.end and depth >= program.depth:
                    self._ends += 1
                    self._ends_kept += prompt.is_end_kept
            program.prompts += 1
            program.start = program.depth if known else prompt.depth
            program.used = prompt.now
            self._lives[_END].began += 1
        program.reads = not prompt.fresh
        program.depth = depth
        number = _class_of(program.prompts, depth - program.start + prompt.refused)
        self._held.changed(program, number)
        program.gone = False
        if prompt.refused and program.blocks == program.common:
            self._guesses.left[number] += 1
        self._lives[program.number].began += 1
        self._all.began += 1
        self._counted += 1
        if self._counted % _LEARN_EVERY == 0:
            self._learn(self._counted // _LEARN_EVERY % _CLASSES)

    def _count_shared(self, prompt: _Prompt) -> None:
        shared = self._programs.get(prompt.shared)
        if shared is None or shared.number < _SHARED:
            return
        self._programs.move_to_end(prompt.shared)
        pause_s = prompt.now - shared.used
        if not prompt.is_part:
            self._lives[shared.number].ended(pause_s)
            shared.used = prompt.now
            shared.prompts += 1
            self._held.changed(shared, _SHARED + bisect_left(_SHARED_USES, shared.prompts))
            self._lives[shared.number].began += 1

    # --- order -----------------------------------------------------------------------------

    def _poorest(self, now: float) -> tuple[int, int, float] | Decision | None:
        """The class whose oldest leaf has the lowest density, the last use of that one, and it.

        NOT_YET when that takes more steps: call again.
        """
        number, at, left = self._row
        numbers = range(_CLASSES) if number < 0 or not left or now - at > _ROW_S else (number,)
        best: tuple[float, int, int] | None = None
        moved = 0
        for number in numbers:
            queue = self._queues[number]
            while True:
                block = queue.oldest()
                if isinstance(block, Decision) or moved == _MOVED_MAX:
                    return Decision.NOT_YET
                if block is None or block.policy_data & _MASK == number:
                    break
                queue.take()  # its class is another one since it was queued
                self.add_candidate(block)
                moved += 1
            if block is None:
                continue
            density = self._lives[number].density(now - block.last_used / 1e6)
            if best is None or (density, block.last_used) < best[:2]:
                best = (density, block.last_used, number)
        if best is None:
            if len(numbers) == _CLASSES and not moved:  # else it is in a queue before this one
                return None
            self._row = _NO_ROW
            return self._poorest(now)
        self._row = (best[2], at, left - 1) if len(numbers) == 1 else (best[2], now, _ROW)
        return best[2], best[1], best[0]

    def _learn(self, number: int) -> None:
        self._lives[number].learn_beside(self._all)
        if number == 0:
            self._all.fade()
            self._ends *= Lives.KEPT
            self._ends_kept *= Lives.KEPT

    # --- for people ------------------------------------------------------------------------

    def _words(self, number: int, age_s: float) -> str:
        if number == _REFUSED:
            return REFUSED
        share = self._lives[number].share(age_s)
        if number >= _SHARED:
            return f"conversations part here, {worth(share, age_s, 'blocks')}"
        if number == _END:
            return f"the end of a prompt, {worth(share, age_s, 'ends')}"
        place = number // (len(_GROWTHS) + 1)
        had = f"at most {_PROMPTS[place]}" if place < len(_PROMPTS) else f"over {_PROMPTS[-1]}"
        return f"of a conversation of {had} prompts, {worth(share, age_s, 'conversations')}"


class _Prompt:
    """The chain that is being touched, head first: what was here before, then new blocks."""

    __slots__ = (
        "deepest", "depth", "fresh", "inherited", "is_end_kept", "is_part", "is_written", "joined",
        "last", "now", "parts", "program", "refused", "root", "shared",
    )  # fmt: skip

    def __init__(
        self, deepest: Entry | None = None, now: float = 0.0, is_written: bool = False
    ) -> None:
        self.last: Entry | None = None  # touched
        self.deepest = deepest  # block that was here before
        self.depth = 0  # its place
        self.fresh = 0  # new blocks after it
        self.now = now
        self.program: Program | None = None
        self.root = 0  # its name
        self.shared = 0  # name of the shared block where it begins
        self.inherited = 0  # prompts of the program from which it parts
        self.joined = False  # `deepest` was looked at
        self.parts = False  # it leaves the program of `deepest`
        self.is_end_kept = False  # it has the last block of the program's last prompt
        self.is_part = deepest is not None  # it began after a block that is here
        self.is_written = is_written  # it began with a new block
        self.refused = False  # the rest of its chain is not seen


class Lives(LifetimeHistogram):
    """How many programs of one class go on, and when; and the densities from that."""

    _PER_OCTAVE = 3
    _BINS = 48  # up to 3 hours
    KEPT = 0.95

    def learn_beside(self, prior: Lives) -> None:
        """As `learn`. Few programs of a class are taken to pause like all others."""
        known, total = sum(self._ended), sum(prior._ended)
        share = total / max(1.0, prior.began, total)
        share = (known + _PRIOR * share) / (max(self.began, known) + _PRIOR)
        scale = _SHAPE * share / max(1.0, total)
        ended = [mine + scale * one for mine, one in zip(self._ended, prior._ended, strict=True)]
        self._compute(max(self.began, known) + _SHAPE, ended)
        self.fade()


def _class_of(prompts: int, growth: int) -> int:
    return bisect_left(_PROMPTS, prompts) * (len(_GROWTHS) + 1) + bisect_left(_GROWTHS, growth)


def _name(block: Entry) -> int:
    return int.from_bytes(block.digest[:8], "little") + block.index.part
