"""Tasks in the Harbor format, used by Terminal-Bench 2 and many other benchmarks.

A task is a folder: ``instruction.md``, ``task.toml``, ``environment/`` with a Dockerfile,
``tests/test.sh`` and ``solution/solve.sh``. `path` is one such folder or a folder of them.

``task.toml`` is read strictly: a value of the wrong type is an error that names file, field and
value. A feature that affects the reward and is not supported (steps, several services, Windows, a
verifier image of its own) is an error as well. Settings without an effect are logged once each.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tugline import log
from tugline.datasets.base import SPLIT, Solution, TaskSet, TaskTemplate
from tugline.errors import ConfigError
from tugline.sandbox.base import Mount, expand_variables
from tugline.schema import decode, list_structs, read_text, read_values
from tugline.types import INSTANCE, PluginSpec, Task, Workspace

CONFIG = "task.toml"
_CANARY = re.compile(r"\s*(<!--.*canary.*-->|#.*canary.*)\s*", re.IGNORECASE)
_SOLVE = 'if command -v bash >/dev/null 2>&1; then exec bash "$0"; else exec sh "$0"; fi'
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])B?", re.IGNORECASE)
_MB = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
_MAX_REASONS = 20
_MARGIN_S = 60.0
"""Time of an evaluation for the creation of its sandboxes."""
_log = log.get("tasksets")


class _Agent(msgspec.Struct, frozen=True):
    timeout_sec: float | None = None


class _Verifier(msgspec.Struct, frozen=True):
    timeout_sec: float | None = None
    env: dict[str, str] = {}
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None


class _Environment(msgspec.Struct, frozen=True):
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    memory: str | None = None
    storage: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    """Environment of tests and solution; the agent does not get it."""


class _SolutionTable(msgspec.Struct, frozen=True):
    env: dict[str, str] = {}


class TaskToml(msgspec.Struct, frozen=True):
    """The keys of ``task.toml`` that have an effect."""

    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _SolutionTable = _SolutionTable()
    steps: tuple[dict[str, Any], ...] | None = None


_HARMLESS = frozenset({"schema_version", "version", "source", "allow_internet", "network_mode"})
"""Keys without an effect that every published task has; ignored without a warning."""


@dataclass(kw_only=True, eq=False)
class HarborTaskSet(TaskSet):
    """Task set of Harbor folders: `path` is a task's folder or a folder of them, on each node.

    `build` builds images from Dockerfiles even if ``docker_image`` names one. `in_place` evaluates
    in the agent's sandbox (default: if ``verifier.environment_mode`` is ``shared``). `network`
    lets tests reach the hosts that the runtime allows. `pass_env` lists the node's environment
    variables that tests and solutions may use. `leave_out` has the names of tasks to leave out,
    with a warning; True leaves out every task that is not supported, which else is an error.
    """

    path: str
    build: bool = False
    in_place: bool | None = None
    network: bool = False
    pass_env: Sequence[str] = ()
    leave_out: bool | Sequence[str] = False

    def __post_init__(self) -> None:
        self._root = Path(self.path)

    def tasks(self, template: TaskTemplate) -> Iterator[Task]:
        """Make a task from each folder, in the order of their names.

        Raises `ConfigError` with all tasks that are not supported, before the first task.
        """
        warned: set[str] = set()
        tasks: list[Task] = []
        wrong: dict[str, ConfigError] = {}
        for folder in self._leave_out(self._list_folders()):
            try:
                tasks.append(self._make_task(folder, _read(folder, warned), template))
            except ConfigError as error:
                wrong[folder.name] = error
        if wrong and self.leave_out is not True:
            raise _combine(wrong, self.leave_out or ())
        for reason in map(str, wrong.values()):
            _log.warning("task left out", reason=reason)
        yield from tasks

    def solution(self, task: Task) -> Solution | None:
        """Return a solution that runs the task's ``solution/solve.sh``; None if there is none."""
        alone = (self._root / CONFIG).is_file()
        folder = self._root if alone else self._root / task.tags[INSTANCE]
        if not (folder / "solution" / "solve.sh").is_file():
            return None
        config = _read(folder, set())
        return Solution(
            argv=("sh", "-c", _SOLVE, "/solution/solve.sh"),
            env=expand_variables(config.environment.env | config.solution.env, self.pass_env),
            mounts=(Mount("/solution", str(folder / "solution")),),
        )

    def _list_folders(self) -> list[Path]:
        if (self._root / CONFIG).is_file():
            return [self._root]
        folders = sorted(file.parent for file in self._root.glob(f"*/{CONFIG}"))
        if not folders:
            msg = (
                f"taskset 'harbor': path is {str(self._root)!r}, must be a folder of tasks, "
                f"each a folder with {CONFIG}"
            )
            raise ConfigError(msg)
        return folders

    def _leave_out(self, folders: list[Path]) -> list[Path]:
        """Return the folders without those that `leave_out` names."""
        if isinstance(self.leave_out, bool):
            return folders
        for name in self.leave_out:
            if name not in {folder.name for folder in folders}:
                msg = f"leave_out has {name!r}, which is not a folder in {self.path}"
                raise ConfigError(f"taskset 'harbor': {msg}")
            _log.warning("task left out", reason=f"leave_out has {name!r}")
        return [folder for folder in folders if folder.name not in self.leave_out]

    def _make_task(self, folder: Path, config: TaskToml, template: TaskTemplate) -> Task:
        _check(folder, config)
        seconds = config.verifier.timeout_sec or 600.0
        shared = config.verifier.environment_mode == "shared"
        options: dict[str, Any] = {
            "tests": str(folder / "tests"),
            "timeout_s": seconds,
            "in_place": shared if self.in_place is None else self.in_place,
        }
        if self.network:
            options["network"] = True
        if env := config.environment.env | config.verifier.env:
            options |= {"env": env, "pass_env": list(self.pass_env)}
        limits = {"eval_s": 2 * seconds + _MARGIN_S, "init_s": config.environment.build_timeout_sec}
        if config.agent.timeout_sec:
            limits["agent_s"] = config.agent.timeout_sec
        return template.make(
            folder.name,
            _read_instruction(folder),
            evaluator=PluginSpec("harbor", options),
            runtime=PluginSpec("container", _resources(folder, config.environment)),
            workspace=self._make_workspace(folder, config.environment),
            limits=limits,
            tags=_tags(config),
        )

    def _make_workspace(self, folder: Path, config: _Environment) -> Workspace:
        environment = folder / "environment"
        image = config.docker_image
        if image and not (self.build and (environment / "Dockerfile").is_file()):
            return Workspace(image=image, path=config.workdir)
        if not (environment / "Dockerfile").is_file():
            msg = f"{folder}: needs environment/Dockerfile or environment.docker_image"
            raise ConfigError(msg)
        return Workspace(build=str(environment), path=config.workdir)


