"""Validation of tasks by the server, and its tokens after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tugline.errors import Invalid
from tugline.launch.server import check_runnable, open_control_plane, serve_control_plane
from tugline.launch.tokens import TOKENS
from tugline.protocol import NodeRegistration
from tugline.server.settings import ServerSettings
from tugline.server.store import nodes
from tugline.types import PluginSpec, Task

SHELL = PluginSpec("shell", {"command": "true"})
TASK = Task(id="t", instruction="x", harness=SHELL, evaluator=PluginSpec("tests"))


@pytest.mark.parametrize(
    ("changes", "field", "part"),
    [
        ({"harness": PluginSpec("shel")}, "harness.name", "'shell'"),
        ({"harness": PluginSpec("shell", {"comand": "x"})}, "harness.options", "command"),
        ({"runtime": PluginSpec("nowhere")}, "runtime.name", "local"),
        ({"evaluator": PluginSpec("no.such:Thing")}, "evaluator.name", "no.such"),
        ({"builder": PluginSpec("per_request", {"x": 1})}, "builder.options", "x"),
    ],
)
def test_invalid_plugins_are_reported_by_field(changes: Any, field: str, part: str) -> None:
    """The error names the field, whether name or options, and what would be right."""
    check_runnable(TASK)
    with pytest.raises(Invalid) as caught:
        check_runnable(replace(TASK, **changes))
    assert caught.value.field == field
    assert part in str(caught.value)


@pytest.mark.parametrize("kind", ["harness", "runtime", "evaluator", "builder"])
def test_a_task_cannot_call_other_classes(kind: str, tmp_path: Path) -> None:
    """``module:Class`` of a task may name plug-ins only, and never `subprocess.Popen`."""
    called = tmp_path / "called"
    options = {"args": ["touch", str(called)]}
    with pytest.raises(Invalid, match=f"{kind} 'subprocess:Popen' must be a subclass") as caught:
        check_runnable(replace(TASK, **{kind: PluginSpec("subprocess:Popen", options)}))
    assert caught.value.field == f"{kind}.name"
    assert not called.exists()


async def test_new_tokens_revoke_nodes_at_the_next_start(tmp_path: Path) -> None:
    """A restart keeps the tokens of nodes, unless `tokens.json` was replaced."""
    registration = NodeRegistration(name="n", slots=1, capacity=1)
    settings = ServerSettings(port=0)
    nodes_found = []
    for replaced in (False, False, True):
        if replaced:
            (tmp_path / TOKENS).unlink()
        async with (
            open_control_plane(settings, tmp_path) as control,
            serve_control_plane(control, settings, tmp_path),
        ):
            if not nodes_found:
                node = await control.dispatcher.register(registration)
            nodes_found.append(await control.database.read(nodes.find_by_token, node.token))
    assert nodes_found == [node.node, node.node, None]
