"""Checks of a server's components, from its status alone."""

from __future__ import annotations

from pathlib import Path

from support.deployment import deploy
from support.server import TOKENS
from tugline.client.api import Client
from tugline.client.overview import examine
from tugline.server.http.app import Api, serve_api


async def test_engines_and_disk_of_a_node_beside_the_server_are_checked(tmp_path: Path) -> None:
    """An engine that does not answer, and a node without room on its disk, are not healthy."""
    async with (
        deploy(tmp_path) as deployment,
        serve_api(Api(deployment.control, TOKENS, deployment.pages)) as url,
        Client(url, TOKENS.read) as client,
    ):
        (engine,) = [check for check in await examine(client) if check.component == "engine"]
        assert (engine.healthy, engine.detail.split()[0]) == (True, *deployment.engines.loads)
        deployment.engines.loads[engine.detail.split()[0]].up = False
        deployment.node.stats.disk_low = True
        checks = {check.component: check for check in await examine(client)}
        assert not checks["engine"].healthy
        assert (
            checks["disk"].detail
            == "a node does not accept sessions, because its disk is nearly full"
        )
        assert (await client.status()).queue == {}
