from __future__ import annotations

import codecs
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from tugline.config import Config, from_mapping, load
from tugline.errors import ConfigError
from tugline.launch.settings import load_settings
from tugline.schema import MAX_PROBLEMS, PositiveFloat, decode, read_values


class Optimizer(Config, frozen=True):
    """A nested configuration."""

    learning_rate: PositiveFloat = 2e-4
    """Peak learning rate."""
    kind: Literal["adamw", "sgd"] = "adamw"
    """Which | rule."""


class Settings(Config, frozen=True, kw_only=True):
    """A configuration such as a command has."""

    name: str
    """What to call the run."""
    steps: Annotated[int, Meta(ge=1, le=1000)] = 30
    """GRPO steps."""
    seed: int | None = None
    """None draws one."""
    optimizer: Optimizer = Optimizer(kind="sgd")
    """Nested."""
    more: tuple[Optimizer, ...] = ()
    weights: dict[str, float] = msgspec.field(default_factory=dict)
    """By name."""
    folder: Path | None = None
    """Where to write."""

    def __post_init__(self) -> None:
        """Names have no spaces."""
        super().__post_init__()
        if " " in self.name:
            msg = f"name is {self.name!r}, must have no space"
            raise ConfigError(msg, "name")


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml_and_toml_are_interchangeable(tmp_path: Path) -> None:
    """Both formats give the same values, which cannot be changed."""
    yaml = load(_write(tmp_path, "a.yaml", "name: x\noptimizer: {learning_rate: 1e-3}\n"), Settings)
    toml = load(
        _write(tmp_path, "a.toml", 'name = "x"\n[optimizer]\nlearning_rate = 1e-3\n'), Settings
    )
    assert yaml == toml
    assert yaml.optimizer.learning_rate == 1e-3
    assert yaml.steps == 30
    with pytest.raises(AttributeError):
        yaml.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "row", Path(__file__).with_name("wrong_settings.txt").read_text().splitlines()
)
def test_mistakes_are_reported_in_one_line(tmp_path: Path, row: str) -> None:
    """The line has the file, the key, the value and what would be right."""
    text, message = codecs.decode(row, "unicode_escape").split("  =>  ")
    with pytest.raises(ConfigError) as caught:
        load(_write(tmp_path, "demo.yaml", text), Settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_configurations_made_in_python_are_checked() -> None:
    """A field that is replaced is checked, too."""
    with pytest.raises(ConfigError, match=r"^learning_rate is -1, must be a number > 0$"):
        Optimizer(learning_rate=-1)
    assert Settings(name="x", folder=Path("a")).folder == Path("a")
    with pytest.raises(ConfigError, match="kind is 'adam', must be one of adamw, sgd"):
        msgspec.structs.replace(Optimizer(), kind="adam")


def test_numbers_of_yaml_1_2(tmp_path: Path) -> None:
    """An exponent needs no point; a hash in quotes stays a string."""
    path = _write(tmp_path, "n.yaml", "[1e-3, -2E5, 1.5e+2, '1e3', 1e, 12ab]")
    assert read_values(path) == [0.001, -200000.0, 150.0, "1e3", "1e", "12ab"]


def test_broken_toml_is_located(tmp_path: Path) -> None:
    """The message has line and column."""
    with pytest.raises(ConfigError, match=r"demo\.toml is not valid TOML: .*line 2, column 8"):
        load(_write(tmp_path, "demo.toml", "a = 1\nsteps =\n"), Settings)


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    """A missing file, a folder, an unknown type and binary data are errors."""
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        load(tmp_path / "absent.yaml", Settings)
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, Settings)
    with pytest.raises(
        ConfigError, match=r"'\.ini' is not supported; use one of \.yaml, \.yml, \.toml"
    ):
        load(_write(tmp_path, "a.ini", "{}"), Settings)
    (tmp_path / "b.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 6\)"):
        load(tmp_path / "b.yaml", Settings)


def test_long_values_are_shortened_in_errors() -> None:
    """The message stays below 200 characters."""
    with pytest.raises(ConfigError) as caught:
        from_mapping({"name": "x", "steps": "9" * 10_000 + "x"}, Settings)
    assert len(str(caught.value)) < 200


def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    """Each unknown key, wrong value at any depth, and missing field has its own path."""
    text = """
        stepz: 3
        seed: many
        optimizer: {learning_rate: 0, kind: adam}
        more: [{}, {learning_rate: x}, {kindd: sgd}, 3]
        weights: {a: 1, b: c}
        folder: 3
    """
    path = _write(tmp_path, "demo.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load(path, Settings)
    problems = [str(each).removeprefix(f"{path}: ") for each in caught.value.problems]
    assert problems == [
        "unknown key 'stepz'; did you mean 'steps'?",
        "name is missing",
        "seed is 'many', must be an integer or null",
        "optimizer.learning_rate is 0, must be a number > 0",
        "optimizer.kind is 'adam', must be one of adamw, sgd",
        "more.1.learning_rate is 'x', must be a number",
        "unknown key 'more.2.kindd'; did you mean 'kind'?",
        "more.3 is 3, must be an object",
        "weights.b is 'c', must be a number",
        "folder is 3, must be a string",
    ]
    assert [each.field for each in caught.value.problems][:3] == ["stepz", "name", "seed"]
    assert str(caught.value) == f"{path}: {'; '.join(problems)}"


def test_reported_mistakes_are_bounded() -> None:
    """A body of a million mistakes is answered with the first 50."""
    with pytest.raises(ConfigError) as caught:
        decode([{"learning_rate": 0, f"x{n}": 1} for n in range(10_000)], list[Optimizer])
    assert len(caught.value.problems) == MAX_PROBLEMS


def test_values_are_changed_by_dotted_key(tmp_path: Path) -> None:
    """Changes are merged into the tables of the file and are checked as strictly as the file."""
    file = tmp_path / "run.yaml"
    file.write_text("name: a\noptimizer:\n  kind: sgd\n", encoding="utf-8")
    changed = load(file, Settings, {"steps": 5, "optimizer.learning_rate": 0.1})
    assert (changed.name, changed.steps) == ("a", 5)
    assert (changed.optimizer.kind, changed.optimizer.learning_rate) == ("sgd", 0.1)
    assert load(file, Settings, {"optimizer": {}}).optimizer.kind == "adamw"
    for changes, message in (
        ({"stepz": 5}, "--set: unknown key 'stepz'.*steps"),
        ({"steps": "many"}, "--set: steps is 'many', must be an integer"),
        ({"name.first": "b"}, "--set name.first: name is 'a', must be a table"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(file, Settings, changes)
    file.write_text("stepz: 1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load(file, Settings, {"steps": 5})


def test_paths_of_a_settings_file_are_relative_to_its_folder(tmp_path: Path) -> None:
    """Wherever the command runs; absolute paths, URLs and values given otherwise are kept."""
    path = tmp_path / "deep" / "settings.yaml"
    path.parent.mkdir()
    path.write_text(
        "engine: {urls: ['http://e:1'], tokenizer: ../models/tok}\n"
        "server: {tls_cert: cert.pem, tls_key: /keys/key.pem, store: 'sqlite:here.db'}\n"
    )
    settings = load_settings(path, server={}, node={}, engine={})
    assert settings.engine.tokenizer == path.parent / "../models/tok"
    assert settings.server.tls == (path.parent / "cert.pem", Path("/keys/key.pem"))
    assert settings.server.store == "sqlite:here.db"
    given = load_settings(path, server={}, node={}, engine={"tokenizer": "mine.json"})
    assert given.engine.tokenizer == Path("mine.json")
