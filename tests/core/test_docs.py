"""The documentation says what the code does: links, commands, keys, paths, sentences and floors are held against it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from draftmill import invalidation, reference
from draftmill.cli import app
from draftmill.config import Config
from draftmill.gpu import gate

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "draftmill"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("config/*.md"), *ROOT.glob("envs/*.md")])
FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.M | re.S)
SECTIONS = {name for name in Config.model_fields if hasattr(Config.model_fields[name].annotation, "model_fields")}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def spans(page: Path) -> list[str]:
    """The inline code of a page."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))


def code(page: Path) -> list[str]:
    """All code of a page: inline, and each line of its blocks with comments taken off."""
    text = page.read_text().replace("\\\n", " ")
    lines = [line.split(" #")[0] for block in FENCE.findall(text) for line in block.splitlines()]
    return [*spans(page), *lines]


def rows(page: Path, title: str) -> list[list[str]]:
    """The cells of the rows of the table under a title, without its head."""
    section = page.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    found = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return found[2:]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_every_relative_link_resolves(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pages
def test_every_command_and_option_exists(page: Path) -> None:
    for text in code(page):
        for words in re.findall(r"(?:^|/bin/)draftmill ([a-z][^|;&]*)", text):
            command: Any = typer.main.get_command(app)
            left = words.split()
            while left and hasattr(command, "commands") and re.fullmatch("[a-z]+", left[0]):
                assert left[0] in command.commands, f"draftmill {words}"
                command = command.commands[left.pop(0)]
            known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
            own = f" {' '.join(left)}".partition(" -- ")[0]  # what follows is another program's
            options = [option for option in re.findall(r"--[a-z-]+", own) if option != "--help"]
            assert set(options) <= known, f"draftmill {words}"


@pages
def test_every_make_target_exists(page: Path) -> None:
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.M))
    for text in code(page):
        for target in re.findall(r"^make ([\w./-]+)", text):
            assert target in targets, text


def is_key(dotted: str) -> bool:
    section, *names = dotted.replace("[]", "").split(".")
    model = Config.model_fields[section].annotation
    for name in names:
        fields = getattr(model, "model_fields", {})
        if name not in fields:
            return False
        annotation = fields[name].annotation
        model = next((a for a in getattr(annotation, "__args__", ()) if hasattr(a, "model_fields")), annotation)
    return True


@pages
def test_every_key_exists(page: Path) -> None:
    for span in spans(page):
        found = re.fullmatch(r"((\w+)(?:\.[a-z_]+(?:\[\])?)+)(?:: .*)?", span)
        if found is None or found[2] not in SECTIONS or hasattr(gate, found[1].rpartition(".")[2]):
            continue
        assert is_key(found[1]), span


@pages
def test_every_path_of_the_repository_exists(page: Path) -> None:
    for span in spans(page):
        if re.fullmatch(r"(?:draftmill|rules|scripts|docs|tests|profiles|envs|config)/[\w./-]*", span):
            assert (ROOT / span).exists(), span


def test_the_reference_of_the_configuration_is_current() -> None:
    assert (ROOT / "config/README.md").read_text() == reference.markdown(), "run `make reference`"
    assert (ROOT / "config/schema.json").read_text() == reference.schema(), "run `make reference`"
    assert (ROOT / "docs/invalidation.md").read_text() == invalidation.markdown(), "run `make reference`"


# Sentences ------------------------------------------------------------------------------------------------------------


def pattern(node: ast.expr) -> str:
    """What a text of the code may become, as a regular expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(pattern(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return pattern(node.left) + pattern(node.right)
    return ".*"


def sentences() -> Iterator[str]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                found = pattern(node)
                if len(found.replace(".*", "")) >= 20:
                    yield found


def test_every_quoted_failure_is_a_sentence_of_the_code() -> None:
    patterns = list(sentences())
    quoted = [row[1] for row in rows(ROOT / "README.md", "How it fails")]
    assert len(quoted) >= 10
    assert [text for text in quoted if not any(re.fullmatch(found, text, re.S) for found in patterns)] == []


# Floors ---------------------------------------------------------------------------------------------------------------


def floors() -> dict[str, int]:
    table = rows(ROOT / "docs/architecture.md", "The house")
    return {room.strip("` "): int(floor) for floor, rooms in table for room in rooms.split(" · ")}


def imports(path: Path) -> set[str]:
    """The rooms that a module imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "draftmill":
            inner = (node.module or "").split(".")[1:]
            found |= {inner[0]} if inner else {alias.name for alias in node.names}
    return found - {"__version__"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_a_room_imports_only_from_floors_below() -> None:
    level = floors()
    rooms = {path: room(path) for path in PACKAGE.rglob("*.py") if not room(path).startswith("__")}
    assert set(rooms.values()) == set(level), "the table in docs/architecture.md names every room"
    upward = [
        f"{path.relative_to(ROOT)} imports {other}"
        for path, own in rooms.items()
        for other in imports(path) - {own}
        if level[other] >= level[own]
    ]
    assert upward == []
