"""Examples and tables of the documentation's pages on harnesses, evaluators and runtimes."""

from __future__ import annotations

import re
import sys
from inspect import signature
from pathlib import Path
from types import ModuleType

import pytest

from rollout.test_rollout import a_task, run_task
from support.engine import reply_with
from support.gateway import open_session
from tugline.plugins import BUILT_IN, find
from tugline.sandbox.limits import ProgramLimits
from tugline.types import PluginSpec

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = Path(__file__).parent / "programs"


def load_page(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Python blocks of a page as a module ``page_NAME``."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text(), re.DOTALL)
    code = "\n".join(blocks)
    module = ModuleType(f"page_{name}")
    exec(compile(code, name, "exec"), module.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, module.__name__, module)


async def test_examples_of_pages_work_in_a_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A harness and an evaluator of the pages are used as module:Class."""
    load_page("harnesses", monkeypatch)
    load_page("evaluators", monkeypatch)
    monkeypatch.setenv("PATH", f"{PROGRAMS}:/usr/bin:/bin")
    task = a_task(
        PluginSpec("page_harnesses:Aider"),
        evaluator=PluginSpec("page_evaluators:Builds"),
        runtime=PluginSpec("local"),  # can run the programs of this test
        files={"a.txt": ""},
    )
    async with open_session(tmp_path / "gateway", reply_with("Done.")) as session:
        trajectory, _ = await run_task(task, session.gateway, tmp_path / "s")
    assert trajectory.failure is None
    assert trajectory.reward is not None
    assert trajectory.reward.value == 1.0
    log = (tmp_path / "s" / "agent" / "logs" / "agent.log").read_text()
    assert "model: openai/tugline-policy" in log


@pytest.mark.parametrize(
    ("kind", "part"), [(kind, part) for kind in ("harness", "evaluator") for part in BUILT_IN[kind]]
)
def test_options_of_harnesses_and_evaluators_are_documented(kind: str, part: str) -> None:
    """docs/configuration.md has a row of each harness and evaluator, with all its options."""
    heading = {"harness": "### Harnesses", "evaluator": "### Evaluators"}[kind]
    text = (DOCS / "configuration.md").read_text().partition(heading)[2].partition("###")[0]
    named: dict[str, set[str]] = {}
    current = ""
    for name, options in re.findall(r"^\| (?:`(\w+)`)? *\|([^|]*)\|", text, re.MULTILINE):
        current = name or current
        named.setdefault(current, set()).update(re.findall(r"`(\w+)`", options))
    assert set(signature(find(kind, part)).parameters) == named[part]


@pytest.mark.parametrize("part", ["local", "bubblewrap"])
def test_options_of_runtimes_are_documented(part: str) -> None:
    """Each option is in the runtime's row of docs/runtimes.md."""
    lines = (DOCS / "runtimes.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| `{part}` |"))
    options = set(signature(find("runtime", part)).parameters)
    if "bounds" in options:  # the limits of its programs, by name
        options = options - {"bounds"} | set(ProgramLimits.__struct_fields__)
    assert options <= set(re.findall(r"`(\w+)`", row))
