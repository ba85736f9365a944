"""Network services: the control plane, the engine, the gateway, the host and the internet."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.attacks import Arena, python, shell, token
from support.engine import reply_with
from support.gateway import OpenSession, open_session
from support.server import TOKENS, serve
from tugline.sandbox.base import Sandbox
from tugline.types import PluginSpec, Session, Task

CONNECT = """
import socket, sys
for address in sys.argv[1:]:
    host, _, port = address.rpartition(":")
    try: socket.create_connection((host, int(port)), 3).close(); print(address, "reached")
    except OSError as error: print(address, error)
"""
SEND = """
import os, sys, urllib.error, urllib.request as r
os.environ.pop("NO_PROXY", 0); os.environ.pop("no_proxy", 0)
for line in open(sys.argv[1]):
    method, url, key = line.split()
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "status": "completed"}'
    head = {"authorization": "Bearer " + key, "content-type": "application/json"}
    request = r.Request(url, body if method == "POST" else None, head, method=method)
    try: print(method, url, r.urlopen(request, timeout=8).status)
    except urllib.error.HTTPError as error: print(method, url, error.code)
    except OSError as error: print(method, url, error)
"""


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[OpenSession]:
    """A real gateway with one session open, and its engine."""
    async with open_session(tmp_path / "gateway", reply_with("Done.")) as made:
        yield made


async def send(sandbox: Sandbox, requests: list[tuple[str, str, str]]) -> list[str]:
    """Send each (method, URL, key); returns the statuses, or the first word of an error."""
    await sandbox.put(sandbox.home, {"requests": "\n".join(map(" ".join, requests))})
    result = await python(sandbox, SEND, sandbox.home / "requests")
    statuses = [line.split()[2] for line in result.text.splitlines()]
    assert (result.exit.code, len(statuses)) == (0, len(requests)), result.text
    return statuses


async def send_to_gateway(
    arena: Arena, url: str, requests: list[tuple[str, str, str]]
) -> list[str]:
    """Send each (method, path, key) from a sandbox that reaches `url`; returns the statuses."""
    async with arena.open() as sandbox:
        origin = f"http://{urlsplit(await sandbox.expose(url)).netloc}"
        return await send(sandbox, [(how, f"{origin}{path}", key) for how, path, key in requests])


async def test_reach_the_control_plane(any_arena: Arena) -> None:
    """The control plane is unreachable even with a valid token."""
    folder = any_arena.folder
    serving = serve(f"sqlite:{folder}/store.db", folder / "server")
    async with serving as server, any_arena.open() as sandbox:
        codes = await send(sandbox, [("GET", f"{server.url}/v1/tasks", TOKENS.client)])
    assert (codes == ["200"]) is not any_arena.isolated, codes


async def test_reach_the_engine(any_arena: Arena, gateway: OpenSession) -> None:
    """The engine is unreachable, so that no tokens are sampled without being recorded."""
    replica = gateway.gateway._upstream.replicas[0].url
    async with any_arena.open() as sandbox:
        await sandbox.expose(gateway.url)
        result = await python(sandbox, CONNECT, urlsplit(replica).netloc)
    assert ("reached" in result.text) is not any_arena.isolated, result.text


async def test_reach_the_network_of_the_host(any_arena: Arena) -> None:
    """No listener of the host is reachable, on any of its addresses, IPv6 included."""
    own = "127.0.0.2"
    with contextlib.suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
    with socket.create_server(("0.0.0.0", 0)) as listener:  # noqa: S104
        port = listener.getsockname()[1]
        async with any_arena.open() as sandbox:
            addresses = [f"{host}:{port}" for host in ("127.0.0.1", own, "::1", "localhost")]
            result = await python(sandbox, CONNECT, *addresses)
    reached = result.text.count("reached")
    assert (reached == 0) if any_arena.isolated else (reached >= 2), result.text


async def test_reach_the_internet(arena: Arena) -> None:
    """There is only the loopback device: no route, no DNS, no metadata service."""
    look = "cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '; cat /proc/net/route"
    async with arena.open() as sandbox:
        devices = await shell(sandbox, look)
        result = await python(
            sandbox, CONNECT, "169.254.169.254:80", "8.8.8.8:53", "example.org:80"
        )
        began = asyncio.get_running_loop().time()
        datagram = "import socket; socket.socket(2, 2).sendto(b'x', ('8.8.8.8', 53))"
        sent = await python(sandbox, datagram)
        assert asyncio.get_running_loop().time() - began < 5
    lines = devices.text.splitlines()
    assert lines[0] == "lo"
    assert not [line for line in lines[1:] if line.split()[0] in {"eth0", "tap0"}]
    assert result.text.count("unreachable") == 2, result.text
    assert "reached" not in result.text
    assert "unreachable" in sent.text


SOCKET = """
import socket, sys
socket.socket(1).connect(sys.argv[1].replace("@", chr(0))); print("reached")
"""


@contextlib.contextmanager
def listening(name: str) -> Iterator[None]:
    """Listen on a Unix socket: a file, or an abstract one if the name begins with `@`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name.replace("@", "\0"))
        listener.listen()
        try:
            if not name.startswith("@"):
                Path(name).chmod(0o777)
            yield
        finally:
            Path(name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "folder",
    ["@", "/run/", "/var/tmp/", "/tmp/", "/dev/shm/", "/var/lib/"],  # noqa: S108
)
async def test_reach_sockets_of_the_host(any_arena: Arena, folder: str) -> None:
    """No Unix socket of the host, such as a container engine's, is reachable."""
    name = f"{folder}{token()}"
    try:
        with listening(name):
            async with any_arena.open() as sandbox:
                result = await python(sandbox, SOCKET, name)
    except PermissionError:
        pytest.skip(f"{folder} is not ours to write to")
    assert ("reached" in result.text) is not any_arena.isolated, result.text


