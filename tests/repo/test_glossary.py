"""One word per idea: the glossary of CONTRIBUTING.md, retired words, and class names."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PRODUCT: Final = sorted(
    path
    for room in ("kvpool", "transports", "tiers", "connector")
    for path in (ROOT / room).rglob("*.py")
)
#: Words that the field's terms have replaced, with the number of identifiers that still contain
#: them. A number may only go down; a word that is not used any more keeps its zero.
RETIRED: Final = {
    "books": 0,
    "bury": 0,
    "carried": 0,
    "chance": 0,
    "complaints": 0,
    "patience": 0,
    "relay": 0,
    "rotten": 0,
    "said": 0,
    "sighting": 0,
    "sightings": 0,
    "spoilt": 0,
    "suspect": 0,
    "told": 0,
    "trouble": 0,
    "weather": 0,
}
#: Modules of these names were renamed; the old name would mislead a reader who knows both.
RETIRED_MODULES: Final = {
    "children",
    "dry",
    "estimates",
    "exchanges",
    "hosts",
    "lifecycle",
    "link",
    "mover",
    "paths",
    "picture",
    "pieces",
    "reach",
    "relay",
    "serving",
    "sightings",
    "stack",
    "staging",
}
#: The same names on purpose: the synchronous pool mirrors the asynchronous one.
SHARED_CLASS_NAMES: Final = {"Admin", "ClientSession", "Pool"}


def glossary() -> list[str]:
    """Every word that the tables under "Words" define."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Words\n")[2]
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", text.partition("\n## ")[0], re.M)
    return [word for row in rows if row not in ("word", "verb") for word in row.split(", ")]


def test_each_word_of_the_glossary_is_defined_once() -> None:
    words = Counter(glossary())
    assert len(words) > 30
    assert not [word for word, count in words.items() if count > 1]
    assert not [word for word in words if word in RETIRED]


def test_retired_words_do_not_come_back() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in PRODUCT:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.NAME:
                for word in words_of(token.string) & RETIRED.keys():
                    found[word].append(f"{path.relative_to(ROOT)}:{token.start[0]}")
    too_many = {word: found[word] for word in RETIRED if len(found[word]) > RETIRED[word]}
    assert not too_many


def words_of(identifier: str) -> set[str]:
    """`_heard_s` and `HeardOf` contain the word `heard`."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", identifier)}


def test_no_module_has_a_retired_name() -> None:
    assert not [path for path in PRODUCT if path.stem in RETIRED_MODULES]


def test_a_class_name_stands_in_one_file() -> None:
    files: defaultdict[str, list[str]] = defaultdict(list)
    for path in PRODUCT:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(ROOT)))
    shared = {name: where for name, where in files.items() if len(where) > 1}
    assert shared.keys() <= SHARED_CLASS_NAMES, shared
