"""Forged build outputs, by a real cargo and a real Maven: the reward is for the sources.

The forgery is the best that there is: what the tool itself builds of the right sources, at the
same path, younger than the wrong ones. Maven works offline with the packages of Debian
(libsurefire-java, junit4, libmaven-compiler-plugin-java, libmaven-resources-plugin-java).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from judging import Judge, task
from tugline.evaluators.tests import TestsEvaluator
from tugline.sandbox.base import Content, Sandbox
from tugline.sandbox.local import LocalRuntime
from tugline.sandbox.patch import FileChange
from tugline.types import Workspace

pytestmark = pytest.mark.timeout(600)

WITHIN = 120.0
COMMITTED = 1_600_000_000.0
"""When the sources were changed last."""
REPOSITORY = Path("/usr/share/maven-repo")
PLUGINS = ("maven-compiler-plugin", "maven-resources-plugin", "maven-surefire-plugin")
POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>shop</groupId><artifactId>bill</artifactId><version>1</version>
  <properties>
    <maven.compiler.release>11</maven.compiler.release>
    <project.build.sourceEncoding>UTF-8</project.build.sourceEncoding>
  </properties>
  <dependencies><dependency>
    <groupId>junit</groupId><artifactId>junit</artifactId><version>4.x</version>
    <scope>test</scope>
  </dependency></dependencies>
</project>
"""


@dataclass
class Tool:
    """A build tool, and a project with a bug for it."""

    command: list[str]
    base: Mapping[str, str]
    source: str
    """The file with the bug, a minus instead of a plus."""
    test: str
    options: dict[str, Any]
    """Of the evaluator."""

    @property
    def right(self) -> dict[str, str]:
        """The honest work."""
        return {self.source: self.base[self.source].replace("a - b", "a + b")}


class OneFolder(Judge):
    """Every box is at the same path, as in a sandbox: tools write paths into what they build."""

    @contextlib.asynccontextmanager
    async def open_sandbox(self, files: Mapping[str, Content]) -> AsyncIterator[Sandbox]:
        """The sources are as old as their commit."""
        folder = self.folder / "box"
        shutil.rmtree(folder, ignore_errors=True)
        async with LocalRuntime(grace_s=0.1).open(folder) as sandbox:
            await sandbox.put(sandbox.workdir, self.base)
            for path in self.base:
                os.utime(Path(sandbox.workdir, path), (COMMITTED, COMMITTED))
            await sandbox.put(sandbox.workdir, files)
            yield sandbox


def use_cargo(folder: Path) -> Tool:
    """Cargo as rustup has installed it, with a folder of its own."""
    cargo = shutil.which("cargo")
    if cargo is None or subprocess.run([cargo, "-V"], check=False, timeout=60).returncode != 0:
        pytest.skip("there is no cargo that works")
    if shutil.which("cc") is None:
        pytest.skip("there is no cc, which cargo links with")
    homes = {"CARGO_HOME": str(folder / "cargo")}
    homes["RUSTUP_HOME"] = os.environ.get("RUSTUP_HOME", str(Path.home() / ".rustup"))
    test = "#[test]\nfn adds() { assert_eq!(bill::total(2, 3), 5); }\n"
    return Tool(
        ["cargo", "test", "--offline", "--test", "adds"],
        {
            "Cargo.toml": '[package]\nname = "bill"\nversion = "1.0.0"\nedition = "2021"\n',
            "src/lib.rs": "pub fn total(a: i32, b: i32) -> i32 { a - b }\n",
            "tests/adds.rs": test,
        },
        "src/lib.rs",
        "adds",
        {"format": "cargo", "env": homes},
    )


