"""What listens somewhere: the control plane, the engine, other sessions' gateway, the world."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import served
from attacked import Arena, python, shell, token
from rig import Rig, rig, says
from tugline.sandbox.base import Sandbox
from tugline.types import PluginSpec, Session, Task

CONNECT = """
import socket, sys
for address in sys.argv[1:]:
    host, _, port = address.rpartition(":")
    try: socket.create_connection((host, int(port)), 3).close(); print(address, "reached")
    except OSError as error: print(address, error)
"""
ASK = """
import os, sys, urllib.error, urllib.request as r
os.environ.pop("NO_PROXY", 0); os.environ.pop("no_proxy", 0)
for line in open(sys.argv[1]):
    method, url, key = line.split()
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "status": "completed"}'
    head = {"authorization": "Bearer " + key, "content-type": "application/json"}
    ask = r.Request(url, body if method == "POST" else None, head, method=method)
    try: print(method, url, r.urlopen(ask, timeout=8).status)
    except urllib.error.HTTPError as error: print(method, url, error.code)
    except OSError as error: print(method, url, error)
"""


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Rig]:
    """A real gateway with one session open, and its engine."""
    async with rig(tmp_path / "gateway", says("Done.")) as made:
        yield made


async def ask(box: Sandbox, asks: list[tuple[str, str, str]]) -> list[str]:
    """The status of each (method, URL, key), or the first word of what is wrong."""
    await box.put(box.home, {"asks": "\n".join(map(" ".join, asks))})
    got = await python(box, ASK, box.home / "asks")
    answers = [line.split()[2] for line in got.text.splitlines()]
    assert (got.exit.code, len(answers)) == (0, len(asks)), got.text
    return answers


async def ask_gateway(arena: Arena, url: str, asks: list[tuple[str, str, str]]) -> list[str]:
    """The answers to (method, path, key), asked in a box that reaches `url`."""
    async with arena.box() as sandbox:
        origin = f"http://{urlsplit(await sandbox.expose(url)).netloc}"
        return await ask(sandbox, [(how, f"{origin}{path}", key) for how, path, key in asks])


async def test_reach_the_control_plane(anywhere: Arena) -> None:
    """Not even with a token that is right: there is no way to it."""
    store = f"sqlite:{anywhere.folder}/store.db"
    async with served.serve(store, anywhere.folder / "server") as server, anywhere.box() as box:
        codes = await ask(box, [("GET", f"{server.url}/v1/tasks", served.TOKENS.client)])
    assert (codes == ["200"]) is not anywhere.isolated, codes


async def test_reach_the_engine(anywhere: Arena, gateway: Rig) -> None:
    """Tokens that are sampled past the gateway are in no record."""
    replica = gateway.gateway._upstream.replicas[0].url
    async with anywhere.box() as sandbox:
        await sandbox.expose(gateway.url)
        got = await python(sandbox, CONNECT, urlsplit(replica).netloc)
    assert ("reached" in got.text) is not anywhere.isolated, got.text


async def test_reach_the_network_of_the_host(anywhere: Arena) -> None:
    """No listener of this machine, whichever of its addresses it has; also over IPv6."""
    own = "127.0.0.2"
    with contextlib.suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
    with socket.create_server(("0.0.0.0", 0)) as listener:  # noqa: S104
        port = listener.getsockname()[1]
        async with anywhere.box() as sandbox:
            places = [f"{host}:{port}" for host in ("127.0.0.1", own, "::1", "localhost")]
            got = await python(sandbox, CONNECT, *places)
    reached = got.text.count("reached")
    assert (reached == 0) if anywhere.isolated else (reached >= 2), got.text


async def test_reach_anything_else(sandbox: Arena) -> None:
    """No route, no name, no metadata service: there is loopback and nothing else."""
    look = "cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '; cat /proc/net/route"
    async with sandbox.box() as box:
        devices = await shell(box, look)
        got = await python(box, CONNECT, "169.254.169.254:80", "8.8.8.8:53", "example.org:80")
        began = asyncio.get_running_loop().time()
        send = "import socket; socket.socket(2, 2).sendto(b'x', ('8.8.8.8', 53))"
        told = await python(box, send)
        assert asyncio.get_running_loop().time() - began < 5
    lines = devices.text.splitlines()
    assert lines[0] == "lo"
    assert not [line for line in lines[1:] if line.split()[0] in {"eth0", "tap0"}]
    assert got.text.count("unreachable") == 2, got.text
    assert "reached" not in got.text
    assert "unreachable" in told.text


SOCKET = """
import socket, sys
socket.socket(1).connect(sys.argv[1].replace("@", chr(0))); print("reached")
"""


@contextlib.contextmanager
def listening(name: str) -> Iterator[None]:
    """A socket with a file, as a container engine's, or an abstract one (`@`), as a desktop's."""
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
async def test_reach_sockets_of_the_host(anywhere: Arena, folder: str) -> None:
    """Also a read-only file would let a program talk to, say, the engine of containers."""
    name = f"{folder}{token()}"
    try:
        with listening(name):
            async with anywhere.box() as sandbox:
                got = await python(sandbox, SOCKET, name)
    except PermissionError:
        pytest.skip(f"{folder} is not ours to write to")
    assert ("reached" in got.text) is not anywhere.isolated, got.text


async def test_use_another_sessions_path_or_key(sandbox: Arena, gateway: Rig) -> None:
    """A secret opens its own session's calls and nothing else; a guessed one opens nothing."""
    task = Task(id="t2", instruction="", harness=PluginSpec("shell"), evaluator=PluginSpec("tests"))
    other = Session(id="s2", task="t2", sample=0)
    async with gateway.gateway.open(other, task) as theirs:
        guesses = ["", "x", "tl-", theirs.key[:-1], theirs.key[:-1] + "~", theirs.key.upper()]
        chat = "/v1/chat/completions"
        asks = [("POST", f"/s/s1{chat}", gateway.key)]
        asks += [("POST", f"/s/s2{chat}", gateway.key), ("GET", "/s/s2/v1/models", gateway.key)]
        asks += [
            ("POST", f"/s/s1/../s2{chat}", gateway.key),
            ("POST", f"/s/s1%2f..%2fs2{chat}", gateway.key),
        ]
        asks += [("POST", f"/s/s2{chat}", guess or "none") for guess in guesses]
        asks += [("POST", chat, guess or "none") for guess in guesses]
        codes = await ask_gateway(sandbox, gateway.url, asks)
        assert codes[0] == "200"
        assert set(codes[1:]) <= {"401", "404"}, codes
        assert codes[5:] == ["401"] * (2 * len(guesses))
    assert gateway.gateway.read_calls("s2") == ()
    assert len(gateway.calls) == 1


