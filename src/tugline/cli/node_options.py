"""Options of commands that run sessions on this machine, and the settings that they give.

Flags override the configuration file, which has all settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from msgspec.structs import replace

from tugline.cli.key_values import parse_options
from tugline.cli.options import DEMO_MODEL, Changes
from tugline.cli.output import echo
from tugline.datasets.files import SetFile
from tugline.errors import UsageError
from tugline.launch.settings import Flags, Settings, load_settings, name_model
from tugline.types import Mode

Processes = int | Literal["auto"] | None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of commands that run sessions on this machine."""

    config: Path | None = None
    """YAML or TOML file with any setting."""
    engine: list[str] | None = None
    """URL of the engine; repeat for replicas."""
    model: str | None = None
    """With --engine: served name of the model (default: the first); else: model folder."""
    tokenizer: Path | None = None
    """With --engine: path of the model's tokenizer.json, for exact mode."""
    renderer: str | None = None
    """Chat template for exact mode, such as qwen3."""
    api_key_env: str | None = None
    """With --engine: environment variable with the engine's API key."""
    messages_only: bool = False
    """Use an API that reports no token ids."""
    slots: int | None = None
    """Number of concurrent agents."""
    changes: Changes = None
    log_file: Annotated[Path | None, Parameter("--log")] = None
    """File to write the log to, as JSON lines."""

    def load(
        self,
        *,
        server: Flags | None = None,
        name: str | None = None,
        processes: int | str | None = None,
        task_sets: bool = False,
    ) -> Settings:
        """Load the settings from their file and these flags. Raises `UsageError`.

        With `task_sets`, the command also has `task_changes`, which are no settings.
        """
        changes = parse_options(self.changes, "--set")
        if task_sets:
            changes = {key: changes[key] for key in changes.keys() - self.task_changes.keys()}
        engine = {
            "urls": self.engine or None,
            "tokenizer": self.tokenizer,
            "renderer": self.renderer,
            "api_key_env": self.api_key_env,
            "mode": Mode.TEXT.value if self.messages_only else None,
        }
        node = {"slots": self.slots, "name": name, "processes": processes}
        settings = load_settings(
            self.config, server=server or {}, node=node, engine=engine, changes=changes
        )
        return settings if self.model is None else name_model(settings, self.model)

    @property
    def task_changes(self) -> Mapping[str, Any]:
        """Changes of task-set files by dotted key, as opposed to those of the settings."""
        changes = parse_options(self.changes, "--set")
        own = SetFile.__struct_fields__
        return {key: value for key, value in changes.items() if key.partition(".")[0] in own}


DEFAULT_NODE = NodeOptions()
"""Options that override nothing."""


def add_default_engine(settings: Settings) -> Settings:
    """Serve the demo's tiny model if no engine is given.

    Raises `UsageError` if file and flags contradict each other.
    """
    engine = settings.engine
    elsewhere = engine.urls or settings.ray.engine_actors
    if elsewhere and engine.model:
        msg = "engine.model is for an engine in this process; with engine.urls, set served_name"
        raise UsageError(msg)
    if engine.tokenizer and not elsewhere:
        msg = "--tokenizer requires the URL of an engine; a model folder has its own tokenizer"
        raise UsageError(msg)
    if elsewhere or engine.model:
        return settings
    echo("no engine is configured: serving the demo's tiny model (--engine URL for another one)")
    return replace(settings, engine=replace(engine, model=DEMO_MODEL))
