"""The table of suites, and the list of flaky tests, agree with the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import run_suites
import suites
from suites import Suite

ROOT = Path(__file__).resolve().parents[2]
REAL = suites.read_table(ROOT / "tools" / "ci" / "suites.toml")


def test_every_suite_has_a_target_and_runs_at_night() -> None:
    """The suites of the table, of `make test-all` and of the nightly workflow are the same."""
    makefile = (ROOT / "Makefile").read_text()
    workflow = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    long_suites = (f"test-{suite.name}" for suite in REAL.suites)
    names = [*run_suites.ALWAYS, "test-properties", *long_suites]
    targets = re.search(r"^SUITES := (.*)$", makefile, re.MULTILINE)
    nightly = re.search(r"suite: \[(.*)\]$", workflow, re.MULTILINE)
    assert targets
    assert nightly
    assert sorted(targets[1].split()) == sorted(nightly[1].split(", ")) == sorted(names)
    assert [name for name in names if not re.search(rf"^{name}: ", makefile, re.MULTILINE)] == []


def test_every_package_belongs_to_a_suite() -> None:
    """A package is in a suite or `make test` has all of its tests; each entry exists."""
    folders = [folder for suite in REAL.suites for folder in suite.folders]
    named = [*REAL.every, *REAL.fast, *folders]
    assert [name for name in named if not (ROOT / name).exists()] == []
    entries = [path for path in (ROOT / "src" / "tugline").iterdir() if path.suffix != ".typed"]
    parts = [path.relative_to(ROOT).as_posix() for path in entries if path.name != "__pycache__"]
    covered = {"/".join(name.split("/")[:3]) for name in named}
    assert sorted(set(parts) - covered) == []
    assert [name for name in REAL.fast if suites.is_in(name, folders)] == []


MARKERS = {
    "sandboxes": r"mark\.podman|^from .* import .*\b(podman|WITH_PYTHON)\b",
    "harnesses": r"mark\.harness\b",
    "slow": r"mark\.(slow|cluster)\b",
    "engines": r"mark\.engines\b",
    "experiment": r"mark\.experiment\b",
}
HARNESSES_IN_CONTAINERS = "tests/harnesses/test_full_tasks.py"


@pytest.mark.parametrize("suite", [suite for suite in REAL.suites if suite.name in MARKERS])
def test_a_changed_test_runs(suite: Suite) -> None:
    """Each file with tests of a suite is in its folders; those of chaos are in one."""
    marker = re.compile(MARKERS[suite.name], re.MULTILINE)
    files = [
        path for path in (ROOT / "tests").rglob("test_*.py") if marker.search(path.read_text())
    ]
    names = {path.relative_to(ROOT).as_posix() for path in files}
    missing = {name for name in names if not suites.is_in(name, suite.folders)}
    assert len(names) > 2 or suite.name == "experiment"
    missing -= {HARNESSES_IN_CONTAINERS} if suite.name == "sandboxes" else set()
    assert {name for name in missing if not name.startswith("tests/chaos/")} == set()


# --------------------------------------------------------------------------- flaky tests
def test_flaky_tests_exist_and_have_a_reason() -> None:
    """Each row of tests/flaky.md has the name of a test as pytest prints it."""
    page = (ROOT / "tests" / "flaky.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    for row in rows:
        entry = re.fullmatch(r"\| `(tests/[\w/]+\.py)::(\w+)(\[.*\])?` \| \S.* \|", row)
        assert entry, f"{row!r} must be | `tests/file.py::test_name` | reason |"
        assert f"def {entry[2]}(" in (ROOT / entry[1]).read_text(), row
