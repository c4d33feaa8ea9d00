"""The documents name what exists: files, functions, tests, sections and links."""

from __future__ import annotations

import ast
import functools
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvpool.cli.app import app

ROOT = Path(__file__).parents[2]
FOLDERS = [
    *("kvpool", "transports", "tiers", "connector", "examples", "benchmarks"),
    *("tests", "docs", "deploy", ".github"),
]
#: Documents whose file and function names must exist in the code.
CHECKED = [
    *("README.md", "CONTRIBUTING.md", "connector/README.md", "benchmarks/README.md"),
    *(f"docs/{name}.md" for name in ("tour", "design", "guarantees", "policies", "benchmarks")),
    *(f"docs/{name}.md" for name in ("deploy-ucx", "wire", "write-a-connector", "fleet", "events")),
    *(f"docs/{name}.md" for name in ("features", "operate", "other-engines", "scale")),
]
#: The page whose claims name the files of the attack suite that test them.
CLAIMS = "docs/security.md"
PRODUCT = ("kvpool", "transports", "tiers", "connector")

#: `path/file.py`, `path/file.py: Name` or `path/file.py: Name.method`, in backticks.
NAMED = re.compile(r"`([\w./-]+\.py)(?:: ([\w.]+)(?:\(\))?)?`")
TEST_NAME = re.compile(r"(?:`|::)(test_\w+)(?![\w.])")
DEFINED = re.compile(r"^ *(?:async )?(?:def|class) (\w+)", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ANCHOR = re.compile(r'<a id="([^"]+)"></a>')
#: `(design: pins)`, `(design: pins, moves)` and `(G9, design: pins)`, also over the end of a line.
CITED = re.compile(r"design:\s([a-z0-9, \n#:-]+)\)")
#: A decision of docs/design.md: its heading and its text.
DECISION = re.compile(r"^### (.+)\n((?:(?!#).*\n)*)", re.MULTILINE)
DECISION_WORDS = 160
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    return [
        *ROOT.glob("*.md"),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
    ]


@functools.cache
def python_files() -> list[Path]:
    return [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


@functools.cache
def definitions(path: Path) -> frozenset[str]:
    """Every name that a file defines: functions, classes, constants, methods and attributes."""
    return frozenset(defined("", ast.parse(path.read_text())))


def defined(prefix: str, node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name
            yield from (f"{prefix}{name}" for name in attributes(child) if prefix)
        elif isinstance(child, ast.ClassDef):
            yield prefix + child.name
            yield from defined(f"{prefix}{child.name}.", child)
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def attributes(function: ast.AST) -> Iterator[str]:
    """What a method assigns to `self`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def candidates(name: str) -> list[Path]:
    """The files that a document may mean by `pool.py` or `client/pool.py`."""
    if (ROOT / name).is_file():
        return [ROOT / name]
    return [path for path in python_files() if path.as_posix().endswith(f"/{name}")]


@pytest.mark.parametrize("document", CHECKED)
def test_what_a_document_names_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    missing = []
    for file, name in NAMED.findall(text):
        found = candidates(file)
        if not found:
            missing.append(file)
        elif name and not any(name in definitions(path) for path in found):
            missing.append(f"{file}: {name}")
    assert not missing, f"{document} names what does not exist: {', '.join(missing)}"


def test_the_tests_that_documents_name_exist() -> None:
    tests = [path for path in python_files() if "tests" in path.parts]
    known = {name for path in tests for name in DEFINED.findall(path.read_text())}
    modules = {path.stem for path in tests}
    for document in (*CHECKED, ".ci/run"):
        named = set(TEST_NAME.findall((ROOT / document).read_text()))
        assert named <= known | modules, f"{document}: {named - known - modules}"


@functools.cache
def anchors(document: Path) -> frozenset[str]:
    """The anchors of a document: those written by hand and those that headings get."""
    text = CODE.sub("", document.read_text())
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return frozenset([*ANCHOR.findall(text), *map(slug, headings)])


def slug(heading: str) -> str:
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_links_between_documents_lead_somewhere() -> None:
    dead = []
    for document in documents():
        for link in LINK.findall(CODE.sub("", document.read_text())):
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (document.parent / path).resolve() if path else document
            if not target.exists() or (
                anchor and target.suffix == ".md" and anchor not in anchors(target)
            ):
                dead.append(f"{document.relative_to(ROOT)}: {link}")
    assert not dead, dead


def decisions() -> dict[str, str]:
    """The text of each decision, by the name under which it is cited."""
    found = DECISION.findall((ROOT / "docs/design.md").read_text())
    named = {slug(heading): text for heading, text in found}
    assert len(named) == len(found), "a heading stands twice"
    return named


def test_a_decision_is_short_and_names_the_test_that_holds_it() -> None:
    wrong = []
    for name, text in decisions().items():
        if len(text.split()) > DECISION_WORDS:
            wrong.append(f"{name}: more than {DECISION_WORDS} words")
        files = [file for file, _ in NAMED.findall(text)]
        if not any((ROOT / file).is_file() for file in files if Path(file).match("test_*.py")):
            wrong.append(f"{name}: no test")
    assert not wrong, wrong


def test_what_is_cited_is_a_decision() -> None:
    known, unknown = decisions(), []
    for path in [*python_files(), *documents()]:
        for cited in CITED.findall(path.read_text()):
            names = filter(None, re.split(r"[,\s#:]+", cited))
            unknown += [f"{path.relative_to(ROOT)}: {name}" for name in names if name not in known]
    assert not unknown, f"docs/design.md has no such decision: {unknown}"


def test_the_figures_of_the_picture_are_those_of_the_page() -> None:
    picture = (ROOT / "docs/result.svg").read_text()
    page = (ROOT / "docs/benchmarks.md").read_text()
    shown = re.findall(r">(\d+(?:\.\d+)?)(?: %|, \d+ reads failed)?</text>", picture)
    assert len(shown) >= 15
    cells = set(re.findall(r"\d+(?:\.\d+)?", page))
    assert not [one for one in shown if one not in cells], "docs/benchmarks.md has newer ones"


#: In a block of code, or in backticks: from where a command begins up to what ends one in a shell.
COMMAND = re.compile(
    r"(?:^ *(?:\$ )?(?:[A-Z_]+=\S+ )*|`|&& |; |-- )(kvpool|make|python -m) +([\w./-]+)"
    r"((?:\\\n|[^\n`#|&;)])*)",
    re.MULTILINE,
)


def commands() -> Iterator[tuple[str, str, str, list[str]]]:
    """Each command in a document: where, program, first word, options."""
    for document in documents():
        if document.name == "CHANGELOG.md":  # what there was
            continue
        text = document.read_text()
        code = [*re.findall(r"^ *```.*?^ *```", text, re.MULTILINE | re.DOTALL)]
        code += re.findall(r"`[^`]+`", CODE.sub("", text))
        for part in code:
            for program, word, rest in COMMAND.findall(part):
                options = re.findall(r"(?<!\S)--[a-z][\w-]*", rest)
                yield f"{document.relative_to(ROOT)}: {program} {word}", program, word, options


def test_the_commands_in_documents_exist_with_their_options() -> None:
    known: dict[str, set[str]] = {}
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        known[name] = {one for option in command.params for one in option.opts} | {"--help"}
    targets = set(re.findall(r"^([\w/-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong, seen = [], 0
    for where, program, word, options in commands():
        seen += 1
        if program == "kvpool":
            if not word.startswith("--") and re.fullmatch("[a-z-]+", word):
                missing = [one for one in options if one not in known.get(word, ())]
                if word not in known or missing:
                    wrong.append(f"{where} {' '.join(missing)}")
        elif program == "make":
            if word not in targets and re.fullmatch("[a-z-]+", word):
                wrong.append(where)
        elif word.split(".")[0] in FOLDERS:
            path = ROOT / word.replace(".", "/")
            if not (path.is_dir() or path.with_suffix(".py").is_file()):
                wrong.append(where)
    assert not wrong, wrong
    assert seen > 150, "the pattern finds them"


def test_the_commands_that_make_a_secret_make_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deploy/kubernetes").mkdir(parents=True)
    made = 0
    deployed = [one for one in (ROOT / "deploy").rglob("*.*") if one.suffix != ".pyc"]
    for path in [*documents(), *deployed]:
        text = path.read_text()
        assert "openssl rand" not in text, f"{path}: a secret that others may read"
        for file in re.findall(r"kvpool secret ([\w./]+)", text):
            done = CliRunner().invoke(app, ["secret", file])
            assert done.exit_code == 0, f"{path}: {done.output}"
            assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600, path
            Path(file).unlink()
            made += 1
    assert made >= 4


def test_each_claim_names_attacks_that_exist_and_each_attack_has_a_claim() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / CLAIMS).read_text()))
    assert named == {path.stem for path in (ROOT / "tests/attack").glob("test_*.py")}
