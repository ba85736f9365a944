"""Which of an agent's changes are laid over a fresh copy of its task, and which never are.

One place for every evaluator that runs the agent's work. `sift` refuses what would change the judge
instead of the work, and says why, for the report:

- the evaluator's own files, whatever stands in their way, and what lies under its mounts;
- files by pattern: tests, the settings of test runners, code that interpreters load unasked;
- names that would be imported in place of the standard library's or the test runner's own;
- the insides of ``.git``, compiled Python, and links that lead out of the workdir.

What is refused is left as the task has it; the rest of the patch is judged as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath, PurePosixPath
from typing import NamedTuple

import msgspec

from tugline.errors import ConfigError
from tugline.sandbox.base import Content, Mount
from tugline.sandbox.patch import FileChange, Patch

LOADED_UNASKED = (
    "sitecustomize.*",
    "sitecustomize/",
    "usercustomize.*",
    "usercustomize/",
    "site-packages/",
    "dist-packages/",
    "*.egg-link",
    "*.egg-info",
    "*.dist-info",
    "__pycache__/",
    "*.pyc",
)
"""What Python runs, or pytest loads as a plug-in, without any import in the work; never laid on."""

PYTHON = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
)
"""What configures pytest."""

FOLDERS = ("tests/", "test/")
"""Where tests and what they import lie, in most languages."""

_SCRIPTS = ("test", "spec", "*-test", "*_test", "test-*")
"""Whole names that ``node --test`` and Jest take for tests."""

TESTS: dict[str, tuple[str, ...]] = {
    "python": (*PYTHON, *FOLDERS, "test*.py", "*_test.py"),
    "go": ("*_test.go", "testdata/", "vendor/", "go.mod", "go.sum", "go.work*"),
    "rust": (*FOLDERS, "Cargo.toml", ".cargo/", "build.rs", "rust-toolchain*"),
    "java": (
        *("src/test/*", "*/src/test/*", "pom.xml", ".mvn/", "mvnw*"),
        *("*.gradle", "*.gradle.kts", "gradle/", "gradlew*", "gradle.properties", "buildSrc/"),
    ),
    "node": (
        *FOLDERS,
        *("*.test.*", "*.spec.*", "__tests__/", "__mocks__/"),
        *(f"{name}.{end}" for name in _SCRIPTS for end in ("?s", "?s?", "??s")),
        *("node_modules/", "package.json", ".npmrc", "jest.config.*", "jest.setup.*"),
        *("vitest.config.*", "vitest.workspace.*", "vite.config.*"),
        *(".mocharc*", "babel.config.*", ".babelrc*"),
    ),
    "tap": ("*.bats", "*.t", "/t/"),
}
"""Test files and settings of test runners, by language."""

SHADOWED = sys.stdlib_module_names | {"pytest", "_pytest", "pluggy", "iniconfig", "packaging"}
"""Names of modules that a patch may not bring along."""

_IMPORTABLE = (".py", ".pyc", ".pyd", ".so")


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What may not be laid on, besides what never is.

    A pattern without a slash fits the name of a file or of a folder at any depth (with one at the
    end, of a folder only); with a slash elsewhere it fits from the workdir downwards. What fits a
    folder fits all that is in it. ``*`` also fits slashes.
    """

    trusted: Collection[str] = ()
    """Paths of files that the evaluator lays on itself."""
    protected: Sequence[str] = ()
    """Patterns."""
    editable: Sequence[str] = ()
    """Patterns of what may be changed although it is `protected`."""
    known: Collection[str] = ()
    """What is in the workdir anyway, by names at its top or by whole paths: changing those shadows
    nothing new. See `shadowing`."""
    workdir: PurePath | None = None
    """Where it will be laid on, for links and mounts; None: no link may be absolute."""
    mounts: Sequence[Mount] = ()
    """The evaluator's own."""


class FilteredPatch(NamedTuple):
    """A patch that may be laid on, and the paths that were refused, each with the reason."""

    patch: Patch
    refused: dict[str, str]


def sift(patch: Patch, rules: Rules) -> FilteredPatch:
    """Divide a patch. Pure; the reasons are short sentences for people."""
    refused: dict[str, str] = {}
    for path, change in patch.files.items():
        reason = next(_reasons(PurePosixPath(path), change, rules), None)
        if reason is not None:
            refused[path] = reason
    # A file or link in the place of a folder would take away what must stay in there.
    stands = _folders(refused) & {path for path, change in patch.files.items() if change}
    refused |= dict.fromkeys(
        sorted(stands - set(refused)), "stands in the way of what is protected"
    )
    kept = {path: change for path, change in patch.files.items() if path not in refused}
    return FilteredPatch(Patch(kept, patch.notes), refused)


