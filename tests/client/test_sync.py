"""The blocking client."""

from __future__ import annotations

import asyncio

import pytest

from support.server import TOKENS, RestartableServer
from support.tasks import make_task
from tugline.client.api import Client
from tugline.client.sync import SyncClient
from tugline.errors import Missing, UsageError


def test_both_clients_have_the_same_methods() -> None:
    """Methods of both clients have the same arguments."""
    for name in (name for name in vars(Client) if not name.startswith("_")):
        assert getattr(SyncClient, name).__wrapped__ is getattr(Client, name)


async def test_calls_from_another_thread(live: RestartableServer) -> None:
    """Calls, lists, streams, blocks and errors work in a thread beside the loop."""

    def work() -> None:
        with SyncClient(live.url, TOKENS.client) as client:
            assert client.submit([make_task("a", samples=2)])[0].new
            assert [one.id for one in client.tasks()] == ["a"]
            with client.paused():
                assert client.weights().paused is not None
            assert client.weights().paused is None
            with pytest.raises(Missing):
                client.task("x")
            with pytest.raises(TimeoutError):
                client.wait("a", within_s=0.1)
            asyncio.run_coroutine_threadsafe(live.finish(), loop).result(20)
            assert client.wait("a", within_s=20)[0].usable == 2
            for one in client.results("me"):
                assert one.trajectory is not None
                client.ack("me", one.cursor)
                if one.view.sample == 1:
                    break
            assert list(client.results("me", follow=False)) == []
        with pytest.raises(UsageError, match="not open"):
            client.status()

    loop = asyncio.get_running_loop()
    await asyncio.wait_for(asyncio.to_thread(work), 50)
