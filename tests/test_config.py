from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError, field_validator

from tugline.config import Config, describe, from_mapping, load
from tugline.errors import ConfigError


class Optimizer(Config):
    """How weights move."""

    learning_rate: float = Field(2e-4, gt=0)
    """Peak learning rate."""
    kind: Literal["adamw", "sgd"] = "adamw"
    """Which | rule."""


class Settings(Config):
    """A model such as a command has."""

    name: str
    """What to call the run."""
    steps: int = Field(30, ge=1, le=1000)
    """GRPO steps."""
    seed: int | None = None
    """None draws one."""
    optimizer: Optimizer = Optimizer(kind="sgd")
    """Nested."""
    more: tuple[Optimizer, ...] = ()

    @field_validator("name")
    @classmethod
    def _no_spaces(cls, value: str) -> str:
        if " " in value:
            msg = "has a space; names have none"
            raise ValueError(msg)
        return value


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml_and_toml_give_the_same_frozen_values(tmp_path: Path) -> None:
    """The two file types are interchangeable, and what was read cannot be changed."""
    yaml = load(_write(tmp_path, "a.yaml", "name: x\noptimizer: {learning_rate: 1e-3}\n"), Settings)
    toml = load(
        _write(tmp_path, "a.toml", 'name = "x"\n[optimizer]\nlearning_rate = 1e-3\n'), Settings
    )
    assert yaml == toml
    assert yaml.optimizer.learning_rate == 1e-3
    assert yaml.steps == 30
    with pytest.raises(ValidationError):
        yaml.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nstepz: 3", "unknown key 'stepz' in demo.yaml; did you mean 'steps'?"),
        ("stepz: 3", "unknown key 'stepz' in demo.yaml; did you mean 'steps'? (and 1 more)"),
        (
            "name: x\noptimizer: {learning_rat: 3}",
            "unknown key 'optimizer.learning_rat' in demo.yaml; did you mean 'optimizer.learning",
        ),
        (
            "name: x\nmore: [{zzz: 3}]",
            "unknown key 'more.0.zzz' in demo.yaml (known: kind, learning_rate)",
        ),
        ("steps: 3", "key 'name' is missing in demo.yaml"),
        ("", "key 'name' is missing in demo.yaml"),
        ("name: x\nsteps: -3", "steps: -3 is not >= 1 (demo.yaml)"),
        ("name: x\nsteps: 3000", "steps: 3000 is not <= 1000 (demo.yaml)"),
        (
            "name: x\noptimizer: {learning_rate: 0}",
            "optimizer.learning_rate: 0 is not > 0.0 (demo.yaml)",
        ),
        ("name: x\noptimizer: {kind: adam}", "optimizer.kind: 'adam' should be 'adamw' or 'sgd'"),
        ("name: x\nsteps: many", "steps: 'many' should be a valid integer"),
        ("name: x\noptimizer: {learning_rate: .nan}", "learning_rate: nan should be a finite"),
        ("name: a b", "name: 'a b' has a space; names have none (demo.yaml)"),
        ("name: x\nname: y", "key 'name' stands twice (line 2, column 1)"),
        ("name: [", "demo.yaml is not valid YAML: "),
        ("name: [", "(line 1, column 8)"),
        ("name: \x00", "demo.yaml is not valid YAML: "),
        ("- a\n- b", "demo.yaml holds ['a', 'b']; keys and values are needed"),
        ("1: x", "demo.yaml"),
    ],
)
def test_each_mistake_is_one_line_that_says_what_would_be_right(
    tmp_path: Path, text: str, message: str
) -> None:
    """File, key, value and remedy stand in one line, whatever the mistake."""
    with pytest.raises(ConfigError) as caught:
        load(_write(tmp_path, "demo.yaml", text), Settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_toml_says_where(tmp_path: Path) -> None:
    """TOML errors carry line and column as well."""
    with pytest.raises(ConfigError, match=r"demo\.toml is not valid TOML: .*line 2, column 8"):
        load(_write(tmp_path, "demo.toml", "a = 1\nsteps =\n"), Settings)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """A missing file, a folder, a foreign type and binary data each say what is wrong."""
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load(tmp_path / "absent.yaml", Settings)
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, Settings)
    with pytest.raises(ConfigError, match=r"'\.json' is unknown; use \.yaml, \.yml or \.toml"):
        load(_write(tmp_path, "a.json", "{}"), Settings)
    (tmp_path / "b.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 6\)"):
        load(tmp_path / "b.yaml", Settings)


def test_long_values_are_shortened_in_errors() -> None:
    """A pasted document in the wrong place does not fill the screen."""
    with pytest.raises(ConfigError) as caught:
        from_mapping({"name": "x", "steps": "9" * 10_000 + "x"}, Settings)
    assert len(str(caught.value)) < 200


def test_describe_makes_a_row_of_every_key() -> None:
    """The reference table has key, type with bounds, default and meaning, nested keys dotted."""
    assert describe(Settings) == [
        "| `name` | string | required | What to call the run. |",
        "| `steps` | integer, >= 1, <= 1000 | `30` | GRPO steps. |",
        "| `seed` | integer or null | `None` | None draws one. |",
        "| `optimizer.learning_rate` | number, > 0 | `0.0002` | Peak learning rate. |",
        "| `optimizer.kind` | `adamw` or `sgd` | `sgd` | Which \\| rule. |",
        "| `more.learning_rate` | number, > 0 | `0.0002` | Peak learning rate. |",
        "| `more.kind` | `adamw` or `sgd` | `adamw` | Which \\| rule. |",
    ]


def test_describe_refuses_a_field_without_a_sentence() -> None:
    """An option that nobody explains does not get into a release."""

    class Silent(Config):
        depth: int = 1

    with pytest.raises(ConfigError, match=r"Silent\.depth has no docstring"):
        describe(Silent)