def shadowing(patch: Patch) -> list[str]:
    """Paths of a patch that would be refused for their names if they were new."""
    paths = [PurePosixPath(path) for path in patch.files]
    named = (
        (path, {path.parts[0].partition(".")[0], path.name.partition(".")[0]}) for path in paths
    )
    return [str(path) for path, names in named if names & SHADOWED]


def matches(path: PurePosixPath, patterns: Iterable[str]) -> str | None:
    """The first pattern that fits a path or one of the folders above it; see `Rules`."""
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


def check_patterns(option: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """Patterns as given. Raises `ConfigError` naming the option for what is none."""
    if isinstance(patterns, str) or not all(isinstance(p, str) and p.strip("/") for p in patterns):
        msg = f"{option} is {patterns!r}, must be a list of patterns such as 'conftest.py'"
        raise ConfigError(msg)
    return tuple(patterns)


def laid(
    before: Mapping[str, str], patch: Patch, trusted: Mapping[str, Content]
) -> dict[str, Content]:
    """What to put into a new box: the task's files, the sifted patch, and `trusted` over all.

    None takes away what the workspace has there. A file of the task that cannot stand beside a
    trusted or a changed one gives way.
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


def _reasons(path: PurePosixPath, change: FileChange | None, rules: Rules) -> Iterator[str]:
    """Why it is refused; the first is told."""
    if str(path) in rules.trusted:
        yield "belongs to the tests"
    folders = _folders(rules.trusted)
    if str(path) in folders or any(path.is_relative_to(own) for own in rules.trusted):
        yield "stands in the way of the tests"
    if ".git" in path.parts:
        yield "belongs to git"
    if unasked := matches(path, LOADED_UNASKED):
        yield f"would be loaded unasked ({unasked})"
    pattern = matches(path, rules.protected)
    if pattern and not matches(path, rules.editable):
        yield f"is protected ({pattern})"
    if shadowed := _shadowed(path, change, rules):
        yield f"would be imported in place of {shadowed}"
    if any(path.is_relative_to(place) for place in _inside(rules)):
        yield "lies where the evaluator puts its own files"
    if change is not None and change.link and not _stays(path, change.data, rules.workdir):
        yield "is a link that leads out of the workdir"


def _folders(paths: Iterable[str]) -> set[str]:
    return {str(up) for path in paths for up in PurePosixPath(path).parents} - {"."}


def _shadowed(path: PurePosixPath, change: FileChange | None, rules: Rules) -> str | None:
    """The module that a new name would hide: at the top, or beside the tests, is where it could."""
    if str(path) in rules.known:
        return None
    # A folder without __init__ hides nothing: a module anywhere else on the path comes before it.
    place = path.parent if path.name.partition(".")[0] == "__init__" else path
    name = place.name.partition(".")[0]
    importable = path.suffix in _IMPORTABLE or (change is not None and change.link)
    if name not in SHADOWED or not importable:
        return None
    if len(place.parts) == 1:
        return None if place.name in rules.known else name
    return name if place.parent in {PurePosixPath(own).parent for own in rules.trusted} else None


def _inside(rules: Rules) -> Iterable[PurePosixPath]:
    """The evaluator's mounts that lie in the workdir, relative to it."""
    for mount in rules.mounts:
        target = PurePosixPath(mount.target)
        if rules.workdir is not None and target.is_relative_to(rules.workdir):
            yield target.relative_to(rules.workdir)


def _stays(path: PurePosixPath, target: bytes, workdir: PurePath | None) -> bool:
    """Whether a link leads to a place in the workdir, also by way of other such links."""
    to = PurePosixPath(target.decode(errors="surrogateescape"))
    if to.is_absolute():
        if workdir is None or not to.is_relative_to(workdir):
            return False
        return ".." not in to.relative_to(workdir).parts
    # ".." after a name may come after another link, and then leads who knows where.
    ups = next((n for n, part in enumerate(to.parts) if part != ".."), len(to.parts))
    return ups <= len(path.parts) - 1 and ".." not in to.parts[ups:]
