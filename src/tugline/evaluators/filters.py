"""Decide which of an agent's changes are applied to a fresh copy of its task.

The one place for every evaluator that runs the agent's work. `filter_patch` refuses what would
change the evaluation instead of the work, and gives the reason for the report:

- the evaluator's own files, anything that stands in their way or lies under its mounts;
- files by pattern: tests, settings of test runners, code that interpreters load by themselves;
- modules that the tests' interpreter would import although the fresh copy does not have them: in
  place of the standard library's, an installed one or a test, or as a package around the tests;
- contents of ``.git``, compiled Python, and links that lead out of the workdir.

Refused paths stay as the task has them; the rest of the patch is evaluated as it is.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import Annotated, NamedTuple

import msgspec

from tugline.sandbox.base import Content, Mount
from tugline.sandbox.patch import FileChange, Patch
from tugline.schema import read_values

_PATTERNS = read_values(Path(__file__).with_name("patterns.toml"))
AUTOLOADED: Sequence[str] = _PATTERNS["autoloaded"]
"""Code that Python runs, or pytest loads as a plug-in, without any import; always refused."""
PYTEST_CONFIGS: Mapping[str, str] = _PATTERNS["pytest_configs"]
"""Files at the top of a task, and the section that makes each a configuration of pytest."""
PYTHON = ("conftest.py", *PYTEST_CONFIGS, ".coveragerc")
"""Configuration of pytest and its plug-ins."""
FOLDERS = ("tests/", "test/")
"""Folders of tests in most languages."""
_PYTHON_TESTS = (*PYTHON, *FOLDERS, "test*.py", "*_test.py")
TESTS: Mapping[str, Sequence[str]] = {"python": _PYTHON_TESTS, **_PATTERNS["tests"]}
"""Test files and settings of test runners, by language."""

_SHADOWED = sys.stdlib_module_names | {"pytest", "_pytest", "pluggy", "iniconfig", "packaging"}
"""Names of modules that a patch may not add, whatever is installed."""

_IMPORTABLE = (".py", ".pyc", ".pyd", ".so")


Patterns = Sequence[Annotated[str, msgspec.Meta(pattern="[^/]")]]
"""Patterns of paths, as an option of an evaluator; see `Rules`."""


class FreshTree(NamedTuple):
    """What a fresh copy of the task has before a patch is applied; paths are relative."""

    files: frozenset[str] = frozenset()
    """All Python files, and those paths of the patch that exist."""
    modules: frozenset[str] = frozenset()
    """Names of the modules that are installed for any interpreter, outside of the workdir."""
    import_roots: frozenset[str] = frozenset()
    """Folders of the workdir that an interpreter imports from."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Which paths a patch may not change, besides those that are always refused.

    A pattern without a slash fits the name of a file or of a folder at any depth (with one at the
    end, of a folder only); with a slash elsewhere it fits from the workdir downwards. What fits a
    folder fits all that is in it. ``*`` also fits slashes.
    """

    trusted: Collection[str] = ()
    """Paths of the evaluator's own files."""
    protected: Sequence[str] = ()
    """Patterns of paths."""
    editable: Sequence[str] = ()
    """Patterns of paths that may be changed although they are `protected`."""
    fresh: FreshTree = FreshTree()
    """What the patch will be applied to."""
    workdir: PurePath | None = None
    """Where the patch will be applied, for links and mounts; None: no link may be absolute."""
    mounts: Sequence[Mount] = ()
    """The evaluator's own."""

    def find_protected(self, path: PurePosixPath) -> str | None:
        """Return the pattern that protects a path, unless it is editable."""
        return None if find_match(path, self.editable) else find_match(path, self.protected)


def filter_patch(patch: Patch, rules: Rules) -> tuple[Patch, dict[str, str]]:
    """Return what may be applied, and the paths that `rules` refuse, each with the reason. Pure."""
    refused: dict[str, str] = {}
    layout = _find_layout(rules)
    for path, change in patch.files.items():
        reason = next(_find_reasons(PurePosixPath(path), change, rules, layout), None)
        if reason is not None:
            refused[path] = reason
    # A file or link in the place of a folder would take away what must stay in there.
    stands = _folders(refused) & {path for path, change in patch.files.items() if change}
    refused |= dict.fromkeys(
        sorted(stands - set(refused)), "stands in the way of what is protected"
    )
    kept = {path: change for path, change in patch.files.items() if path not in refused}
    return Patch(kept, patch.notes), refused


