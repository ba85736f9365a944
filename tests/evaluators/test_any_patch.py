"""For any patch, tests, outcomes, early imports and trusted files are those of the fresh tree."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.evaluation import Judge, make_task_with_files
from tugline.evaluators.tests import TestsEvaluator
from tugline.types import Workspace

FRESH = {
    "bill.py": "def total(a, b):\n    return a - b\n",
    "pkg/__init__.py": "",
    "pkg/util.py": "import bill\n",
    "tests/helpers.py": "import pkg.util\n",
    "tests/test_bill.py": (
        "import json, helpers, pytest\nfrom bill import total\n"
        "def test_wrong(): assert total(1, 2) == 3\n"
        "def test_zero(): assert total(0, 0) == 0\n"
        "@pytest.mark.skip\ndef test_skipped(): ...\n"
    ),
    "build.sh": "true\n",
}
HOOK = (
    "import pytest\ntotal = lambda a, b: a + b\n"
    "@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
    "def pytest_collection_modifyitems(items): del items[1:]\n"
)
RECORDER = """\
import json, os, sys
seen = {"imported": [], "collected": [], "outcomes": {}}

def pytest_collection(session):
    top = os.getcwd()
    files = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    seen["imported"] = sorted(os.path.relpath(f, top) for f in files if f.startswith(top + os.sep))

def pytest_collection_finish(session):
    seen["collected"] = [item.nodeid for item in session.items]

def pytest_runtest_logreport(report):
    seen["outcomes"].setdefault(report.nodeid, []).append(report.outcome)

def pytest_unconfigure():
    names = ["tests/test_bill.py", "tests/helpers.py"]
    seen["bytes"] = {name: open(name).read() for name in names if os.path.exists(name)}
    with open(os.environ["RECORD"], "w") as file:
        json.dump(seen, file)
"""
FOLDERS = ["", "tests/", "src/", "pkg/", "tests/sub/", "lib/", "org/"]
STEMS = [
    *("conftest", "sitecustomize", "usercustomize", "pytest", "_pytest", "pluggy", "iniconfig"),
    *("org", "python", "argcomplete", "colorama", "exceptiongroup", "_winreg", "attr", "py"),
    *("json", "helpers", "test_bill", "bill", "util", "tests", "evil", "__init__", "packaging"),
]
ENDINGS = [".py", "/__init__.py", "/core.py", "/python/core.py", ".pth", ".pyc", ".so", ""]
CONFIGS = [
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
    *("pyproject.toml", "PYTEST.INI", ".coveragerc"),
]
SETTINGS = (
    "[pytest]\naddopts = -p evil\n[tool:pytest]\naddopts = -p evil\n"
    "[tool.pytest.ini_options]\naddopts = '-p evil'\n"
)
POINTS = "[pytest11]\nevil = evil\n"
PLUGINS = [
    "evil-1.dist-info",
    "evil-1.DIST-INFO",
    "evil.egg-info",
    "Evil.Egg-Info",
    "e.egg/EGG-INFO",
]

modules = st.builds("{}{}{}".format, *map(st.sampled_from, (FOLDERS, STEMS, ENDINGS)))
configs = st.builds("{}{}".format, *map(st.sampled_from, (FOLDERS, CONFIGS)))
plugins = st.builds("{}/{}".format, st.sampled_from(PLUGINS), st.just("entry_points.txt"))
patches = st.builds(
    lambda *parts: {path: text for part in parts for path, text in part.items()},
    st.dictionaries(modules, st.just(HOOK), max_size=5),
    st.dictionaries(configs, st.just(SETTINGS), max_size=2),
    st.dictionaries(plugins, st.just(POINTS), max_size=1),
    st.just({"evil.py": HOOK}),
).map(lambda patch: {p: t for p, t in patch.items() if p not in FRESH or p.startswith("tests/")})


def without_conflicts(patch: dict[str, str]) -> dict[str, str]:
    """The files whose path is not a folder of another file of the patch or of the fresh tree."""
    above = {str(up) for path in [*patch, *FRESH] for up in Path(path).parents}
    return {path: text for path, text in patch.items() if path not in above}


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plug-in that records a run."""
    folder = tmp_path_factory.mktemp("recorder")
    (folder / "recorder.py").write_text(RECORDER)
    return folder


def record(recorder: Path, patch: dict[str, str], *, by_setup: bool) -> dict[str, Any]:
    """What the tests do after a patch, or after a `setup` that writes the same files."""
    record_file = recorder / "record.json"
    record_file.unlink(missing_ok=True)
    evaluator = TestsEvaluator(
        command="python3 -m pytest -q -p no:cacheprovider -p recorder tests/test_bill.py",
        format="pytest",
        env={
            "PYTHONPATH": str(recorder),
            "RECORD": str(record_file),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "",
            "PYTEST_ADDOPTS": "-p no:schemathesis -p no:hypothesispytest",
        },
        setup="sh build.sh" if by_setup else None,
    )
    work = patch
    if by_setup:
        lines = (
            f"mkdir -p '{Path(path).parent}'; cat > '{path}' <<'END'\n{text}END\n"
            for path, text in patch.items()
        )
        work = {"build.sh": "".join(lines)}
    folder = Path(tempfile.mkdtemp(dir=recorder))
    judge = Judge(folder, make_task_with_files(workspace=Workspace(folder="/srv/shop")), FRESH)
    verdict = asyncio.run(judge(evaluator, dict(work)))
    shutil.rmtree(folder)
    assert verdict.reward.value == 0.0, verdict.report
    seen: dict[str, Any] = json.loads(record_file.read_text())
    return seen


@pytest.fixture(scope="module")
def expected(recorder: Path) -> dict[str, Any]:
    """A run of the fresh tree."""
    seen = record(recorder, {"notes.txt": ""}, by_setup=False)
    assert len(seen["collected"]) == 3
    assert seen["imported"] == []
    return seen


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(patch=patches.map(without_conflicts), by_setup=st.booleans())
def test_any_patch_leaves_the_tests_as_they_are(
    recorder: Path, expected: dict[str, Any], patch: dict[str, str], *, by_setup: bool
) -> None:
    """The plug-ins of the image stay, and nothing of the work is imported before the tests."""
    assert record(recorder, patch, by_setup=by_setup) == expected
