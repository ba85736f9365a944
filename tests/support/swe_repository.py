"""The small SWE repository of `examples/swe_gym`, made for tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec

from tugline.datasets.base import TaskTemplate
from tugline.datasets.swe import SweTaskSet
from tugline.types import Task

EXAMPLE = Path(__file__).parents[2] / "examples" / "swe_gym"


def make_repository(folder: Path) -> list[dict[str, Any]]:
    """The repository `larder` and `rows.jsonl` in `folder`; returns the rows."""
    spec = importlib.util.spec_from_file_location("make_rows", EXAMPLE / "toy" / "make_rows.py")
    if spec is None or spec.loader is None:
        raise ImportError(EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The plug-ins of these tests take seconds to import, those of the repository need none.
    module.PYTEST = f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {module.PYTEST}"
    rows: list[dict[str, Any]] = module.main(folder)
    return rows


def make_template(**values: Any) -> TaskTemplate:
    """Common fields of the tasks; the agent does nothing."""
    shell = {"name": "shell", "options": {"command": "true"}}
    return TaskTemplate.read({"harness": shell, **values}, "test", Path())


def tasks(taskset: SweTaskSet, **values: Any) -> list[Task]:
    """The tasks of the repository."""
    return list(taskset.tasks(make_template(**values)))


def write_rows(path: Path, *rows: object) -> str:
    """Write rows as JSON lines."""
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return str(path)