def find_match(path: PurePosixPath, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches a path or a folder above it; see `Rules`."""
    parts = path.parts
    for pattern in patterns:
        bare = pattern.strip("/")
        folders = len(parts) - 1 if pattern.endswith("/") else len(parts)
        if "/" in pattern.rstrip("/"):
            heads = ("/".join(parts[: n + 1]) for n in range(folders))
            if any(fnmatchcase(head, bare) for head in heads):
                return pattern
        elif any(fnmatchcase(part, bare) for part in parts[:folders]):
            return pattern
    return None


def apply_patch(
    before: Mapping[str, str], patch: Patch, trusted: Mapping[str, Content]
) -> dict[str, Content]:
    """Merge the task's files, a filtered patch and, over both, `trusted`.

    None removes a file of the workspace. A file of the task that conflicts with a trusted or a
    changed one is left out.
    """
    result: dict[str, Content] = {**trusted}
    folders = _folders(trusted)
    gone = {path: None for path, change in patch.files.items() if change is None}
    for layer in (patch.files, {p: text for p, text in before.items() if p not in gone}, gone):
        for path, content in layer.items():
            above = (str(up) for up in PurePosixPath(path).parents)
            if path in {*result, *folders} or any(up in result for up in above):
                continue
            if content is not None or layer is gone:
                result[path] = content
                folders |= _folders([path]) if content is not None else set()
    return result


class _Layout(NamedTuple):
    """Where a fresh copy has modules, those of the tests above all."""

    folders: frozenset[PurePosixPath]
    """All folders with Python files."""
    test_modules: frozenset[PurePosixPath]
    """Paths of the tests, without suffix."""
    test_folders: frozenset[PurePosixPath]
    """The folders around the tests, but for the workdir."""
    test_packages: frozenset[PurePosixPath]
    """The workdir, and folders that become packages of the tests with an ``__init__``."""


def _find_layout(rules: Rules) -> _Layout:
    paths = (PurePosixPath(path) for path in {*rules.trusted, *rules.fresh.files})
    python = {path for path in paths if path.suffix == ".py"}
    tests = [p for p in python if str(p) in rules.trusted or find_match(p, rules.protected)]
    packages = {PurePosixPath(), *(test.parent for test in tests)}  # pytest imports the top's
    for inner in sorted(python, key=lambda path: -len(path.parts)):
        if inner.name == "__init__.py" and inner.parent in packages:
            packages.add(inner.parent.parent)
    return _Layout(
        frozenset(up for path in python for up in path.parents),
        frozenset(test.with_suffix("") for test in tests),
        frozenset(up for test in tests for up in test.parents if up.parts),
        frozenset(packages),
    )


def _find_reasons(
    path: PurePosixPath, change: FileChange | None, rules: Rules, layout: _Layout
) -> Iterator[str]:
    """Yield the reasons to refuse a change."""
    if str(path) in rules.trusted:
        yield "belongs to the tests"
    folders = _folders(rules.trusted)
    if str(path) in folders or any(path.is_relative_to(own) for own in rules.trusted):
        yield "stands in the way of the tests"
    if ".git" in path.parts:
        yield "belongs to git"
    if unasked := find_match(path, AUTOLOADED):
        yield f"would be loaded automatically ({unasked})"
    if pattern := rules.find_protected(path):
        yield f"is protected ({pattern})"
    if shadowed := _find_shadowed(path, change, rules, layout):
        yield f"would be imported in place of {shadowed}"
    if any(path.is_relative_to(place) for place in _mounts_inside(rules)):
        yield "lies where the evaluator puts its own files"
    if change is not None and change.link and not _stays_inside(path, change.data, rules.workdir):
        yield "is a link that leads out of the workdir"


def _folders(paths: Iterable[str]) -> set[str]:
    return {str(up) for path in paths for up in PurePosixPath(path).parents} - {"."}


def _find_shadowed(
    path: PurePosixPath, change: FileChange | None, rules: Rules, layout: _Layout
) -> str | None:
    """Return the module that a new importable file would hide."""
    importable = path.suffix in _IMPORTABLE or (change is not None and change.link)
    if not importable or str(path) in rules.fresh.files or find_match(path, rules.editable):
        return None
    stem = path.name.partition(".")[0]
    # A folder without __init__ hides nothing: a module anywhere else on the path comes before it.
    package = stem == "__init__"
    module = path.parent if package else path.with_name(stem)
    if module in layout.test_modules or (module in layout.test_folders and not package):
        return str(module)
    if package and module in layout.test_packages:
        return "a folder of tests"
    if not _is_import_root(module.parent, rules.fresh, layout):
        return None
    tests = {test.name for test in layout.test_modules}
    hidden = module.name in _SHADOWED | rules.fresh.modules | tests
    # A package anywhere on the path comes before a folder of tests without __init__.
    beside = module not in layout.test_folders and PurePosixPath(module.name) in layout.test_folders
    return module.name if hidden or beside else None


def _is_import_root(folder: PurePosixPath, fresh: FreshTree, layout: _Layout) -> bool:
    """Return whether modules may be imported from a folder by their bare names."""
    if not folder.parts or str(folder) in fresh.import_roots:
        return True
    if folder in layout.folders:
        return f"{folder}/__init__.py" not in fresh.files
    return folder.name == "src"


def _mounts_inside(rules: Rules) -> Iterable[PurePosixPath]:
    """Return the evaluator's mounts that lie in the workdir, relative to it."""
    for mount in rules.mounts:
        target = PurePosixPath(mount.target)
        if rules.workdir is not None and target.is_relative_to(rules.workdir):
            yield target.relative_to(rules.workdir)


def _stays_inside(path: PurePosixPath, target: bytes, workdir: PurePath | None) -> bool:
    """Return whether a link leads to a path in the workdir, also through other such links."""
    to = PurePosixPath(target.decode(errors="surrogateescape"))
    if to.is_absolute():
        if workdir is None or not to.is_relative_to(workdir):
            return False
        return ".." not in to.relative_to(workdir).parts
    # ".." after a name may come after another link, and then leads who knows where.
    ups = next((n for n, part in enumerate(to.parts) if part != ".."), len(to.parts))
    return ups <= len(path.parts) - 1 and ".." not in to.parts[ups:]