def _combine(wrong: Mapping[str, ConfigError], left_out: Sequence[str]) -> ConfigError:
    """Return one error for all unsupported tasks, with the option that leaves them out."""
    reasons = [str(error) for error in wrong.values()]
    more = len(reasons) - _MAX_REASONS
    reasons[_MAX_REASONS:] = [f"and {more} more"] if more > 0 else []
    names = json.dumps(sorted({*left_out, *wrong}), ensure_ascii=False)
    text = "\n".join(f"  {reason}" for reason in reasons)
    return ConfigError(
        f"taskset 'harbor': unsupported tasks ({len(wrong)}):\n{text}\n"
        f"To leave them out, set the option leave_out: {names}"
    )


def _read(folder: Path, warned: set[str]) -> TaskToml:
    """Read ``task.toml``. Raises `ConfigError`."""
    file = folder / CONFIG
    values = _drop_unknown(read_values(file), TaskToml, "", file, warned)
    config = decode(values, TaskToml, source=str(file))
    if config.environment.env:
        _warn(warned, "environment.env", file)
    return config


def _drop_unknown(
    values: Any, kind: type[msgspec.Struct], at: str, file: Path, warned: set[str]
) -> Any:
    """Return `values` without keys that have no effect; log these keys."""
    if not isinstance(values, dict):
        return values
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    known = {}
    for name, value in values.items():
        if name not in fields:
            if value and name not in _HARMLESS:
                _warn(warned, at + name, file)
            continue
        inner = list_structs(fields[name])
        known[name] = (
            _drop_unknown(value, inner[0], f"{at}{name}.", file, warned) if inner else value
        )
    return known


