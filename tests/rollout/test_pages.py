from __future__ import annotations

import re
import sys
from inspect import signature
from pathlib import Path
from types import ModuleType

import pytest

from rig import rig, says
from rollout.test_rollout import a_task, rolled
from tugline.plugins import BUILT_IN, find
from tugline.sandbox.limits import ProgramLimits
from tugline.types import PluginSpec

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = Path(__file__).parent / "programs"


def page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Python of a page as a module of that name."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text(), re.DOTALL)
    code = "\n".join(blocks)
    module = ModuleType(f"page_{name}")
    exec(compile(code, name, "exec"), module.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, module.__name__, module)


async def test_parts_written_as_the_pages_say_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A harness and an evaluator of one's own, found as module:Class, go through a rollout."""
    page("harnesses", monkeypatch)
    page("evaluators", monkeypatch)
    monkeypatch.setenv("PATH", f"{PROGRAMS}:/usr/bin:/bin")
    task = a_task(
        PluginSpec("page_harnesses:Aider"),
        evaluator=PluginSpec("page_evaluators:Builds"),
        runtime=PluginSpec("local"),  # where the programs of this test can be seen
        files={"a.txt": ""},
    )
    async with rig(tmp_path / "gateway", says("Done.")) as it:
        trajectory, _ = await rolled(task, it.gateway, tmp_path / "s")
    assert trajectory.failure is None
    assert trajectory.reward is not None
    assert trajectory.reward.value == 1.0
    log = (tmp_path / "s" / "agent" / "logs" / "agent.log").read_text()
    assert "model: openai/tugline-policy" in log


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind in ("harness", "evaluator") for part in BUILT_IN[kind]]
)
def test_every_option_has_a_row(kind: str, part: str) -> None:
    """The table of docs/configuration.md names each option, below its harness or evaluator."""
    heading = {"harness": "### Harnesses", "evaluator": "### Evaluators"}[kind]
    text = (DOCS / "configuration.md").read_text().partition(heading)[2].partition("###")[0]
    named: dict[str, set[str]] = {}
    current = ""
    for name, options in re.findall(r"^\| (?:`(\w+)`)? *\|([^|]*)\|", text, re.MULTILINE):
        current = name or current
        named.setdefault(current, set()).update(re.findall(r"`(\w+)`", options))
    assert set(signature(find(kind, part)).parameters) == named[part]


@pytest.mark.parametrize("part", ["local", "bubblewrap"])
def test_every_option_of_a_runtime_is_on_its_page(part: str) -> None:
    """Each is named where people look for it."""
    lines = (DOCS / "runtimes.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| `{part}` |"))
    options = set(signature(find("runtime", part)).parameters)
    if "bounds" in options:  # the limits of its programs, by name
        options = options - {"bounds"} | set(ProgramLimits.__struct_fields__)
    assert options <= set(re.findall(r"`(\w+)`", row))
