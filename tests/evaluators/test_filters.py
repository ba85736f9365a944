"""Which changes of a patch are applied, and which are refused."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from tugline.evaluators.filters import (
    PYTHON,
    TESTS,
    FreshTree,
    Rules,
    apply_patch,
    filter_patch,
    find_match,
)
from tugline.patch import FileChange, Patch
from tugline.sandbox.base import Mount
from tugline.schema import read_values

RULES = Rules(
    trusted=["tests/test_bill.py"],
    protected=(*PYTHON, "data/*.lock"),
    fresh=FreshTree(
        frozenset({"types/__init__.py", "tests/x.py", "src/calc.py", "pkg/__init__.py"}),
        frozenset({"numpy", "google", "google.protobuf"}),
        wanted=frozenset({"org", "pkg"}),
        interpreters=frozenset({"venv"}),
    ),
    scripts=["cd /x; export PYTHONPATH=/elsewhere:$PWD/lib"],
    workdir=PurePosixPath("/workspace"),
    mounts=[Mount("/workspace/verifier", "/srv/verifier"), Mount("/tests")],
)
TEXT = FileChange(b"x = 1\n")
PATHS = read_values(Path(__file__).with_name("paths.toml"))
REFUSED: dict[str, str] = PATHS["refused"]


@pytest.mark.parametrize("path", REFUSED)
@pytest.mark.parametrize("change", [TEXT, None], ids=["written", "removed"])
def test_changes_to_protected_paths_are_refused(path: str, change: FileChange | None) -> None:
    """Neither writing nor removing is allowed; the rest of the patch is kept."""
    kept, refused = filter_patch(Patch({path: change, "bill.py": TEXT}, ("a note",)), RULES)
    assert kept == Patch({"bill.py": TEXT}, ("a note",))
    assert list(refused) == [path]
    assert REFUSED[path] in refused[path]


def test_other_paths_are_kept() -> None:
    """Names that only look alike, modules below the top and other languages' files are kept."""
    patch = Patch(dict.fromkeys(PATHS["kept"], TEXT))
    assert filter_patch(patch, RULES) == (patch, {})


@pytest.mark.parametrize(("path", "target", "stays"), [*PATHS["links"], ("a", "b/\udcff", True)])
def test_links_stay_in_the_workdir(path: str, target: str, stays: bool) -> None:  # noqa: FBT001
    """A link is applied if it cannot lead out, by itself or through another link."""
    link = FileChange(target.encode(errors="surrogateescape"), link=True)
    kept, refused = filter_patch(Patch({path: link}), RULES)
    assert (path in kept.files, path in refused) == (stays, not stays)


def test_a_link_that_shadows_a_module_is_refused() -> None:
    """A link named json, which could lead to a folder of any name, would be imported as json."""
    patch = Patch({"json": FileChange(b"mine", link=True), "jason": FileChange(b"mine", link=True)})
    assert filter_patch(patch, RULES)[1] == {"json": "would be imported in place of json"}


@pytest.mark.parametrize("change", [TEXT, FileChange(b"mine", link=True)], ids=["file", "link"])
def test_a_folder_with_protected_files_is_not_replaced(change: FileChange) -> None:
    """A file in place of the folder, which would remove all its tests at once, is refused."""
    rules = Rules(protected=["test_*.py"])
    patch = Patch({"a/b/test_x.py": None, "a/b/x.py": None, "a/b": change, "c": change})
    kept, refused = filter_patch(patch, rules)
    assert list(refused) == ["a/b/test_x.py", "a/b"]
    assert list(kept.files) == ["a/b/x.py", "c"]


def test_absolute_links_are_refused_without_a_workdir() -> None:
    """Without a known workdir, a link to /workspace may lead anywhere and is refused."""
    patch = Patch({"a": FileChange(b"/workspace/b", link=True)})
    assert "leads out" in filter_patch(patch, Rules())[1]["a"]


def test_editable_paths_are_not_protected() -> None:
    """A task may allow changes of a project's settings, but never of trusted files."""
    rules = Rules(protected=PYTHON, editable=["pyproject.toml"], trusted=["a/pyproject.toml"])
    patch = Patch({"pyproject.toml": TEXT, "a/pyproject.toml": TEXT, "tox.ini": TEXT})
    assert list(filter_patch(patch, rules)[1]) == ["a/pyproject.toml", "tox.ini"]


