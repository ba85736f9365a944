from __future__ import annotations

from pathlib import PurePosixPath

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
from tugline.sandbox.base import Mount
from tugline.sandbox.patch import FileChange, Patch

RULES = Rules(
    trusted=["tests/test_bill.py"],
    protected=(*PYTHON, "data/*.lock"),
    fresh=FreshTree(
        frozenset({"types/__init__.py", "tests/x.py", "src/calc.py"}), frozenset({"numpy"})
    ),
    workdir=PurePosixPath("/workspace"),
    mounts=[Mount("/workspace/verifier", "/srv/verifier"), Mount("/tests")],
)
TEXT = FileChange(b"x = 1\n")
REFUSED: dict[str, str] = {
    "tests/test_bill.py": "belongs to the tests",
    "tests": "stands in the way",
    "tests/test_bill.py/x": "stands in the way",
    ".git/config": "belongs to git",
    "sub/.git": "belongs to git",
    "src/sitecustomize.py": "loaded automatically",
    "sitecustomize/__init__.py": "loaded automatically",
    "usercustomize.cpython-311-x86_64-linux-gnu.so": "loaded automatically",
    "lib/site-packages/evil.pth": "loaded automatically",
    "venv/lib/python3.11/site-packages/_pytest/runner.py": "loaded automatically",
    "evil.egg-info/entry_points.txt": "loaded automatically",
    "evil-1.dist-info/entry_points.txt": "loaded automatically",
    "tests/__pycache__/test_bill.cpython-311.pyc": "loaded automatically",
    "deep/er/conftest.py": "protected (conftest.py)",
    "setup.cfg": "protected (setup.cfg)",
    "data/deep/x.lock": "protected (data/*.lock)",
    "pytest.py": "in place of pytest",
    "_pytest/__init__.py": "in place of _pytest",
    "json/__init__.py": "in place of json",
    "random.so": "in place of random",
    "numpy.py": "in place of numpy",
    "src/numpy/__init__.py": "in place of numpy",
    "src/json.py": "in place of json",
    "tests/test_bill/__init__.py": "in place of tests/test_bill",
    "tests/test_bill.abi3.so": "in place of tests/test_bill",
    "tests.py": "in place of tests",
    "src/tests/__init__.py": "in place of tests",
    "tests/__init__.py": "in place of a folder of tests",
    "tests/inspect.py": "in place of inspect",
    "verifier/reward.txt": "evaluator puts its own",
}
KEPT = (
    *("bill.py", "types/new.py", "types/json.py", "tests/data.txt", "gitignore", "a.lock"),
    # No module: other languages and data may have any name.
    *("queue.js", "html/index.html", "token.txt", "json/data.json", "http/server.go", "model.pth"),
)


@pytest.mark.parametrize("path", REFUSED)
@pytest.mark.parametrize("change", [TEXT, None], ids=["written", "removed"])
def test_what_changes_the_judge_is_refused(path: str, change: FileChange | None) -> None:
    """By name, whether it is written or removed, with a reason; the rest is kept."""
    kept, refused = filter_patch(Patch({path: change, "bill.py": TEXT}, ("a note",)), RULES)
    assert kept == Patch({"bill.py": TEXT}, ("a note",))
    assert list(refused) == [path]
    assert REFUSED[path] in refused[path]


def test_work_is_kept() -> None:
    """Names that merely look alike, and modules below the top, are the agent's to choose."""
    patch = Patch(dict.fromkeys(KEPT, TEXT))
    assert filter_patch(patch, RULES) == (patch, {})


@pytest.mark.parametrize(
    ("path", "target", "stays"),
    [
        ("a", "b", True),
        ("sub/a", "../b", True),
        ("a", "/workspace/b", True),
        ("a", "../b", False),
        ("sub/a", "../../etc", False),
        ("a", "/etc/passwd", False),
        ("a", "/workspace/../etc", False),
        # sub/up -> .. stays inside; a link by way of it and one more ".." would not.
        ("a", "sub/up/../x", False),
        ("a", "b/\udcff", True),
    ],
)
def test_links_stay_in_the_workdir(path: str, target: str, stays: bool) -> None:  # noqa: FBT001
    """A link is laid on when it cannot lead out, alone or by way of another one."""
    link = FileChange(target.encode(errors="surrogateescape"), link=True)
    kept, refused = filter_patch(Patch({path: link}), RULES)
    assert (path in kept.files, path in refused) == (stays, not stays)


def test_a_link_may_stand_for_a_module() -> None:
    """A folder of any name, linked to from the top, would be imported as json."""
    patch = Patch({"json": FileChange(b"mine", link=True), "jason": FileChange(b"mine", link=True)})
    assert filter_patch(patch, RULES)[1] == {"json": "would be imported in place of json"}