def use_maven(folder: Path) -> Tool:
    """Maven with links to what the packages have installed, for it writes beside that."""
    if shutil.which("mvn") is None or shutil.which("javac") is None:
        pytest.skip("there is no mvn or no javac")
    plugins = REPOSITORY / "org/apache/maven/plugins"
    needed = [*(plugins / name for name in PLUGINS), REPOSITORY / "junit/junit/4.x"]
    if missing := [str(path) for path in needed if not path.exists()]:
        pytest.skip(f"Maven cannot work offline: there is no {missing[0]}")
    shutil.copytree(REPOSITORY, folder / "m2", copy_function=os.symlink)
    java = "class Bill { static int total(int a, int b) { return a - b; } }\n"
    test = (
        "import org.junit.*;\npublic class BillTest {\n  @Test public void adds()"
        " { Assert.assertEquals(5, Bill.total(2, 3)); }\n}\n"
    )
    return Tool(
        ["mvn", "-o", "-q", "-B", f"-Dmaven.repo.local={folder / 'm2'}", "test"],
        {"pom.xml": POM, "src/main/java/Bill.java": java, "src/test/java/BillTest.java": test},
        "src/main/java/Bill.java",
        "BillTest::adds",
        {
            "format": "junit",
            "report": "target/surefire-reports/TEST-BillTest.xml",
            "env": {"MAVEN_OPTS": "-XX:TieredStopAtLevel=1"},
        },
    )


@pytest.fixture(
    params=[use_cargo, pytest.param(use_maven, marks=pytest.mark.slow)], ids=["cargo", "maven"]
)
def tool(request: pytest.FixtureRequest, tmp_path: Path) -> Tool:
    """Each tool that is installed."""
    found: Tool = request.param(tmp_path)
    return found


@pytest.fixture
def judge(tool: Tool, tmp_path: Path) -> Judge:
    """Judges work on the project."""
    given = task(workspace=Workspace(folder="/srv/bill"))
    return OneFolder(tmp_path, given, tool.base, timeout_s=WITHIN)


async def passes(tool: Tool, box: Sandbox) -> bool:
    """Whether the tool alone says that the tests pass."""
    end = await box.run(tool.command, env=tool.options["env"], timeout_s=WITHIN)
    return end.code == 0 and not end.timed_out


def take_outputs(workdir: Path) -> dict[str, FileChange]:
    """All that a tool has built."""
    files = [path for path in sorted((workdir / "target").rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(workdir)): FileChange(path.read_bytes(), os.access(path, os.X_OK))
        for path in files
    }


async def forge(tool: Tool, judge: Judge) -> dict[str, FileChange]:
    """What the tool builds of the right sources; it is believed beside the wrong ones."""
    async with judge.open_sandbox(tool.right) as sandbox:
        source = Path(sandbox.workdir, tool.source)
        os.utime(source, (COMMITTED, COMMITTED))
        assert await passes(tool, sandbox), (sandbox.logs / "agent.log").read_text()
        built = take_outputs(Path(sandbox.workdir))
        await sandbox.put(sandbox.workdir, {tool.source: tool.base[tool.source]})
        os.utime(source, (COMMITTED, COMMITTED))
        assert await passes(tool, sandbox), "the forgery is none: the tool has built again"
    return built


async def test_forged_build_outputs_are_not_believed(tool: Tool, judge: Judge) -> None:
    """They are refused; where a task lets them in they are old, so the tool builds the sources."""
    built = await forge(tool, judge)
    options = {"command": tool.command, "expected": [tool.test], "timeout_s": WITHIN}
    tests = TestsEvaluator(**options, **tool.options)
    verdict = await judge(tests, built)
    assert verdict.reward.value == 0.0, verdict.report
    assert set(verdict.report["refused"]) == set(built)
    lax = TestsEvaluator(**options, **tool.options, editable=["target/", "*.class", ".*"])
    verdict = await judge(lax, built)
    assert verdict.reward.value == 0.0, verdict.report
    assert set(verdict.report["refused"]) <= {tool.options.get("report")}
    honest = await judge(tests, {**built, **tool.right})
    assert honest.reward.value == 1.0, honest.report