@pytest.mark.parametrize(("path", "pattern", "matches"), PATHS["patterns"])
def test_patterns_match_as_documented(path: str, pattern: str, matches: bool) -> None:  # noqa: FBT001
    """A pattern is a name at any depth, a folder, or a path relative to the workdir."""
    assert (find_match(PurePosixPath(path), [pattern]) == pattern) is matches


def test_a_folder_is_removed_only_with_all_that_it_has() -> None:
    """A folder with a protected file, or with one that the patch does not name, stays."""
    fresh = FreshTree(frozenset({"a/test_x.py", "a/x.py", "b/y.py", "b/z.py", "c/v.py"}))
    rules = Rules(protected=["test_*.py"], fresh=fresh)
    gone = ["a", "a/test_x.py", "a/x.py", "b", "b/y.py", "c", "c/v.py", "d"]
    kept, refused = filter_patch(Patch(dict.fromkeys(gone)), rules)
    assert list(kept.files) == ["a/x.py", "b/y.py", "c", "c/v.py", "d"]
    assert list(refused) == ["a/test_x.py"]


def test_an_empty_folder_is_no_module() -> None:
    """An empty folder is refused only where an import would find it, as with `org`."""
    folder = FileChange(b"", folder=True)
    patch = Patch(dict.fromkeys(["logs", "json", "html", "src/data", "org", "org/python"], folder))
    kept, refused = filter_patch(patch, RULES)
    assert list(kept.files) == ["logs", "json", "html", "src/data"]
    assert refused == dict.fromkeys(["org", "org/python"], "would be imported in place of org")


@pytest.mark.parametrize("language", TESTS)
def test_languages_protect_tests_and_settings(language: str) -> None:
    """Tests as runners find them, their helpers and settings, and build outputs are protected."""
    paths = PATHS["languages"][language]
    patch = Patch(dict.fromkeys((*paths["refused"], *paths["kept"]), TEXT))
    kept, refused = filter_patch(patch, Rules(protected=TESTS[language]))
    assert set(refused) == set(paths["refused"])
    assert list(kept.files) == paths["kept"]


# A file, and names that its tool reads in place of it or with it.
TOOLS = {
    "Makefile": ["GNUmakefile", "makefile"],
    "makefile": ["GNUmakefile"],
    "justfile": [".justfile", "Justfile", "JUSTFILE"],
    "Taskfile.dist.yml": ["Taskfile.yml", "taskfile.yml", "Taskfile.yaml"],
    "setup.cfg": ["tox.ini", "pytest.ini", "pyproject.toml", ".pytest.toml", "conftest.py"],
    "tox.ini": ["setup.cfg", "pyproject.toml", "pytest.ini", "tox.toml"],
    "jest.config.js": ["jest.config.ts", "jest.config.mjs", "jest.config.json", "package.json"],
    "vitest.config.ts": ["vitest.config.mjs", "vite.config.ts", "vitest.workspace.json"],
    ".mocharc.yml": [".mocharc.js", ".mocharc.cjs", ".mocharc.json", "package.json"],
    "meson.build": ["meson.options", "meson_options.txt"],
    "CMakeLists.txt": ["CMakePresets.json", "CMakeUserPresets.json", "CTestCustom.cmake"],
    "CMakePresets.json": ["CMakeUserPresets.json"],
    "build.ninja": [".ninja_deps", ".ninja_log"],
    "build.gradle.kts": ["build.gradle", "settings.gradle", "gradle.properties", "buildSrc/a.kt"],
    "build.gradle": ["build.gradle.kts"],
    "pom.xml": [".mvn/extensions.xml"],
    "dune-project": ["dune-workspace", "dune"],
    "go.mod": ["go.work", "vendor/modules.txt"],
    "Cargo.toml": [".cargo/config.toml", "build.rs", "rust-toolchain"],
    "Rakefile": ["rakefile"],
    "phpunit.xml.dist": ["phpunit.xml", "phpunit.dist.xml"],
    "package-lock.json": ["npm-shrinkwrap.json"],
    "Package.swift": ["Package@swift-5.10.swift"],
    "nuget.config": ["NuGet.Config", "Directory.Build.rsp"],
    "BUILD": ["BUILD.bazel"],
    "docker-compose.yml": ["compose.yaml", "docker-compose.override.yml"],
}


