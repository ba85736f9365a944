"""Select the changes of an agent that are applied to a fresh copy of its task.

All evaluators that run the agent's work use `filter_patch`. It refuses changes that would affect
the evaluation instead of the work, with reasons for the report:

- the evaluator's own files, paths that conflict with them, and paths under its mounts;
- files by pattern: tests, settings of test runners, code that interpreters load automatically;
- new modules that the tests' interpreter would import instead of a module of the standard library,
  an installed module or a test, or as a package around the tests;
- contents of ``.git``, compiled Python, and links that lead out of the workdir.

Refused paths keep the task's content; the rest of the patch is evaluated unchanged.
"""

import itertools
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import Annotated, NamedTuple

import msgspec

from tugline.evaluators.commands import find_named, find_siblings
from tugline.evaluators.pytest_settings import (
    PYTEST_CONFIGS,
    configures_pytest,
    find_plugins,
    list_plugin_files,
)
from tugline.patch import FileChange, Patch
from tugline.sandbox.base import Content, Mount
from tugline.schema import read_values

_PATTERNS = read_values(Path(__file__).with_name("patterns.toml"))
AUTOLOADED: Sequence[str] = _PATTERNS["autoloaded"]
"""Patterns of code that Python or pytest loads without an import; always refused."""
PYTHON = ("conftest.py", *PYTEST_CONFIGS, ".coveragerc")
"""Configuration of pytest and its plug-ins."""
FOLDERS = ("tests/", "test/")
"""Folders of tests in most languages."""
_PYTHON_TESTS = (*PYTHON, *FOLDERS, "test*.py", "*_test.py")
TESTS: Mapping[str, Sequence[str]] = {"python": _PYTHON_TESTS, **_PATTERNS["tests"]}
"""Test files and settings of test runners, by language."""

BUILT: Sequence[str] = _PATTERNS["built"]
"""Patterns of what builds write, which are protected against an agent's own files only."""
BUILT_HIDDEN = tuple(pattern for pattern in BUILT if pattern.startswith("."))
"""Those of `BUILT` that a general pattern for hidden files would refuse."""

_SHADOWED = sys.stdlib_module_names | {"pytest", "_pytest", "pluggy", "iniconfig", "packaging"}
"""Names of modules that a patch may never add."""

_IMPORTABLE = (".py", ".pyc", ".pyd", ".so")


Patterns = Sequence[Annotated[str, msgspec.Meta(pattern="[^/]")]]
"""Patterns of paths, as an option of an evaluator; see `Rules`."""


class FreshTree(NamedTuple):
    """Files and modules of a fresh copy before a patch is applied; paths are relative."""

    files: frozenset[str] = frozenset()
    """All files, except in ``.git`` and ``node_modules``, and paths of the patch that exist."""
    modules: frozenset[str] = frozenset()
    """Names of modules that are installed for any interpreter, outside of the workdir; with dots in
    namespace packages."""
    import_roots: frozenset[str] = frozenset()
    """Folders of the workdir that are on an interpreter's module search path."""
    wanted: frozenset[str] = frozenset()
    """Names of missing modules that programs outside of the workdir import if they exist."""
    interpreters: frozenset[str] = frozenset()
    """Folders of the workdir that belong to an interpreter, such as virtual environments."""
    settings: Mapping[str, str] = {}
    """Texts of the files that may configure pytest, in the workdir and where the patch has one."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Paths that a patch may not change, besides those that are always refused.

    A pattern without a slash matches the name of a file or folder at any depth; with a slash only
    at its end, the name of a folder; with another slash, a path from the workdir. A pattern that
    matches a folder matches all paths in it. ``*`` also matches slashes.
    """

    trusted: Collection[str] = ()
    """Paths of the evaluator's own files."""
    protected: Sequence[str] = ()
    """Patterns of paths that may not be changed."""
    editable: Sequence[str] = ()
    """Patterns of exceptions from `protected` and from the check of new modules."""
    scripts: Sequence[str] = ()
    """Texts of the evaluator's commands, which may set PYTHONPATH."""
    command: tuple[str, ...] = ()
    """Words of the command that decides; files of the fresh tree that they name are protected."""
    fresh: FreshTree = FreshTree()
    """The tree that the patch is applied to."""
    workdir: PurePath | None = None
    """Absolute path of that tree, for links and mounts; None refuses all absolute links."""
    mounts: Sequence[Mount] = ()
    """The evaluator's mounts."""

    def find_protected(self, path: PurePosixPath) -> str | None:
        """Return the pattern that protects a path; None if there is none or it is editable.

        So is a name that a tool would read in place of a protected file, or with it.
        """
        if find_match(path, self.editable):
            return None
        if pattern := find_match(path, self.protected):
            return pattern
        if str(path) in self.fresh.files and str(path) in find_named(self.command, self.workdir):
            return "named in the command"
        siblings = (each for each in find_siblings(path) if self._protects(each))
        return next(map(str, siblings), None)

    def _protects(self, path: PurePosixPath) -> bool:
        return str(path) in self.trusted or find_match(path, self.protected) is not None

    def list_protected(self) -> list[str]:
        """Return the protected files of the fresh tree, sorted."""
        return sorted(p for p in self.fresh.files if self.find_protected(PurePosixPath(p)))

    def permit_built(self) -> "Rules":
        """Return the rules for what a build of the permitted work writes."""
        protected = tuple(pattern for pattern in self.protected if pattern not in BUILT)
        return msgspec.structs.replace(
            self, protected=protected, editable=(*self.editable, *BUILT_HIDDEN)
        )


