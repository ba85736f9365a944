"""Files that an agent adds beside the tests shadow no module that they import."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support import evaluation
from support.sandbox import WITH_PYTHON, Driver
from tugline.evaluators.tests import TestsEvaluator
from tugline.patch import FileChange
from tugline.types import Workspace

CALC = {"src/calc.py": "def total(a, b):\n    return a - b\n", "src/random.py": "SEED = 1\n"}
RIGHT = {"src/calc.py": "def total(a, b):\n    return a + b\n"}
TEST = (
    "import sys\nsys.path.insert(0, 'src')\nimport statistics, unittest\nfrom calc import total\n"
    "class Calc(unittest.TestCase):\n    def test_total(self):\n"
    "        self.assertEqual(total(1, 2), statistics.mean([3]))\n"
)
PYTEST = [
    *("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml={report}"),
    *("-p", "no:schemathesis"),  # of all plug-ins here the one that takes seconds to import
]
WAYS: dict[str, dict[str, Any]] = {
    "own": {"files": {"hidden/test_calc.py": TEST}},
    "command": {
        "files": {"hidden/test_calc.py": TEST},
        "command": PYTEST,
        "format": "junit",
        "expected": ["hidden/test_calc.py::Calc::test_total"],
    },
}


def judge(folder: Path, driver: Driver) -> evaluation.Judge:
    """A task on a repository with hidden tests."""
    given = evaluation.make_task_with_files(workspace=Workspace(folder="/srv/shop"))
    return evaluation.Judge(folder, given, CALC, runtime=driver.runtime, spec=driver.spec())


@pytest.mark.parametrize("driver", WITH_PYTHON, indirect=True)
async def test_honest_modules_are_kept(tmp_path: Path, driver: Driver) -> None:
    """New packages may have modules of any name, and known ones may be changed."""
    work = {
        "shop/__init__.py": "",
        "shop/queue.py": "Q = 1\n",
        "helpers.py": "H = 2\n",
        "src/random.py": "SEED = 3\n",
        "src/calc.py": (
            "import sys\nsys.path.append('.')\nfrom shop.queue import Q\nfrom helpers import H\n"
            "def total(a, b):\n    return Q + H\n"
        ),
    }
    verdict = await judge(tmp_path, driver)(TestsEvaluator(**WAYS["command"]), work)
    assert (verdict.reward.value, verdict.report["refused"]) == (1.0, {})


PLACES = ("", "src/", "hidden/", "tests/", "src/hidden/", "src/new/", "new/")
NAMES = (
    *("test_calc", "hidden", "statistics", "json", "pygments", "pytest", "_pytest", "conftest"),
    *("sitecustomize", "random", "__init__", "test_new", "typing_extensions", "attr", "fine"),
)
ENDS = (".py", ".pyc", ".so", ".cpython-311-x86_64-linux-gnu.so", "/__init__.py", "/__main__.py")
SETTINGS = ("pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml", "pytest.toml")
PATHS = st.one_of(
    st.builds("{}{}{}".format, *map(st.sampled_from, (PLACES, NAMES, ENDS))),
    st.builds("{}{}".format, *map(st.sampled_from, (PLACES, SETTINGS))),
)
EXITS = "import sys\nsys.stderr.write('IMPORTED ' + __name__)\nraise SystemExit(0)\n"


def without_conflicts(paths: list[str]) -> Mapping[str, str]:
    """Files of those paths that can exist together."""
    above = {path.rpartition("/")[0] for path in paths}
    return {path: EXITS for path in paths if path not in above and path not in CALC}


RECORDER = """import os, sys
def path(module):
    return str(getattr(module, "__file__", None)).replace(os.getcwd(), ".")
with open("modules.txt", "w") as file:
    file.writelines(sorted(f"{name} {path(module)}\\n" for name, module in [*sys.modules.items()]))
"""
"""Records the modules that the interpreter has imported before the tests."""


async def run(
    folder: Path, driver: Driver, way: str, files: Mapping[str, str | FileChange | None]
) -> list[str]:
    """Imports before the tests, then the tests' outcomes."""
    options = {**WAYS[way], "files": {"hidden/test_calc.py": RECORDER + TEST}}
    verdict = await judge(folder, driver)(TestsEvaluator(**options), files)
    report, output = verdict.report, verdict.report["output"]
    assert "IMPORTED" not in output, report
    (modules,) = await asyncio.to_thread(lambda: list(folder.rglob("modules.txt")))
    counted = re.findall(r"\d+ passed|\d+ failed", output)
    counts = [f"{report['failed']} {report['missing']} {report['exit']} {verdict.reward}", *counted]
    return [*modules.read_text().splitlines(), *counts]


WITHOUT: dict[tuple[str, str, str], list[str]] = {}
"""Results of `run` without added files, by sandbox, way and work."""


async def assert_no_effect(
    make: pytest.TempPathFactory,
    driver: Driver,
    way: str,
    added: Mapping[str, str | FileChange | None],
) -> None:
    """The imports and outcomes are those without `added`, with wrong and with right work."""
    for name, work in {"wrong": {}, "right": RIGHT}.items():
        key = (driver.name, way, name)
        if key not in WITHOUT:
            WITHOUT[key] = await run(make.mktemp("fresh"), driver, way, work)
        assert len(WITHOUT[key]) > 50
        assert await run(make.mktemp("changed"), driver, way, {**added, **work}) == WITHOUT[key]


EXAMPLES = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LOTS = st.lists(PATHS, min_size=20, max_size=60).map(without_conflicts)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("driver", WITH_PYTHON, indirect=True)
@settings(EXAMPLES, max_examples=1)
@given(added=LOTS)
async def test_added_files_do_not_change_the_tests(
    tmp_path_factory: pytest.TempPathFactory, driver: Driver, way: str, added: Mapping[str, str]
) -> None:
    """Modules, packages, extensions and settings of any name, anywhere, change no outcome."""
    await assert_no_effect(tmp_path_factory, driver, way, added)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("driver", ["local"], indirect=True)
@settings(EXAMPLES, max_examples=6)
@given(added=LOTS)
async def test_added_files_do_not_change_the_tests_in_more_examples(
    tmp_path_factory: pytest.TempPathFactory, driver: Driver, way: str, added: Mapping[str, str]
) -> None:
    """The tests are unchanged in more examples, too."""
    await assert_no_effect(tmp_path_factory, driver, way, added)