async def test_command_the_gateway(sandbox: Arena, gateway: Rig) -> None:
    """What is a node's or a trainer's to ask is not served where agents are.

    Nor can the session's own secret post a result.
    """
    paths = ("/v1/weights", "/v1/weights/pause", "/v1/tasks", "/metrics", "/v1/nodes", "/s/s1", "/")
    paths += ("/v1/sessions", "/v1/sessions/s1/result?epoch=0", "/s/s1/v1/sessions/s1/result")
    paths += ("/s/s1/conclude",)
    asks = [(how, path, gateway.key) for path in paths for how in ("GET", "POST")]
    codes = await ask_gateway(sandbox, gateway.url, asks)
    assert set(codes) <= {"401", "404", "405"}, list(zip(asks, codes, strict=True))


async def test_an_evaluators_box_has_no_network(sandbox: Arena, gateway: Rig) -> None:
    """What does not reach for the gateway has no way to it; nor to another box's."""
    async with sandbox.box("agent") as agent, sandbox.box("judge") as judge:
        inside = urlsplit(await agent.expose(gateway.url)).netloc
        assert "reached" in (await python(agent, CONNECT, inside)).text
        assert "refused" in (await python(judge, CONNECT, inside)).text


async def test_go_beyond_the_allow_list(sandbox: Arena, gateway: Rig) -> None:
    """Neither the host behind the proxy nor what is not on the list can be had through it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        urls = [
            f"http://127.0.0.1:{port}/",
            gateway.url,
            "http://localhost:1/",
            "http://a.example/",
        ]
        async with sandbox.box(options={"allow": ["localhost:*", "b.example:443"]}) as box:
            await box.expose(gateway.url)
            codes = await ask(box, [("GET", url, "none") for url in urls])
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


async def test_open_a_socket_of_another_family(sandbox: Arena) -> None:
    """Such as vsock, which no network namespace holds: it leads to the machine below this one."""
    async with sandbox.box() as box:
        lines = (await python(box, FAMILIES)).text.splitlines()
    ends = [(int(family), end) for family, end in map(str.split, lines)]
    assert (1, "opened") in ends
    others = {end for family, end in ends if family not in {1, 2, 10, 16}}
    assert "opened" not in others
    if sandbox.name == "bubblewrap":
        assert others == {"EAFNOSUPPORT"}
