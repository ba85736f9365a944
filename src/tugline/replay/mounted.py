"""Run programs at the path of the recorded session's folder.

Prompts and answers are full of absolute paths. In another folder a replay would differ in them, and
recorded tool calls would reach into the folders of the recorded session. Programs are therefore
started in a mount namespace (Linux) in which the new session's folder is mounted over the old one.
Where that is not possible, the run has a folder of its own, and paths are masked and adapted.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path, PurePath

from tugline.errors import UsageError
from tugline.sandbox import base
from tugline.sandbox.host import try_command
from tugline.sandbox.patch import Patch, PatchLimits

Prefix = tuple[tuple[str, ...], tuple[str, ...]]
"""Commands in front of the mount, and in front of the program after it."""
_AS_ROOT: Prefix = (("unshare", "--mount"), ())
_SAME_USER = ("unshare", "--user", "--map-current-user")
_AS_USER: Prefix = ((*_SAME_USER, "--keep-caps", "--mount"), _SAME_USER)
"""The second namespace drops the capabilities that mounting needed."""
_MOUNT = 'mount --bind "$0" "$1" && cd "$2" && shift 2 && exec "$@"'


@contextlib.contextmanager
def find_prefix(old: Path) -> Iterator[Prefix | None]:
    """Find a prefix with which programs see another folder at `old`; None if none works.

    `old` is created if it is missing, and then removed on exit.
    """
    created = [folder for folder in (old, *old.parents) if not folder.exists()]
    candidates = (_AS_ROOT, _AS_USER) if os.geteuid() == 0 else (_AS_USER,)
    with contextlib.suppress(OSError):
        old.mkdir(parents=True, exist_ok=True)
    try:
        yield next((prefix for prefix in candidates if _works(prefix, old)), None)
    finally:
        for folder in created:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _works(prefix: Prefix, old: Path) -> bool:
    command = [*prefix[0], "sh", "-c", _MOUNT, str(old), str(old), str(old), *prefix[1], "true"]
    return not try_command(command)


class MountedRuntime(base.Runtime):
    """A runtime whose programs find their folder at `old`; `prefix` comes from `find_prefix`."""

    def __init__(self, inner: base.Runtime, old: Path, prefix: Prefix) -> None:
        self._inner, self._old, self._prefix = inner, old, prefix

    @contextlib.asynccontextmanager
    async def open(
        self, directory: Path, spec: base.SandboxSpec | None = None
    ) -> AsyncIterator[base.Sandbox]:
        """Open a sandbox in `directory`, which its programs see at the old path."""
        async with self._inner.open(directory, spec) as sandbox:
            yield _MountedSandbox(sandbox, self._old, self._prefix)


class _MountedSandbox(base.Sandbox):
    """Its own paths are the new ones; programs get the old ones."""

    def __init__(self, inner: base.Sandbox, old: Path, prefix: Prefix) -> None:
        self.workdir, self.home, self.logs = inner.workdir, inner.home, inner.logs
        self._inner, self._old, self._prefix = inner, old, prefix
        self._folder = Path(inner.workdir).parent
        if Path(inner.home).parent != self._folder:
            raise UsageError(f"{inner.workdir} and {inner.home} are not in one folder")

    async def put(self, root: PurePath, files: Mapping[str, base.Content]) -> None:
        """Put `files` under `root`, with old paths in their texts."""
        translated = {
            name: self._translate(content) if isinstance(content, str) else content
            for name, content in files.items()
        }
        await self._inner.put(root, translated)

    async def get(self, path: PurePath, *, max_bytes: int = base.MAX_READ_BYTES) -> bytes | None:
        """Read from the inner sandbox."""
        return await self._inner.get(path, max_bytes=max_bytes)

    async def diff(self, limits: PatchLimits | None = None) -> Patch:
        """Diff the inner sandbox."""
        return await self._inner.diff(limits)

    async def expose(self, url: str) -> str:
        """Expose in the inner sandbox."""
        return await self._inner.expose(url)

    async def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_s: float | base.PausableTimeout,
        log_name: str = "agent",
    ) -> base.Exit:
        """Run a program that finds its folder at the old path."""
        before, after = self._prefix
        new, old = str(self._folder), str(self._old)
        workdir = self._translate(str(self.workdir))
        own = {"HOME": self._translate(str(self.home)), "TMPDIR": str(self._old / "tmp")}
        program = map(self._translate, argv)
        return await self._inner.run(
            (*before, "sh", "-c", _MOUNT, new, old, workdir, *after, *program),
            env={**own, **{name: self._translate(value) for name, value in env.items()}},
            timeout_s=timeout_s,
            log_name=log_name,
        )

    def _translate(self, text: str) -> str:
        return text.replace(str(self._folder), str(self._old))
