"""Checks of a server's components, from its status alone."""

from __future__ import annotations

from pathlib import Path

from support.deployment import observed
from support.server import TOKENS
from tugline.client.api import Client
from tugline.client.overview import examine
from tugline.server.http.app import Api, serve_api


async def test_engines_and_disk_of_a_node_beside_the_server_are_checked(tmp_path: Path) -> None:
    """An engine that does not answer, and a node without room on its disk, are not healthy."""
    async with (
        observed(tmp_path) as rig,
        serve_api(Api(rig.control, TOKENS, rig.pages)) as url,
        Client(url, TOKENS.read) as client,
    ):
        (engine,) = [check for check in await examine(client) if check.component == "engine"]
        assert (engine.healthy, engine.detail.split()[0]) == (True, *rig.engines.loads)
        rig.engines.loads[engine.detail.split()[0]].up = False
        rig.node.stats.disk_low = True
        checks = {check.component: check for check in await examine(client)}
        assert not checks["engine"].healthy
        assert checks["disk"].detail == "a node accepts no work: its disk is nearly full"
        assert (await client.status()).queue == {}
