"""The folder of another session as the place where programs run.

Prompts and answers are full of absolute paths. A replay elsewhere would not only differ in them:
recorded tool calls would reach into the folders of the recorded session. So programs are started
in a mount namespace (Linux), where the new session's folder lies over the old one's. Where that
cannot be had, the run is in its own folder, and paths are masked and adapted.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from tugline.errors import UsageError
from tugline.sandbox.base import MAX_READ_BYTES, Content, Exit, Runtime, Sandbox, SandboxSpec
from tugline.sandbox.patch import Patch, PatchLimits
from tugline.sandbox.pausable_timeout import PausableTimeout

Start = tuple[tuple[str, ...], tuple[str, ...]]
"""What stands before the mounting, and before the program once it is done."""
_AS_ROOT: Start = (("unshare", "--mount"), ())
_SAME_USER = ("unshare", "--user", "--map-current-user")
_AS_USER: Start = ((*_SAME_USER, "--keep-caps", "--mount"), _SAME_USER)
"""The second name space takes away what the first one gave: the right to mount, and others."""
_MOUNT = 'mount --bind "$0" "$1" && cd "$2" && shift 2 && exec "$@"'
_PROBE_S = 20.0


@contextlib.contextmanager
def mountable(old: Path) -> Iterator[Start | None]:
    """What to start programs with so that they see another folder at `old`; None if they cannot.

    `old` is made if it is gone, and removed again when left.
    """
    made = [folder for folder in (old, *old.parents) if not folder.exists()]
    tries = (_AS_ROOT, _AS_USER) if os.geteuid() == 0 else (_AS_USER,)
    with contextlib.suppress(OSError):
        old.mkdir(parents=True, exist_ok=True)
    try:
        yield next((start for start in tries if _works(start, old)), None)
    finally:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _works(start: Start, old: Path) -> bool:
    command = [*start[0], "sh", "-c", _MOUNT, str(old), str(old), str(old), *start[1], "true"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


class SamePlace(Runtime):
    """A runtime whose programs find their folder at `old`; `start` is what `mountable` gave."""

    def __init__(self, inner: Runtime, old: Path, start: Start) -> None:
        self._inner, self._old, self._start = inner, old, start

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: SandboxSpec | None = None
    ) -> AsyncIterator[Sandbox]:
        """A box in `directory`, which its programs know by the other name."""
        async with self._inner.open(directory, spec) as box:
            yield _Box(box, self._old, self._start)

    def reap(self, directory: Path) -> int:
        """As the inner runtime does."""
        return self._inner.reap(directory)

    def check_available(self) -> str | None:
        """As the inner runtime says."""
        return self._inner.check_available()

    def list_weaknesses(self) -> Sequence[str]:
        """As the inner runtime says."""
        return self._inner.list_weaknesses()


class _Box(Sandbox):
    """Paths of the inner sandbox are this machine's; programs are told the others."""

    def __init__(self, inner: Sandbox, old: Path, start: Start) -> None:
        self.workdir, self.home, self.logs = inner.workdir, inner.home, inner.logs
        self._inner, self._old, self._start = inner, old, start
        self._here = Path(inner.workdir).parent
        if Path(inner.home).parent != self._here:
            msg = f"{inner.workdir} and {inner.home} are not in one folder"
            raise UsageError(msg)

    async def put(self, root: PurePath, files: Mapping[str, Content]) -> None:
        """Put `files` under `root`, with the paths in their texts as programs see them."""
        await self._inner.put(
            root,
            {
                name: self._seen(content) if isinstance(content, str) else content
                for name, content in files.items()
            },
        )

    async def get(self, path: PurePath, *, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """As the inner box has it."""
        return await self._inner.get(path, max_bytes=max_bytes)

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """As in the inner box."""
        return await self._inner.diff(limits)

    async def expose(self, url: str) -> str:
        """As in the inner box."""
        return await self._inner.expose(url)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | PausableTimeout,
        log_name: str = "agent",
    ) -> Exit:
        """Run a program where it finds its folder at the old place."""
        before, after = self._start
        here, old, work = str(self._here), str(self._old), self._seen(str(self.workdir))
        own = {"HOME": self._seen(str(self.home)), "TMPDIR": str(self._old / "tmp")}
        return await self._inner.run(
            (*before, "sh", "-c", _MOUNT, here, old, work, *after, *map(self._seen, argv)),
            env={**own, **{name: self._seen(value) for name, value in env.items()}},
            timeout_s=timeout_s,
            log_name=log_name,
        )

    def _seen(self, text: str) -> str:
        return text.replace(str(self._here), str(self._old))
