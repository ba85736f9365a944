"""The door of a server: a task whose parts cannot be made is refused, nothing else is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tugline.errors import Invalid
from tugline.launch.server import TOKENS, check_runnable, open_control_plane, serve_control_plane
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
def test_a_part_that_cannot_be_made_is_named(changes: Any, field: str, part: str) -> None:
    """Which part, whether its name or its options, and what would be right."""
    check_runnable(TASK)
    with pytest.raises(Invalid) as caught:
        check_runnable(replace(TASK, **changes))
    assert caught.value.field == field
    assert part in str(caught.value)


@pytest.mark.parametrize("kind", ["harness", "runtime", "evaluator", "builder"])
def test_a_task_cannot_have_the_server_call_what_is_no_part(kind: str, tmp_path: Path) -> None:
    """``module:Class`` reaches parts, not every program and function there is."""
    mark = tmp_path / "called"
    options = {"args": ["touch", str(mark)]}
    with pytest.raises(Invalid, match=f"is no {kind}") as caught:
        check_runnable(replace(TASK, **{kind: PluginSpec("subprocess:Popen", options)}))
    assert caught.value.field == f"{kind}.name"
    assert not mark.exists()


async def test_nodes_join_again_after_the_tokens_are_replaced(tmp_path: Path) -> None:
    """Who replaces `tokens.json` shuts out everybody who had a token by it."""
    hello = NodeRegistration(name="n", slots=1, capacity=1)
    settings = ServerSettings(port=0)
    found = []
    for replaced in (False, False, True):
        if replaced:
            (tmp_path / TOKENS).unlink()
        async with (
            open_control_plane(settings, tmp_path) as control,
            serve_control_plane(control, settings, tmp_path),
        ):
            if not found:
                node = await control.dispatcher.register(hello)
            found.append(await control.database.read(nodes.find_by_token, node.token))
    assert found == [node.node, node.node, None]