def filter_patch(patch: Patch, rules: Rules) -> tuple[Patch, dict[str, str]]:
    """Return the permitted part of a patch, and the refused paths with reasons. Pure."""
    refused: dict[str, str] = {}
    layout = _find_layout(rules)
    for path, change in patch.files.items():
        reason = next(_find_reasons(PurePosixPath(path), change, rules, layout), None)
        if reason is not None:
            refused[path] = reason
    # A file or link that replaces a folder would remove protected files in it.
    replaced = _folders(refused) & {path for path, change in patch.files.items() if change}
    refused |= dict.fromkeys(sorted(replaced - set(refused)), "conflicts with a protected path")
    permitted = {path: change for path, change in patch.files.items() if path not in refused}
    # A folder is removed only with all that it has.
    remaining = _folders({*refused, *(p for p in rules.fresh.files if permitted.get(p, p))})
    for path in remaining & {path for path, change in permitted.items() if change is None}:
        del permitted[path]
    return Patch(permitted, patch.notes), refused


def find_match(path: PurePosixPath, patterns: Iterable[str]) -> str | None:
    """Return the first pattern that matches a path or a folder above it; see `Rules`."""
    parts = path.parts
    for pattern in patterns:
        stripped = pattern.strip("/")
        folders = len(parts) - 1 if pattern.endswith("/") else len(parts)
        if "/" in pattern.rstrip("/"):
            heads = ("/".join(parts[: n + 1]) for n in range(folders))
            if any(fnmatchcase(head, stripped) for head in heads):
                return pattern
        elif any(fnmatchcase(part, stripped) for part in parts[:folders]):
            return pattern
    return None


def apply_patch(
    before: Mapping[str, str], patch: Patch, trusted: Mapping[str, Content]
) -> dict[str, Content]:
    """Merge the task's files, a filtered patch and, with precedence over both, `trusted`.

    None removes a file of the workspace. A file of the task is left out if its path conflicts with
    that of a trusted or changed file.
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
    """Folders and modules of a fresh copy that matter for imports."""

    folders: frozenset[PurePosixPath]
    """All folders with Python files at any depth."""
    test_modules: frozenset[PurePosixPath]
    """Paths of the tests, without suffix."""
    test_folders: frozenset[PurePosixPath]
    """All parent folders of the tests, except the workdir."""
    test_packages: frozenset[PurePosixPath]
    """The workdir, and folders that would become packages of the tests by an ``__init__``."""
    script_roots: frozenset[str]
    """Folders that commands add to the module search path."""
    plugin_files: frozenset[str]
    """Paths, relative to an import root, of plug-ins that commands and settings of pytest name."""


def _find_layout(rules: Rules) -> _Layout:
    paths = {*rules.trusted, *rules.fresh.files}
    python = {PurePosixPath(path) for path in paths if path.endswith(".py")}
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
        frozenset(_find_script_roots(rules)),
        frozenset(
            path
            for plugin in find_plugins(" ".join(rules.scripts), rules.fresh.settings.values())
            for path in list_plugin_files(plugin)
        ),
    )


def _find_reasons(
    path: PurePosixPath, change: FileChange | None, rules: Rules, layout: _Layout
) -> Iterator[str]:
    """Yield the reasons to refuse a change."""
    if str(path) in rules.trusted:
        yield "is a file of the tests"
    folders = _folders(rules.trusted)
    if str(path) in folders or any(path.is_relative_to(own) for own in rules.trusted):
        yield "conflicts with a path of the tests"
    if ".git" in path.parts:
        yield "is in a .git folder"
    if pattern := find_match(PurePosixPath(str(path).lower()), AUTOLOADED):
        yield f"would be loaded automatically ({pattern})"
    if pattern := rules.find_protected(path):
        yield f"is protected ({pattern})"
    yield from _find_effects(path, change, rules, layout)
    if any(path.is_relative_to(mount) for mount in _mounts_inside(rules)):
        yield "is in a folder that the evaluator mounts"
    if change is not None and change.link and not _stays_inside(path, change.data, rules.workdir):
        yield "is a link that leads out of the workdir"


def _find_effects(
    path: PurePosixPath, change: FileChange | None, rules: Rules, layout: _Layout
) -> Iterator[str]:
    """Yield the effects of a change on programs that do not ask for it."""
    if any(path.is_relative_to(folder) for folder in rules.fresh.interpreters):
        yield "is part of an interpreter"
    if not find_match(path, rules.editable):
        if configures_pytest(path, change, rules.fresh.settings.get(str(path))):
            yield "would configure pytest"
        if any(
            str(path.relative_to(root)) in layout.plugin_files
            for root in path.parents
            if _is_import_root(root, rules, layout)
        ):
            yield "is a plug-in of pytest"
    if _is_option(path, rules):
        yield "could be read as a command-line option"
    if shadowed := _find_shadowed(path, change, rules, layout):
        yield f"would be imported in place of {shadowed}"


def _is_option(path: PurePosixPath, rules: Rules) -> bool:
    """Return whether a command that expands ``*`` would take a new file's name for an option."""
    known = str(path) in rules.fresh.files or find_match(path, rules.editable)
    return path.parts[0].startswith("-") and not known


