"""All one-line mistakes that can be planted in the product, and a random sample of them.

The operators are those of cosmic-ray that resemble what people do: a boundary, a sign, a
condition the wrong way round, a loop that is left too early. Two are added: a statement that is
forgotten, and a number that is off by one or by a unit.
"""

from __future__ import annotations

import difflib
import hashlib
import heapq
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators import (
    binary_operator_replacement,
    boolean_replacer,
    break_continue,
    comparison_operator_replacement,
    exception_replacer,
    unary_operator_replacement,
    zero_iteration_for_loop,
)
from cosmic_ray.operators.operator import Operator
from parso.python.tree import Keyword

Node = Any  # parso has no types

_PACKAGES: Final = (
    "kvpool",
    "transports/kvpool_transports",
    "tiers/kvpool_tiers",
    "connector/kvpool_agents",
    "connector/kvpool_codecs",
    "connector/kvpool_connector",
    "connector/kvpool_engines",
    "connector/kvpool_events",
)
#: Files that the tests of the main environment do not run: they need vLLM, a GPU, a store of
#: objects, or are run by a person. `make test WITH=...` and the benchmarks cover them.
_NOT_MEASURED: Final = (
    "connector/kvpool_connector/vllm",
    "connector/kvpool_connector/memory/block_memory.py",
    "kvpool/device_copy.py",
    "tiers/kvpool_tiers/objects/remote.py",
    "kvpool/tools/",
    "kvpool/testing/",
)
#: Parts where every decision is made without I/O: fewer survivors are accepted there.
_PURE: Final = (
    "kvpool/wire/",
    "kvpool/server/state/",
    "kvpool/server/eviction/",
    "kvpool/master/state/",
    "connector/kvpool_connector/plan/planner.py",
    "connector/kvpool_connector/plan/load_or_recompute.py",
    "connector/kvpool_connector/plan/probing.py",
    "connector/kvpool_connector/plan/running_loads.py",
    "connector/kvpool_connector/plan/tracked_request.py",
)
#: Lines that contain one of these are left alone: a text for a person, or nothing at run time.
_LEFT_ALONE: Final = ("log.", "_log.", "TYPE_CHECKING", "__name__", "raise NotImplementedError")
#: Where an operator computes something.
_ARITHMETIC: Final = ("arith_expr", "term", "shift_expr", "expr", "and_expr", "factor", "not_test")
#: Statements with a body: a change in their head is not in the statement around them.
_COMPOUND: Final = ("if_stmt", "while_stmt", "for_stmt", "with_stmt", "try_stmt", "except_clause")
#: Integers up to here are counts and boundaries, larger ones are sizes, limits and times.
_SMALL: Final = 8


class Mutant(NamedTuple):
    """One mistake. `occurrence` counts the places in the file that the operator can change."""

    path: str
    operator: str
    occurrence: int
    line: int
    #: The statement, or the head of the compound statement, that the mistake is in.
    first_line: int
    last_line: int

    @property
    def room(self) -> str:
        """The folder of the file, for reports."""
        return str(Path(self.path).parent)

    @property
    def is_pure(self) -> bool:
        """Whether the file decides without I/O."""
        return self.path.startswith(_PURE)