@pytest.mark.parametrize("stands", [TEXT, FileChange(b"mine", link=True)], ids=["file", "link"])
def test_a_folder_of_what_is_protected_is_not_replaced(stands: FileChange) -> None:
    """Else removing tests one by one would be refused, and all at once would not."""
    rules = Rules(protected=["test_*.py"])
    patch = Patch({"a/b/test_x.py": None, "a/b/x.py": None, "a/b": stands, "c": stands})
    kept, refused = filter_patch(patch, rules)
    assert list(refused) == ["a/b/test_x.py", "a/b"]
    assert list(kept.files) == ["a/b/x.py", "c"]


def test_no_link_is_absolute_where_nobody_knows_the_workdir() -> None:
    """Without a workdir, a link to /workspace may lead anywhere."""
    patch = Patch({"a": FileChange(b"/workspace/b", link=True)})
    assert "leads out" in filter_patch(patch, Rules())[1]["a"]


def test_what_is_editable_is_no_longer_protected() -> None:
    """A task may let its agent change the settings of the project, but never its tests."""
    rules = Rules(protected=PYTHON, editable=["pyproject.toml"], trusted=["a/pyproject.toml"])
    patch = Patch({"pyproject.toml": TEXT, "a/pyproject.toml": TEXT, "tox.ini": TEXT})
    assert list(filter_patch(patch, rules)[1]) == ["a/pyproject.toml", "tox.ini"]


@pytest.mark.parametrize(
    ("path", "pattern", "fits"),
    [
        ("a/conftest.py", "conftest.py", True),
        ("conftest.py/x", "conftest.py", True),
        ("a/tests/x", "tests/", True),
        ("a/tests", "tests/", False),
        ("a/tests/x", "/tests/", False),
        ("tests/x", "/tests/", True),
        ("src/deep/x.py", "src/*.py", True),
        ("lib/src/x.py", "src/*.py", False),
        ("src/x.py/y", "src/x.py", True),
    ],
)
def test_patterns_fit_as_they_are_documented(path: str, pattern: str, fits: bool) -> None:  # noqa: FBT001
    """Names at any depth, folders with all in them, paths from the workdir downwards."""
    assert (find_match(PurePosixPath(path), [pattern]) == pattern) is fits


JUDGING = {
    "python": "pkg/test_a.py pkg/a_test.py app/tests.py tests/helpers.py test/__init__.py tox.ini"
    " .coveragerc setup.cfg pyproject.toml sub/pytest.ini",
    "go": "pkg/a_test.go testdata/want.golden vendor/x/assert.go vendor/modules.txt go.mod go.work",
    "rust": "tests/cli.rs crates/x/tests/it.rs build.rs x/build.rs Cargo.toml rust-toolchain.toml"
    " target/debug/deps/t-1 .config/nextest.toml .cargo/config.toml",
    "node": "src/a.spec.ts a.test.mjs test.js spec.ts x-test.js x_test.cjs test-x.ts test/x.js"
    " package.json node_modules/jest/index.js vitest.workspace.ts jest.setup.js .yarnrc"
    " .yarnrc.yml .pnp.cjs .pnp.loader.mjs .nycrc.json .c8rc.json .swcrc .taprc bunfig.toml"
    " deno.json deno.jsonc tsconfig.base.json",
    "tap": "a.bats deep/b.t t/lib.sh .proverc GNUmakefile makefile build/t_calc calc.o .taprc",
    "java": "core/src/test/java/ATest.java gradlew mvnw settings.gradle.kts buildSrc/a.kt pom.xml"
    " target/test-classes/T.class build/t junit-platform.properties .mvn/x",
}
WORK = {
    "python": "latest.py contest/a.py bill.py attestation.py",
    "go": "calc.go pkg/testing.go",
    "rust": "src/tests.rs src/lib.rs",
    "node": "src/latest.js spec.yaml test.json src/testing.ts inspect.js",
    "tap": "a.txt lib/t.sh",
    "java": "src/main/java/A.java",
}


@pytest.mark.parametrize("language", TESTS)
def test_every_language_protects_what_judges(language: str) -> None:
    """Tests as runners find them, what these import, their settings, and what is built."""
    judging, work = JUDGING[language].split(), WORK[language].split()
    patch = Patch(dict.fromkeys((*judging, *work), TEXT))
    kept, refused = filter_patch(patch, Rules(protected=TESTS[language]))
    assert set(refused) == set(judging)
    assert list(kept.files) == work


def test_what_is_laid_has_no_two_things_in_one_place() -> None:
    """Trusted files win over the patch, the patch over the task's; what is removed stays away."""
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