def _warn(warned: set[str], key: str, file: Path) -> None:
    """Log an ignored key once per task set, with the first file that has it."""
    if key not in warned:
        warned.add(key)
        _log.warning("ignored setting", key=key, file=str(file))


def _check(folder: Path, config: TaskToml) -> None:
    """Check that a task is supported. Raises `ConfigError`."""
    environment = folder / "environment"
    # Harbor itself reads this name only; others are files of the task.
    composed = environment / "docker-compose.yaml"
    wrong = None
    if config.steps:
        wrong = (
            f"{CONFIG}: steps has {len(config.steps)} steps; only tasks of one step are supported"
        )
    elif config.environment.os.lower() != "linux":
        wrong = f"{CONFIG}: environment.os is {config.environment.os!r}, must be 'linux'"
    elif _has_own_image(folder, config.verifier):
        wrong = (
            "the verifier has its own image, which is not supported; tests run in the task's image"
        )
    elif config.verifier.environment_mode not in {None, "shared", "separate"}:
        mode = config.verifier.environment_mode
        wrong = f"{CONFIG}: verifier.environment_mode is {mode!r}, must be shared or separate"
    elif composed.exists():
        wrong = (
            f"environment/{composed.name} is not supported; the environment must be a single image"
        )
    elif not (folder / "tests" / "test.sh").is_file():
        wrong = "tests/test.sh is missing"
    if wrong:
        raise ConfigError(f"{folder}: {wrong}")


def _has_own_image(folder: Path, config: _Verifier) -> bool:
    own = config.environment or {}
    separate = config.environment_mode == "separate" or (config.environment_mode is None and own)
    files = ("Dockerfile", "docker-compose.yaml")
    built = any((folder / "tests" / name).is_file() for name in files)
    return bool(separate and (own.get("docker_image") or built))


def _read_instruction(folder: Path) -> str:
    """Read the instruction without leading canary lines, which mark text of benchmarks."""
    lines = read_text(folder / "instruction.md").splitlines(keepends=True)
    while lines and (_CANARY.fullmatch(lines[0]) or not lines[0].strip()):
        lines.pop(0)
    return "".join(lines)


def _resources(folder: Path, config: _Environment) -> dict[str, Any]:
    """Return the task's resources as options of the container runtime."""
    options = {
        "cpus": config.cpus,
        "memory_mb": _megabytes(folder, "memory", config.memory, config.memory_mb),
        "disk_mb": _megabytes(folder, "storage", config.storage, config.storage_mb),
    }
    return {name: value for name, value in options.items() if value}


def _megabytes(folder: Path, name: str, old: str | None, new: int | None) -> int | None:
    if new is not None or old is None:
        return new
    size = _SIZE.fullmatch(old.strip())
    if size is None:
        msg = f"{folder / CONFIG}: environment.{name} is {old!r}, must be a size such as '2G'"
        raise ConfigError(msg)
    return int(float(size[1]) * _MB[size[2].upper()])


def _tags(config: TaskToml) -> Mapping[str, str]:
    """Return tags to select tasks by."""
    tags = {name: config.metadata.get(name) for name in ("difficulty", "category", SPLIT)}
    tags["name"] = config.task.get("name")
    return {name: value for name, value in tags.items() if isinstance(value, str)}