class DropStatement(Operator):
    """Forgets a call, a deletion or an assignment to a part of an object."""

    def mutation_positions(self, node: Node) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and _can_be_forgotten(node.children[0]):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Node, index: int) -> Node:
        prefix = node.get_first_leaf().prefix
        node.children[0] = Keyword("pass", node.start_pos, prefix=prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class ChangeNumber(Operator):
    """A small integer is off by one, a limit or any other number by a unit (1,000 times)."""

    def mutation_positions(self, node: Node) -> Iterator[tuple[Any, Any]]:
        if node.type == "number":
            for _ in self._others(node):
                yield node.start_pos, node.end_pos

    def mutate(self, node: Node, index: int) -> Node:
        node.value = self._others(node)[index]
        return node

    @staticmethod
    def _others(node: Node) -> list[str]:
        text = node.value.replace("_", "")
        if text.isdecimal() and int(text) <= (1 if _defines_a_limit(node) else _SMALL):
            return [str(int(text) + 1)] + ([str(int(text) - 1)] if int(text) else [])
        return ["1.0"] if text == "0.0" else [f"({node.value} * 1000)"]

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class CatchNothing(exception_replacer.ExceptionReplacer):
    """A handler does not catch one of its exceptions. (cosmic-ray's own fails on `zmq.Again`.)"""

    @staticmethod
    def _name_nodes(node: Node) -> list[Node]:
        nodes = exception_replacer.ExceptionReplacer._name_nodes(node)
        return [one for one in nodes if one.type == "name"]


def _defines_a_limit(node: Node) -> bool:
    """`_RETRIES: Final = 8`: off by one, it makes no difference that people would notice."""
    statement = node.search_ancestor("expr_stmt")
    return statement is not None and ": Final" in statement.get_code()


def _can_be_forgotten(statement: Node) -> bool:
    if statement.type == "del_stmt":
        return True
    if statement.type == "atom_expr":  # a call, or `await` of one
        return statement.get_code().rstrip().endswith(")")
    if statement.type != "expr_stmt" or statement.children[1].type == "annassign":
        return False
    function = statement.search_ancestor("funcdef")
    if function is not None and function.name.value == "__init__":
        return False  # a missing attribute is found by any test
    return statement.children[0].type == "atom_expr" or (
        statement.children[1].type == "operator" and (statement.children[1].value != "=")
    )


def _operators() -> dict[str, Operator]:
    chosen: list[type[Operator]] = [
        DropStatement,
        ChangeNumber,
        boolean_replacer.AddNot,
        boolean_replacer.ReplaceTrueWithFalse,
        boolean_replacer.ReplaceFalseWithTrue,
        boolean_replacer.ReplaceAndWithOr,
        boolean_replacer.ReplaceOrWithAnd,
        break_continue.ReplaceBreakWithContinue,
        break_continue.ReplaceContinueWithBreak,
        CatchNothing,
        zero_iteration_for_loop.ZeroIterationForLoop,
    ]
    comparisons = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_GtE", "Gt_LtE", "LtE_Gt", "GtE_Lt")
    comparisons += ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
    sums = ("Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul", "Div_Mul", "Mod_FloorDiv")
    sums += ("BitAnd_BitOr", "BitOr_BitAnd", "LShift_RShift", "RShift_LShift")
    for module, prefix, names in (
        (comparison_operator_replacement, "ReplaceComparisonOperator_", comparisons),
        (binary_operator_replacement, "ReplaceBinaryOperator_", sums),
        (unary_operator_replacement, "ReplaceUnaryOperator_", ("Delete_Not", "Delete_USub")),
    ):
        chosen += [getattr(module, prefix + name) for name in names]
    return {operator.__name__: operator() for operator in chosen}


OPERATORS: Final = _operators()


def product_files(root: Path) -> list[str]:
    """The measured files of the product, relative to the root, sorted."""
    found = (
        path.relative_to(root).as_posix()
        for package in _PACKAGES
        for path in (root / package).rglob("*.py")
    )
    return sorted(path for path in found if not path.startswith(_NOT_MEASURED))


@cache
def mutants_of(root: Path, path: str) -> list[Mutant]:
    """Every mistake that can be planted in one file, in the order of its operators."""
    source = (root / path).read_text()
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name, operator in OPERATORS.items():
        occurrence = 0
        for node in nodes:
            for (line, _), (end, _) in operator.mutation_positions(node):
                if not _is_left_alone(node, lines[line - 1]):
                    whole = _statement(node)
                    first, last = (line, end) if whole is None else whole
                    found.append(Mutant(path, name, occurrence, line, first, last))
                occurrence += 1
    return found


def _statement(node: Node) -> tuple[int, int] | None:
    """First and last line of the simple statement around the node; None if there is none."""
    around = node if node.type == "simple_stmt" else node.search_ancestor("simple_stmt")
    if around is None or node.type in _COMPOUND:
        return None
    return around.start_pos[0], around.get_last_leaf().start_pos[0]


def _is_left_alone(node: Node, line: str) -> bool:
    if any(text in line for text in _LEFT_ALONE):
        return True
    if node.type in _COMPOUND and node.children[1].type == "namedexpr_test":
        return True  # `not name := value` is no Python
    if node.type == "operator" and node.parent.type not in _ARITHMETIC:
        return True  # the star of `*arguments`, or of keyword-only parameters
    if node.parent is not None and node.parent.get_code().strip() in (
        "strict=True",
        "strict=False",
    ):
        return True  # `zip(..., strict=True)` is an assertion: it says what cannot happen
    child = node
    while (parent := child.parent) is not None:
        if parent.type in ("annassign", "tfpdef", "decorator", "assert_stmt") and child is not (
            parent.children[-1] if len(parent.children) > 3 else None
        ):
            return True  # an annotation is not evaluated
        if parent.type == "funcdef" and child is parent.annotation:
            return True
        if parent.type == "atom_expr" and parent.get_code().strip().startswith(
            ("log.", "self._log.")
        ):
            return True
        child = parent
    return False


def sample(root: Path, count: int, seed: int, rooms: Sequence[str] = ()) -> list[Mutant]:
    """`count` different mistakes, the same for the same source and seed.

    Files are drawn by their number of possible mistakes. Each mistake has a random place in one
    long queue, and the sample is its beginning: when a file changes, the mistakes of other files
    stay in the sample, and what is known of them stays useful. `rooms`: only these files and the
    files in these folders; "pure" and "others" are the pure parts and all others.
    """

    def place(mutant: Mutant) -> bytes:
        name = f"{seed} {mutant.path} {mutant.operator} {mutant.occurrence}"
        return hashlib.sha256(name.encode()).digest()

    everything = (
        mutant
        for path in product_files(root)
        if not rooms or any(_is_in(path, room) for room in rooms)
        for mutant in mutants_of(root, path)
    )
    return heapq.nsmallest(count, everything, key=place)


def _is_in(path: str, room: str) -> bool:
    if room in ("pure", "others"):
        return path.startswith(_PURE) is (room == "pure")
    return f"{path}/".startswith(f"{room.rstrip('/')}/")


@lru_cache(maxsize=32)
def _read(path: Path) -> str:
    return path.read_text()


def planted(root: Path, mutant: Mutant) -> str:
    """The source of the mutant's file with the mistake in it."""
    changed = mutate_code(_read(root / mutant.path), OPERATORS[mutant.operator], mutant.occurrence)
    if changed is None:
        raise ValueError(f"{mutant}: the operator has no such place; the source has changed")
    return str(changed)


def changed_lines(root: Path, mutant: Mutant) -> list[str]:
    """The lines that the mistake changes, with `-` before and `+` after it."""
    before = _read(root / mutant.path).splitlines()
    after = planted(root, mutant).splitlines()
    return [
        line
        for line in difflib.unified_diff(before, after, n=0, lineterm="")
        if line[0] in "+-" and not line.startswith(("+++", "---"))
    ]