@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.parametrize("folder", ["", "sub/"])
def test_names_that_a_tool_prefers_are_protected_with_the_name(name: str, folder: str) -> None:
    """Only names beside a protected file, or beside a file of the tests, are protected."""
    others = [f"{folder}{other}" for other in TOOLS[name]]
    patch = Patch(dict.fromkeys([*others, f"else/{TOOLS[name][0]}", "bill.txt"], TEXT))
    for rules in (Rules(protected=[f"/{folder}{name}"]), Rules(trusted=[f"{folder}{name}"])):
        kept, refused = filter_patch(patch, rules)
        assert [*refused] == others
        assert [*kept.files] == [f"else/{TOOLS[name][0]}", "bill.txt"]
    rules = Rules(protected=[name], editable=others)
    assert not set(filter_patch(patch, rules)[1]) & set(others)


def test_a_name_that_a_tool_prefers_less_is_not_protected() -> None:
    """A Makefile may be changed, since make prefers a GNUmakefile, which is protected."""
    rules = Rules(protected=["GNUmakefile", "makefile"])
    assert filter_patch(Patch({"Makefile": TEXT}), rules)[1] == {}


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["sh", "ci/run.sh"], ["ci/run.sh"]),
        (
            ["sh", "-c", "set -e; ./ci/run.sh>{report} && python3 check.py;"],
            ["ci/run.sh", "check.py"],
        ),
        (["sh", "-c", "make -f ci.mk test"], ["ci.mk"]),
        (["sh", "-c", "make --file=ci.mk"], ["ci.mk"]),
        (["sh", "-c", "cd ci && bash 'run.sh'"], ["ci/run.sh"]),
        (["sh", "-c", "make -C ci -f run.sh"], ["ci/run.sh"]),
        (["node", "/workspace/check.py"], ["check.py"]),
        (["sh", "-c", "python3 new.py && cc -o t calc.c && ./t"], []),
        (["sh", "-c", "if true\nthen timeout 60 bash -c 'python3 check.py'\nfi"], ["check.py"]),
        (["sh", "-c", "A=1 exec python3 -m pytest check.py"], ["check.py"]),
        (["sh", "-c", "! [ -e bill.py ]\ncat bill.py | diff - check.py"], []),
        (["sh", "-c", "make 'it", "ci.mk"], ["ci.mk"]),
    ],
)
def test_files_that_the_command_names_are_protected(command: list[str], named: list[str]) -> None:
    """Files of the fresh tree that the command runs are protected, not sources and new files."""
    files = ["ci/run.sh", "check.py", "ci.mk", "calc.c", "bill.py"]
    fresh = FreshTree(frozenset(files))
    workdir = PurePosixPath("/workspace")
    rules = Rules(command=tuple(command), fresh=fresh, workdir=workdir)
    patch = Patch(dict.fromkeys([*files, "new.py"], TEXT))
    assert set(filter_patch(patch, rules)[1]) == set(named)
    lax = Rules(command=tuple(command), fresh=fresh, workdir=workdir, editable=named)
    assert filter_patch(patch, lax)[1] == {}


def test_apply_patch_resolves_conflicts() -> None:
    """Trusted files win over the patch, the patch over the task's files; removals are kept."""
    before = {"bill.py": "old", "lib": "a file", "kept": "k", "gone": "g", "pkg/a.py": "a"}
    patch = Patch(
        {"bill.py": TEXT, "lib": None, "lib/x.py": TEXT, "gone": None, "of_the_base": None}
        | {"pkg": TEXT, "pkg/a.py": None, "hidden": TEXT}
    )
    assert apply_patch(before, patch, {"hidden/test.py": "t"}) == {
        "hidden/test.py": "t",
        "bill.py": TEXT,
        "lib/x.py": TEXT,
        "pkg": TEXT,
        "kept": "k",
        "gone": None,
        "of_the_base": None,
    }