async def test_use_another_sessions_path_or_key(arena: Arena, gateway: OpenSession) -> None:
    """A session's key is valid for its own session only; a guessed key for none."""
    task = Task(id="t2", instruction="", harness=PluginSpec("shell"), evaluator=PluginSpec("tests"))
    other = Session(id="s2", task="t2", sample=0)
    async with gateway.gateway.open(other, task) as theirs:
        guesses = ["none", "x", "tl-", theirs.key[:-1], theirs.key[:-1] + "~", theirs.key.upper()]
        chat = "/v1/chat/completions"
        paths = (f"/s/s1{chat}", f"/s/s2{chat}", f"/s/s1/../s2{chat}", f"/s/s1%2f..%2fs2{chat}")
        requests = [("POST", path, gateway.key) for path in paths]
        requests.append(("GET", "/s/s2/v1/models", gateway.key))
        requests += [("POST", path, key) for path in (f"/s/s2{chat}", chat) for key in guesses]
        codes = await send_to_gateway(arena, gateway.url, requests)
        assert codes[0] == "200"
        assert set(codes[1:]) <= {"401", "404"}, codes
        assert codes[5:] == ["401"] * (2 * len(guesses))
    assert gateway.gateway.read_calls("s2") == ()
    assert len(gateway.calls) == 1


async def test_command_the_gateway(arena: Arena, gateway: OpenSession) -> None:
    """The gateway serves agents none of the API for nodes and trainers.

    A session's key cannot post a result either.
    """
    paths = ("/v1/weights", "/v1/weights/pause", "/v1/tasks", "/metrics", "/v1/nodes", "/s/s1", "/")
    paths += ("/v1/sessions", "/v1/sessions/s1/result?epoch=0", "/s/s1/v1/sessions/s1/result")
    paths += ("/s/s1/conclude",)
    requests = [(how, path, gateway.key) for path in paths for how in ("GET", "POST")]
    codes = await send_to_gateway(arena, gateway.url, requests)
    assert set(codes) <= {"401", "404", "405"}, list(zip(requests, codes, strict=True))


async def test_reach_the_gateway_from_an_evaluators_sandbox(
    arena: Arena, gateway: OpenSession
) -> None:
    """A sandbox without an exposed gateway reaches neither it nor another sandbox's port."""
    async with arena.open("agent") as agent, arena.open("evaluator") as evaluator:
        inside = urlsplit(await agent.expose(gateway.url)).netloc
        assert "reached" in (await python(agent, CONNECT, inside)).text
        assert "refused" in (await python(evaluator, CONNECT, inside)).text


async def test_go_beyond_the_allow_list(arena: Arena, gateway: OpenSession) -> None:
    """The proxy connects neither to the host nor to addresses that are not on the list."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        hosts = [f"127.0.0.1:{port}", "localhost:1", "a.example"]
        urls = [gateway.url, *(f"http://{host}/" for host in hosts)]
        async with arena.open(options={"allow": ["localhost:*", "b.example:443"]}) as sandbox:
            await sandbox.expose(gateway.url)
            codes = await send(sandbox, [("GET", url, "none") for url in urls])
    assert codes == ["403"] * len(urls)


FAMILIES = """
import errno, socket
for family in range(46):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            socket.socket(family, kind).close()
            print(family, "opened")
        except OSError as error:
            print(family, errno.errorcode[error.errno])
"""


async def test_open_a_socket_of_another_family(arena: Arena) -> None:
    """Only Unix, IP and netlink sockets open; a vsock, which no namespace isolates, does not."""
    async with arena.open() as sandbox:
        lines = (await python(sandbox, FAMILIES)).text.splitlines()
    ends = [(int(family), end) for family, end in map(str.split, lines)]
    assert (1, "opened") in ends
    others = {end for family, end in ends if family not in {1, 2, 10, 16}}
    assert "opened" not in others
    if arena.name == "bubblewrap":
        assert others == {"EAFNOSUPPORT"}
