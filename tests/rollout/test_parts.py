"""Options of plug-ins are checked against their type hints."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tugline.errors import ConfigError, Invalid
from tugline.harnesses.shell import Shell
from tugline.rollout.parts import Parts
from tugline.server.validation import check_task
from tugline.types import PluginSpec, Task


class Loose(Shell):
    """A plug-in with hints that do not apply to values of a task file, or cannot be resolved."""

    def __init__(
        self,
        *,
        folder: Path,
        path: Path | str = "",
        call: Callable[[], int] | None = None,
        seen: NotThere = 1,  # type: ignore[name-defined]  # noqa: F821
    ) -> None:
        super().__init__(command=["true"])
        self.options = (folder, path, call, seen)


class Typed(Shell):
    """A plug-in whose hints can be resolved."""

    def __init__(
        self,
        *,
        folder: Path,
        path: Path | str = "",
        call: Callable[[], int] | None = None,
        limit: float = None,  # type: ignore[assignment]  # noqa: RUF013 - as in real plug-ins
        **more: int,
    ) -> None:
        super().__init__(command=["true"])
        self.options = (folder, path, call, limit, more)


MINE = f"{__name__}:Typed"


@pytest.mark.parametrize(
    "row", Path(__file__).with_name("wrong_options.txt").read_text().splitlines()
)
def test_wrong_options_are_reported(row: str) -> None:
    """The error has the value and what is allowed, before the plug-in is made."""
    part, message = row.split("  =>  ")
    kind, name, options = part.split(maxsplit=2)
    with pytest.raises(ConfigError) as caught:
        getattr(Parts(), kind)(PluginSpec(name, yaml.safe_load(options)))
    output = str(caught.value)
    assert output.startswith(f"{kind} {name!r}: ")
    assert message in output


@pytest.mark.parametrize("kind", ["Loose", "Typed"])
def test_other_hints_are_not_checked(kind: str) -> None:
    """A class, a union with one, a callable, and an unknown name accept any value."""
    options = {"folder": "/a", "path": "b", "call": "c"}
    made: Any = Parts().harness(PluginSpec(f"{__name__}:{kind}", options))
    assert made.options[:3] == ("/a", "b", "c")


def test_integers_and_defaults_are_accepted() -> None:
    """A float may be given as 2, and a default of None as null."""
    Parts().runtime(PluginSpec("local", {"cache_gb": 2}))
    made: Any = Parts().harness(PluginSpec(MINE, {"folder": "/", "limit": None, "other": 3}))
    assert made.options == ("/", "", None, None, {"other": 3})


def test_keys_of_options_must_be_strings() -> None:
    """A key that is not text is refused at any depth."""
    harness = PluginSpec("codex", {"mcp": {"a": [{"b": {5: 1}}]}})
    task = Task(id="t", instruction="i", harness=harness, evaluator=PluginSpec("tests"))
    with pytest.raises(Invalid) as caught:
        check_task(task)
    assert caught.value.field == "harness.options"
    where = "harness.options['mcp']['a'][0]['b']"
    assert str(caught.value) == f"{where} has the key 5, but keys must be strings (in quotes)"


def make_tests(number: int, size: int) -> PluginSpec:
    """Tests of one task."""
    return PluginSpec("tests", {"files": {"test_a.py": f"# {number}\n" + "x" * size}})


def test_instances_are_shared_while_they_are_used() -> None:
    """Sharing does not depend on the order of options, nor on how many instances are kept."""
    parts = Parts()
    first = parts.evaluator(PluginSpec("tests", {"files": {"test_a.py": ""}, "timeout_s": 5.0}))
    for number in range(300):
        parts.evaluator(make_tests(number, 10))
    again = PluginSpec("tests", {"timeout_s": 5.0, "files": {"test_a.py": ""}})
    assert parts.evaluator(again) is first


@pytest.mark.parametrize(("count", "size"), [(1000, 10), (40, 1 << 20)])
def test_the_tests_of_ended_tasks_are_not_kept(count: int, size: int) -> None:
    """A node keeps a bounded number of tests, of a bounded size, however many tasks it runs."""
    parts = Parts()
    kept = [weakref.ref(parts.evaluator(make_tests(number, size))) for number in range(count)]
    alive = [ref for ref in kept if ref() is not None]
    assert 0 < len(alive) <= min(128, max(1, (4 << 20) // size))
    assert kept[-1]() is not None
