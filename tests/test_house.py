"""Rules of the code base that no other tool checks: sizes, complete docs, an installable core."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from config_table import describe
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.commands import run_program, run_python
from tugline import errors
from tugline.cli.app import COMMANDS
from tugline.config import Config
from tugline.plugins import BUILT_IN
from tugline.schema import list_structs

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tugline"
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOCS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXTRAS = ("torch", "transformers", "safetensors", "matplotlib", "ray")
MAX_PAIRS = 60
"""Assignments of several values at once, such as a lower and an upper bound, in all files."""
ALLOWED: dict[str, str] = {}
"""Files that may be longer than the budget, and why."""


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{_name(path)}:{node.name}", (node.end_lineno or 0) - node.lineno + 1


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _docstring_lines(path: Path) -> int:
    docstring = ast.get_docstring(_parse(path))
    return len((docstring or "").splitlines())


# --------------------------------------------------------------------------- sizes
def test_everything_is_within_its_budget() -> None:
    """Files, functions, docstrings and package faces are small; the error lists larger ones."""
    functions = [pair for path in SOURCES for pair in _functions(path)]
    files = [(_name(path), _lines(path)) for path in SOURCES]
    faces = [path for path in SOURCES if path.name == "__init__.py"]
    measured = [
        ("lines in a file", 400, [pair for pair in files if pair[0] not in ALLOWED]),
        ("lines in a function", 60, functions),
        ("lines in a docstring", 25, [(_name(path), _docstring_lines(path)) for path in SOURCES]),
        ("lines in a package face", 60, [(_name(path), _lines(path)) for path in faces]),
    ]
    over = [
        f"{name}: {size} {what}, the budget is {budget}"
        for what, budget, sizes in measured
        for name, size in sizes
        if size > budget
    ]
    longish = sorted(((size, name) for name, size in functions if size > 30), reverse=True)
    if len(longish) > len(functions) / 10:
        over.append(f"{len(longish)} of {len(functions)} functions have over 30 lines: {longish}")
    assert not over, "over budget:\n" + "\n".join(over)


# --------------------------------------------------------------------------- readable lines
def _is_pair(node: ast.AST) -> bool:
    """Whether a statement assigns several values at once, not the same names in another order."""
    match node:
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
            return set(map(ast.unparse, targets)) != set(map(ast.unparse, values))
    return False


def _keeps_arguments(node: ast.stmt) -> bool:
    """Whether a constructor's line keeps at most three arguments, as in `self.x, self.y = x, y`."""
    match node:
        case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)):
            own = all(isinstance(each, ast.Attribute) for each in targets)
            return len(targets) <= 3 and own and all(isinstance(v, ast.Name) for v in values)
    return False


def _pairs(path: Path) -> Iterator[str]:
    arguments: set[ast.AST] = set()
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            arguments.update(
                each for each in node.body if _is_pair(each) and _keeps_arguments(each)
            )
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.stmt) and _is_pair(node) and node not in arguments:
            yield f"{_name(path)}:{node.lineno}: {ast.unparse(node)}"


def test_unrelated_values_are_assigned_on_lines_of_their_own() -> None:
    """Assignments of several values at once are rare: swaps, and pairs such as a start and end."""
    found = [pair for path in SOURCES for pair in _pairs(path)]
    assert len(found) <= MAX_PAIRS, "\n".join(found)


# --------------------------------------------------------------------------- an installable core
def _closure(requirement: Requirement, seen: dict[str, set[str]]) -> None:
    name = requirement.name.lower().replace("_", "-")
    extras = requirement.extras | {""}
    if extras <= seen.get(name, set()):
        return
    seen.setdefault(name, set()).update(extras)
    for text in metadata.requires(name) or ():
        needed = Requirement(text)
        if any(not needed.marker or needed.marker.evaluate({"extra": e}) for e in extras):
            _closure(needed, seen)


def test_a_plain_install_pulls_no_heavy_library() -> None:
    """`pip install tugline` brings neither torch nor ray, by any detour."""
    seen: dict[str, set[str]] = {}
    _closure(Requirement("tugline"), seen)
    assert "starlette" in seen, "the closure was followed"
    assert not seen.keys() & set(EXTRAS)


def test_the_core_works_without_the_extras() -> None:
    """Everything outside inference, trainers, demo and cli can be imported without torch."""
    heavy = {"inference", "trainers", "demo", "cli"}
    parts = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in SOURCES]
    names = [".".join(part).removesuffix(".__init__") for part in parts if part[1] not in heavy]
    modules = [name for name in names if name != "tugline.launch.ray"]
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"  # None there makes import fail
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------- complete docs
def _docs() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in DOCS)


