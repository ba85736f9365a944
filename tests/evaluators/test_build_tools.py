"""Forged build outputs, with real make, CMake, cargo and Maven: rewards depend on sources alone.

A forgery is the tool's own build of the right sources, in a sandbox with the same paths, where the
tool accepts it beside the wrong sources. `tools/builds.py` installs the tools; Maven works offline
with Debian's repository. In containers the tools of this machine are mounted.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.commands import run_program
from support.evaluation import Judge, make_task_with_files
from support.sandbox import WITH_PYTHON, Driver, run_shell
from tugline.evaluators.tests import TestsEvaluator
from tugline.patch import FileChange
from tugline.sandbox.base import Mount, Sandbox
from tugline.types import Workspace

pytestmark = pytest.mark.timeout(600)

PROJECTS = Path(__file__).with_name("projects")
WITHIN = 120.0
COMMITTED = 1_600_000_000
"""Modification time of the sources."""
REPOSITORY = "/usr/share/maven-repo"
NEEDED = (
    "org/apache/maven/plugins/maven-compiler-plugin",
    "org/apache/maven/plugins/maven-resources-plugin",
    "org/apache/maven/plugins/maven-surefire-plugin",
    "junit/junit/4.x",
)
OUTPUTS = ("build/", "target/")


@dataclass
class Tool:
    """A build tool, and a project with a bug: a minus instead of a plus."""

    project: str
    """Its folder below `PROJECTS`."""
    source: str
    """The file with the bug."""
    command: str
    test: str
    options: dict[str, Any]
    """Of the evaluator."""
    mounts: tuple[Mount, ...] = ()

    @property
    def wrong(self) -> str:
        """The text of `source`."""
        return (PROJECTS / self.project / self.source).read_text()

    @property
    def right(self) -> dict[str, str]:
        """The right patch."""
        return {self.source: self.wrong.replace("a - b", "a + b")}


def use_make(_: Path) -> Tool:
    """C, built by make and cc."""
    if shutil.which("make") is None or shutil.which("cc") is None:
        pytest.skip("there is no make or no cc")
    return Tool("make", "calc.c", "make -s test", "adds", {"format": "tap", "env": {}})


def use_cmake(_: Path) -> Tool:
    """C, built by CMake and make; its tests are run by CTest."""
    if missing := [name for name in ("cmake", "ctest", "make", "cc") if shutil.which(name) is None]:
        pytest.skip(f"there is no {missing[0]}")
    options = {"format": "junit", "report": "build/report.xml", "env": {}}
    build = "cmake -S . -B build >/dev/null && cmake --build build >/dev/null"
    test = "cd build && ctest --output-junit report.xml"
    return Tool("cmake", "calc.c", f"{build} && {test}", "adds::adds", options)


def use_cargo(_: Path) -> Tool:
    """Cargo, wherever it is installed."""
    if shutil.which("cargo") is None or shutil.which("cc") is None:
        pytest.skip("there is no cargo, or no cc, which it links with")
    sysroot = run_program("rustc", "--print", "sysroot", timeout=60)
    if sysroot.returncode != 0:
        pytest.skip("there is no cargo that works")
    env = {"CARGO_HOME": "/tmp/cargo", "PATH": "/srv/rust/bin:/usr/bin:/bin"}  # noqa: S108
    options = {"format": "cargo", "env": env}
    mounts = (Mount("/srv/rust", sysroot.stdout.strip()),)
    command = "cargo test --offline --test adds"
    return Tool("cargo", "src/lib.rs", command, "adds", options, mounts)


def use_maven(folder: Path) -> Tool:
    """Maven with links to its installed packages, since it writes beside them."""
    javac = os.path.realpath(shutil.which("javac") or "")
    if shutil.which("mvn") is None or Path(javac).name != "javac":
        pytest.skip("there is no mvn or no javac")
    if missing := [name for name in NEEDED if not Path(REPOSITORY, name).exists()]:
        pytest.skip(f"Maven cannot work offline: there is no {REPOSITORY}/{missing[0]}")
    mounts = []
    for number, linked in enumerate((Path("/usr/share/maven"), Path(javac).parents[1] / "conf")):
        # Both have links into /etc, of which sandboxes have only some files.
        copy = folder / f"settings-{number}"
        shutil.copytree(linked, copy)
        mounts.append(Mount(str(linked), str(copy)))
    options = {
        "format": "junit",
        "report": "target/surefire-reports/TEST-BillTest.xml",
        "env": {"MAVEN_OPTS": "-XX:TieredStopAtLevel=1"},
    }
    command = (
        f"[ -e /tmp/m2 ] || cp -rs {REPOSITORY} /tmp/m2;"
        " exec mvn -o -q -B -DforkCount=0 -Dmaven.repo.local=/tmp/m2 test"
    )
    source = "src/main/java/Bill.java"
    return Tool("maven", source, command, "BillTest::adds", options, tuple(mounts))


@pytest.fixture(
    params=[
        use_make,
        use_cmake,
        use_cargo,
        pytest.param(use_maven, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
    ids=["make", "cmake", "cargo", "maven"],
)
def tool(request: pytest.FixtureRequest, tmp_path: Path) -> Tool:
    """Each installed tool."""
    installed: Tool = request.param(tmp_path)
    return installed


@pytest.fixture
def judge(tool: Tool, driver: Driver, tmp_path: Path) -> Judge:
    """A judge of patches of the project; its files are as old as their commit."""
    base = tmp_path / "base"
    shutil.copytree(PROJECTS / tool.project, base)
    for path in base.rglob("*"):
        os.utime(path, (COMMITTED, COMMITTED))
    spec = driver.spec(base, mounts=(*driver.host_programs, *tool.mounts))
    given = make_task_with_files(workspace=Workspace(folder=str(base)))
    return Judge(tmp_path, given, timeout_s=WITHIN, runtime=driver.runtime, spec=spec)


async def passes(tool: Tool, sandbox: Sandbox, source: str) -> bool:
    """Whether the tests pass by the tool alone, with a source as old as its commit."""
    await sandbox.put(sandbox.workdir, {tool.source: source})
    script = f"touch -d @{COMMITTED} {tool.source} && {tool.command}"
    end = await run_shell(sandbox, script, WITHIN, **tool.options["env"])
    return end.code == 0 and not end.timed_out


async def forge(tool: Tool, judge: Judge) -> dict[str, FileChange | None]:
    """Build outputs of the right sources, which the tool accepts beside the wrong ones."""
    async with judge.open_sandbox({}) as sandbox:
        log = sandbox.logs / "agent.log"
        assert await passes(tool, sandbox, tool.right[tool.source]), log.read_text()
        patch = await sandbox.diff()
        built = {path: change for path, change in patch.files.items() if path.startswith(OUTPUTS)}
        accepted = await passes(tool, sandbox, tool.wrong)
        assert accepted, "no forgery: the tool has built again"
    assert built
    return built


@pytest.mark.parametrize("driver", WITH_PYTHON[1:], indirect=True)
async def test_forged_build_outputs_earn_nothing(tool: Tool, judge: Judge) -> None:
    """Forged outputs are refused; if a task allows them, they are old and the tool rebuilds."""
    built = await forge(tool, judge)
    options = {"command": tool.command, "expected": [tool.test], "timeout_s": WITHIN}
    tests = TestsEvaluator(**options, **tool.options)
    verdict = await judge(tests, built)
    assert verdict.reward.value == 0.0, verdict.report
    assert set(verdict.report["refused"]) == set(built)
    lax = TestsEvaluator(**options, **tool.options, editable=[*OUTPUTS, "*.class", ".*"])
    verdict = await judge(lax, built)
    assert verdict.reward.value == 0.0, verdict.report
    assert set(verdict.report["refused"]) <= {tool.options.get("report")}
    honest = await judge(tests, {**built, **tool.right})
    assert honest.reward.value == 1.0, honest.report


@pytest.mark.parametrize("tool", [use_cmake], indirect=True)
@pytest.mark.parametrize("driver", WITH_PYTHON[1:2], indirect=True)
async def test_a_test_that_the_agent_disables_earns_nothing(tool: Tool, judge: Judge) -> None:
    """A disabled test earns 0, even if the task lets the agent change CMakeLists.txt."""
    text = (PROJECTS / tool.project / "CMakeLists.txt").read_text()
    disabled = {"CMakeLists.txt": f"{text}set_tests_properties(adds PROPERTIES DISABLED TRUE)\n"}
    others = [
        {"CTestCustom.cmake": 'set(CTEST_CUSTOM_TESTS_IGNORE "adds")\n'},
        {"CMakeLists.txt": text.replace("add_test(NAME adds COMMAND t_calc)", "")},
    ]
    options = {"command": tool.command, "timeout_s": WITHIN, **tool.options}
    for patch in (disabled, *others):
        tests = TestsEvaluator(**options)
        verdict = await judge(tests, patch)
        assert verdict.reward.value == 0.0, verdict.report
        assert [*verdict.report["refused"]] == [*patch]
    lax = TestsEvaluator(**options, editable=["CMakeLists.txt"])
    verdict = await judge(lax, disabled)
    assert verdict.reward.value == 0.0, verdict.report
    assert not verdict.report["refused"]
    honest = await judge(lax, {**tool.right, "CMakeLists.txt": f"{text}# a comment\n"})
    assert honest.reward.value == 1.0, honest.report
