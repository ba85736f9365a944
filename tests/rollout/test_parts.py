"""Options of parts are compared with their types where a task comes in."""

from __future__ import annotations

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
    """Somebody's own: hints that say nothing of a task file's values, a default of its own."""

    def __init__(
        self,
        *,
        at: Path,
        way: Path | str = "",
        call: Callable[[], int] | None = None,
        seen: NotThere = 1,  # type: ignore[name-defined]  # noqa: F821
    ) -> None:
        super().__init__(command=["true"])
        self.given = (at, way, call, seen)


class Typed(Shell):
    """The same with hints that can be read."""

    def __init__(
        self,
        *,
        at: Path,
        way: Path | str = "",
        call: Callable[[], int] | None = None,
        limit: float = None,  # type: ignore[assignment]  # noqa: RUF013 - as people write it
        **more: int,
    ) -> None:
        super().__init__(command=["true"])
        self.given = (at, way, call, limit, more)


MINE = f"{__name__}:Typed"


@pytest.mark.parametrize(
    "row", Path(__file__).with_name("wrong_options.txt").read_text().splitlines()
)
def test_a_wrong_option_names_its_value_and_what_is_right(row: str) -> None:
    """Before the part is made, so that no text becomes a list of letters."""
    part, line = row.split("  =>  ")
    kind, name, options = part.split(maxsplit=2)
    with pytest.raises(ConfigError) as caught:
        getattr(Parts(), kind)(PluginSpec(name, yaml.safe_load(options)))
    output = str(caught.value)
    assert output.startswith(f"{kind} {name!r}: ")
    assert line in output


@pytest.mark.parametrize("kind", ["Loose", "Typed"])
def test_hints_that_say_nothing_of_plain_values_are_no_bar(kind: str) -> None:
    """A class of one's own, a choice with one, a callable, a name that cannot be looked up."""
    options = {"at": "/a", "way": "b", "call": "c"}
    made: Any = Parts().harness(PluginSpec(f"{__name__}:{kind}", options))
    assert made.given[:3] == ("/a", "b", "c")


def test_a_number_may_be_whole_and_a_default_may_be_given() -> None:
    """YAML writes 2 for 2.0, and null for what is None without being said to be."""
    Parts().runtime(PluginSpec("local", {"cache_gb": 2}))
    made: Any = Parts().harness(PluginSpec(MINE, {"at": "/", "limit": None, "other": 3}))
    assert made.given == ("/", "", None, None, {"other": 3})


def test_a_key_that_is_no_text_is_refused_with_the_task() -> None:
    """However deep it lies."""
    harness = PluginSpec("codex", {"mcp": {"a": [{"b": {5: 1}}]}})
    task = Task(id="t", instruction="i", harness=harness, evaluator=PluginSpec("tests"))
    with pytest.raises(Invalid) as caught:
        check_task(task)
    assert caught.value.field == "harness.options"
    where = "harness.options['mcp']['a'][0]['b']"
    assert str(caught.value) == f"{where} has the key 5, must be a string (in quotes)"