def _configs() -> list[type[Config]]:
    """Configurations that are neither part nor base of others; only their files are imported."""
    models: list[type[object]] = []
    for path in SOURCES:
        if re.search(r"^class \w+\(Config\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            module = importlib.import_module("tugline." + _name(path)[:-3].replace("/", "."))
            own = (each for _, each in inspect.getmembers(module, inspect.isclass))
            models += [each for each in own if each.__module__ == module.__name__]
    configs = [each for each in models if issubclass(each, Config)]
    nested = {
        one
        for each in configs
        for field in msgspec.structs.fields(each)
        for one in list_structs(field.type)
    }
    bases = {base for each in configs for base in each.__bases__}
    return [each for each in configs if each not in nested | bases]


def test_every_config_key_is_documented() -> None:
    """The tables of docs/configuration.md equal those made from the code, without repeated rows."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    tables = re.findall(r"<!-- keys of (\w+) -->\n(.*?)<!-- end -->", page, re.DOTALL)
    models = {model.__name__: model for model in _configs()}
    assert {name for name, _ in tables} == {*models}
    documented: set[str] = set()
    for name, table in tables:
        written = [row for row in table.splitlines() if row.startswith("| `")]
        wanted = [row for row in describe(models[name]) if row not in documented]
        assert written == wanted, "the table should be:\n" + "\n".join(wanted)
        documented.update(written)


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_plugin_is_documented(kind: str) -> None:
    """docs/configuration.md has the name of each built-in plug-in."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert [name for name in BUILT_IN[kind] if f"`{name}`" not in page] == []


def test_every_command_is_documented() -> None:
    """The docs show how each command is called."""
    docs = _docs()
    assert [name for name in COMMANDS if f"tugline {name}" not in docs] == []


def test_every_error_is_documented() -> None:
    """docs/errors.md has each error class and what to do about it."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    names = [name for name, _ in inspect.getmembers(errors, inspect.isclass)]
    assert [name for name in names if f"`{name}`" not in page] == []


def _declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = [Requirement(text) for group in groups for text in group]
    return [requirement for requirement in declared if requirement.name != "tugline"]


def test_the_pinned_versions_are_allowed() -> None:
    """constraints.txt pins each library of pyproject.toml, to a version that it allows."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): version for name, version in (x.split("==") for x in lines)}
    found = [(each, pins.get(canonicalize_name(each.name))) for each in _declared()]
    wrong = [each.name for each, pin in found if pin is None or not each.specifier.contains(pin)]
    assert wrong == []


def test_every_dependency_has_its_reason() -> None:
    """docs/dependencies.md and pyproject.toml name the same libraries."""
    declared = {requirement.name for requirement in _declared()}
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w.-]+)`", page, re.MULTILINE)) == declared


def _anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    """A link to a file of ours has the file, and the heading where it names one."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


def test_every_page_has_its_place() -> None:
    """Each page is in the navigation of the site, once, and on docs/index.md for other readers."""
    places = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    recipes = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("examples/*/README.md")}
    made = {f"docs/reference/{name}.md" for name in ("cli", "keys", "python")}
    others = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert sorted(places) == sorted(pages | recipes | made | others)
    listed = (ROOT / "docs" / "index.md").read_text("utf-8")
    names = {page.removeprefix("docs/") for page in pages - {"docs/index.md"}}
    assert {name for name in names if f"({name})" not in listed} == set()


def test_documented_make_targets_exist() -> None:
    """Each `make` command in the docs has its target in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    typed = set(re.findall(r"(?:^|`|\$ )make ([a-z][a-z0-9-]*)", _docs(), re.MULTILINE))
    assert {"demo", "test"} <= typed
    assert typed <= targets


# --------------------------------------------------------------------------- tests
def test_markers_are_applied_where_a_test_is() -> None:
    """`conftest.py` does not import a file without the marker; two markers are in helpers, too."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    names = {line.partition(":")[0] for line in options["markers"]} - {"podman", "nightly"}
    applied = re.compile(rf"pytest\.mark\.({'|'.join(names)})\b")
    files = [path for path in (ROOT / "tests").rglob("*.py") if applied.search(path.read_text())]
    assert len(files) > len(names)
    assert [path.name for path in files if not path.match("test_*.py")] == []


# --------------------------------------------------------------------------- nothing private
def test_no_path_of_one_machine_is_committed() -> None:
    """Tracked files name no home, work or root folder of their author."""
    listed = run_program("git", "ls-files", "-z", cwd=ROOT, check=True)
    private = re.compile(r"(?<![\w.])/(?:work|root|Users|home/\w+|tmp/exp)/")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in {".png", ".safetensors"} or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{name}: {hit.group()}" for hit in private.finditer(text)]
    assert not found
