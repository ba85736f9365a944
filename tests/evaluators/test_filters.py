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
from tugline.sandbox.base import Mount
from tugline.sandbox.patch import FileChange, Patch
from tugline.schema import read_values

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
PATHS = read_values(Path(__file__).with_name("paths.toml"))
REFUSED: dict[str, str] = PATHS["refused"]
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


@pytest.mark.parametrize("language", TESTS)
def test_every_language_protects_what_judges(language: str) -> None:
    """Tests as runners find them, what these import, their settings, and what is built."""
    paths = PATHS["languages"][language]
    patch = Patch(dict.fromkeys((*paths["refused"], *paths["kept"]), TEXT))
    kept, refused = filter_patch(patch, Rules(protected=TESTS[language]))
    assert set(refused) == set(paths["refused"])
    assert list(kept.files) == paths["kept"]


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