def _folders(paths: Iterable[str]) -> set[str]:
    return {str(up) for path in paths for up in PurePosixPath(path).parents} - {"."}


def _find_shadowed(
    path: PurePosixPath, change: FileChange | None, rules: Rules, layout: _Layout
) -> str | None:
    """Return the module that a new importable file would hide."""
    folder = change is not None and change.folder
    importable = path.suffix in _IMPORTABLE or folder or (change is not None and change.link)
    if not importable or str(path) in rules.fresh.files or find_match(path, rules.editable):
        return None
    stem = path.name.partition(".")[0]
    package = stem == "__init__"
    module = path.parent if package else path.with_name(stem)
    tested = module in layout.test_modules or (module in layout.test_folders and not package)
    if tested and not folder:
        return str(module)
    if package and module in layout.test_packages:
        return "a folder of tests"
    tests = {test.name for test in layout.test_modules}
    hidden = _SHADOWED | rules.fresh.modules | tests
    for root in module.parents:
        names = module.relative_to(root).parts
        if not _is_import_root(root, rules, layout):
            continue
        # A folder without __init__ hides no module, but it is one where there is no other.
        if names[0] in rules.fresh.wanted and not _has_python(root / names[0], rules, layout):
            return names[0]
        if folder:  # hides no module, since it has none
            continue
        if (name := ".".join(names)) in hidden:
            return name
        # A package anywhere on the path takes precedence over a test folder without __init__.
        beside = module not in layout.test_folders and PurePosixPath(name) in layout.test_folders
        if len(names) == 1 and beside:
            return name
    return None


def _has_python(module: PurePosixPath, rules: Rules, layout: _Layout) -> bool:
    """Return whether a fresh copy has this package or module."""
    return module in layout.folders or f"{module}.py" in rules.fresh.files


def _is_import_root(folder: PurePosixPath, rules: Rules, layout: _Layout) -> bool:
    """Return whether the modules in a folder may be top-level modules."""
    if not folder.parts or str(folder) in {*rules.fresh.import_roots, *layout.script_roots}:
        return True
    if folder in layout.folders:
        return f"{folder}/__init__.py" not in rules.fresh.files
    return folder.name == "src"


_PYTHONPATH = re.compile(r"PYTHONPATH[\"']?\s*[=:,]\s*[\"']?([^\s\"';&|]+)")


def _find_script_roots(rules: Rules) -> Iterator[str]:
    """Yield the folders of the workdir that the evaluator's commands add to the search path."""
    for match in itertools.chain(*map(_PYTHONPATH.finditer, rules.scripts)):
        for entry in re.sub(r"\$\{?PWD\}?|\$\(pwd\)", ".", match[1]).split(":"):
            folder = PurePosixPath(entry)
            if folder.is_absolute() and rules.workdir and folder.is_relative_to(rules.workdir):
                folder = folder.relative_to(rules.workdir)
            yield str(folder)


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
    # ".." after a name may follow another link, whose target is unknown.
    ups = next((n for n, part in enumerate(to.parts) if part != ".."), len(to.parts))
    return ups <= len(path.parts) - 1 and ".." not in to.parts[ups:]
