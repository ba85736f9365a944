"""A training registers its run at the server that it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.server import TOKENS, serve
from support.tasks import make_task
from support.tokenizer import make_rendering
from tugline.chat.engines.generate import Embedded
from tugline.gateway.replicas import Upstream
from tugline.launch.engine import EngineConnection
from tugline.launch.naming import name_run
from tugline.launch.settings import EngineSettings
from tugline.protocol import RunKind
from tugline.server.http.route import Person, Tokens
from tugline.trainers.config import TaskSource, TrainConfig
from tugline.trainers.rollouts import RemoteServer, open_rollout_server
from tugline.types import PluginSpec

URL = "http://127.0.0.1:9"
CONNECTION = EngineConnection((URL,), Upstream([URL], Embedded()), make_rendering())
"""It is not used, because a remote server's nodes have their own."""


def make_config(url: str) -> TrainConfig:
    """A configuration with a remote server."""
    source = TaskSource(taskset=PluginSpec("files"))
    engine = EngineSettings(urls=(URL,))
    return TrainConfig(tasks=source, template={}, server=url, engine=engine)


async def train(config: TrainConfig, folder: Path, task: str, failure: str = "") -> None:
    """Submit a task as a training that then ends, or fails."""
    async with open_rollout_server(config, folder, CONNECTION, print) as server:
        await server.submit([make_task(task)])
        if failure:
            raise RuntimeError(failure)


async def test_a_remote_server_has_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks belong to it; it has ended only if the training did."""
    monkeypatch.setenv("TUGLINE_TOKEN", TOKENS.client)
    folder = tmp_path / "repair"
    folder.mkdir()
    name = name_run(folder)
    async with serve(f"sqlite:{tmp_path / 'db'}", tmp_path) as served:
        config = make_config(served.url)
        with pytest.raises(RuntimeError, match="killed"):
            await train(config, folder, "a", "killed")
        async with RemoteServer(served.url) as client:
            view = await client.run_view(name)
            assert (view.kind, view.ended) == (RunKind.TRAIN, None)
            assert view.configuration["server"] == served.url
            assert [task.id async for task in client.tasks(run=name)] == ["a"]
            await train(config, folder, "b")
            assert (await client.run_view(name)).ended is not None
            assert [task.id async for task in client.tasks(run=name)] == ["a", "b"]


async def test_a_tenant_s_token_without_the_right_trains_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's name does not begin with the tenant's, which does not stop the training."""
    monkeypatch.setenv("TUGLINE_TOKEN", "ann-token")
    async with serve(f"sqlite:{tmp_path / 'db'}", tmp_path) as served:
        people = {"ann": Person("ann-token", tenant="team")}
        served.app.tokens = Tokens(TOKENS.client, TOKENS.join, TOKENS.read, people)
        await train(make_config(served.url), tmp_path, "a")
        async with RemoteServer(served.url) as client:
            assert await client.runs() == []
            assert [task.run async for task in client.tasks()] == [None]
