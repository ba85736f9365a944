"""Names are standard technical English: no retired words, few class names with two meanings."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "benchmarks", "tools", "examples", "deploy")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

RETIRED = yaml.safe_load(Path(__file__).with_name("retired.yaml").read_text(encoding="utf-8"))
"""`words` not even as a part of a name, such as in ``_told`` or ``box_of``; `names` not as a whole
name, apart from underscores before it."""
MOST_SHARED = 15
"""Class names that may have more than one definition."""


@functools.cache
def list_nodes(path: Path) -> list[ast.AST]:
    """Every node of a module, parsed once for all tests."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def list_names(path: Path) -> Iterator[tuple[str, int]]:
    """Every name that others can see: classes, functions, parameters, attributes, fields."""
    for node in list_nodes(path):
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.arg(arg=name)
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.AnnAssign(target=ast.Name(id=name))
            ):
                yield name, node.lineno


@functools.cache
def is_retired(name: str) -> bool:
    """Whether a name is, or contains, a retired word."""
    parts = {part.lower() for part in re.findall(r"[a-z]+|[A-Z][a-z]*", name)}
    return name.strip("_") in RETIRED["names"] or not parts.isdisjoint(RETIRED["words"])


def test_no_retired_word_is_an_identifier() -> None:
    """docs/glossary.md has the standard words; all offenders are printed."""
    offenders = []
    for path in SOURCES:
        module = path.relative_to(ROOT).as_posix()
        names = [(part, 0) for part in module.removesuffix(".py").split("/")]
        names += list_names(path)
        offenders += [f"{module}:{line}: {name}" for name, line in names if is_retired(name)]
    assert not offenders, f"{len(offenders)} retired names:\n" + "\n".join(sorted(set(offenders)))


def test_class_names_have_one_definition() -> None:
    """Few classes of the package share a name, so that a reader knows which one is meant."""
    names = Counter(
        node.name
        for path in (ROOT / "src").rglob("*.py")
        for node in list_nodes(path)
        if isinstance(node, ast.ClassDef)
    )
    shared = sorted(name for name, count in names.items() if count > 1)
    assert len(shared) <= MOST_SHARED, f"{len(shared)} shared class names: {', '.join(shared)}"
