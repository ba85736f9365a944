"""How bubblewrap is started: as which user, in which namespaces, with which mounts.

The best way that works on a machine is found by trying (`try_pools`): a kernel user for each
sandbox (`stage`), user namespaces with limited counts, or what bwrap makes itself.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tugline.sandbox import quotas, stage
from tugline.sandbox.cache import cache_folder
from tugline.sandbox.overlay import OverlayWorkspace
from tugline.sandbox.processes import close_all, try_command
from tugline.sandbox.view import SYSTEM_PATHS

IDENTITY = ("--unshare-user-try", "--uid", "1000", "--gid", "1000")
_OVERLAY = Path(__file__).with_name("mount_overlay.sh").read_text(encoding="utf-8")


class Launch:
    """How bwrap is started: a command, arguments for mounts, and descriptors that both refer to."""

    def __init__(
        self,
        command: tuple[str, ...],
        arguments: Sequence[str],
        descriptors: tuple[int, ...] = (),
        mounts: int = -1,
    ) -> None:
        """`mounts` is a mount namespace that only this start needs."""
        self.command = command
        self.arguments = arguments
        self.descriptors = (*descriptors, mounts) if mounts >= 0 else descriptors
        self._mounts = mounts

    def close(self) -> None:
        """Close the mount namespace; bwrap keeps it while it runs. May be called again."""
        close_all(self._mounts)
        self._mounts = -1


def prepare(
    own: quotas.UserNamespaces | None,
    arguments: Sequence[str],
    rlimits: Sequence[str],
    directory: Path,
    workspace: OverlayWorkspace,
) -> Launch:
    """Return how to start bwrap with `arguments` in a sandbox's namespaces. Blocks.

    `rlimits` is a command that sets them, for processes whose limits cannot be set later. Raises
    `stage.CannotMapError` if a folder cannot belong to the sandbox's kernel user.
    """
    if own is not None and own.user:
        return _launch_as_user(own, rlimits, arguments, directory, workspace)
    overlay = _overlay_command(workspace)
    if own is None:
        return Launch((*overlay, "bwrap", *IDENTITY), arguments)
    return Launch((*overlay, "bwrap", *_in_namespaces(own)), arguments, own.inside)


def _overlay_command(workspace: OverlayWorkspace) -> tuple[str, ...]:
    """Return the command that mounts the overlay and then starts bwrap; empty without one."""
    if workspace.lower is None:
        return ()
    private = os.geteuid() != 0
    identity = ("--user", "--map-root-user") if private else ()
    script = ("/bin/sh", "-c", _OVERLAY, "sh", workspace.mount_options(private=private))
    return ("unshare", "--mount", *identity, *script, str(workspace.work))


def _launch_as_user(
    own: quotas.UserNamespaces,
    rlimits: Sequence[str],
    arguments: Sequence[str],
    directory: Path,
    workspace: OverlayWorkspace,
) -> Launch:
    """Mount all folders for a kernel user and return how to start bwrap as that user."""
    lower = workspace.lower
    sources = [*stage.list_sources(arguments), *([] if lower is None else [str(lower)])]
    places = stage.choose_places(directory, (path for path in sources if path not in SYSTEM_PATHS))
    locate = partial(stage.find_place, places=places)
    overlay = None
    if lower is not None:
        options = workspace.mount_options(private=False, locate=locate)
        overlay = (locate(workspace.work), options)
    mounts = stage.mount_stage(places, own.owners, overlay)
    command = (
        *(*rlimits, "nsenter", f"--mount=/proc/self/fd/{mounts}"),
        *(f"--setuid={own.user}", f"--setgid={own.user}", "--", "bwrap"),
        *_in_namespaces(own),
    )
    moved = stage.relocate(arguments, places)
    return Launch(command, moved, own.inside, mounts)


def try_pools(arguments: Sequence[str]) -> Iterator[quotas.NamespacePool]:
    """Yield pools of user namespaces in which bwrap starts with these arguments, the best first."""
    if os.geteuid() != 0:  # an overlay is mounted in a user namespace of its own
        return
    for own_users in (True, False):
        pool = quotas.NamespacePool(own_users=own_users)
        try:
            namespaces = pool.take()
            problem = _try_namespaces(namespaces, arguments)
        except OSError:
            continue
        pool.give_back(namespaces)
        if problem:
            pool.close()
        else:
            yield pool


def _try_namespaces(own: quotas.UserNamespaces, arguments: Sequence[str]) -> str:
    """Return the error of a start of bwrap, with an overlay in the cache's folder."""
    if not own.user:
        return try_command(["bwrap", *_in_namespaces(own), *arguments], own.inside)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        base = Path(folder, "base")
        base.mkdir()
        workspace = OverlayWorkspace(Path(folder, "sandbox"), base, {})
        workspace.make()
        launch = _launch_as_user(own, ("prlimit", "--core=0"), arguments, Path(folder), workspace)
        try:
            return try_command([*launch.command, *launch.arguments], launch.descriptors)
        finally:
            launch.close()


def _in_namespaces(namespaces: quotas.UserNamespaces) -> tuple[str, ...]:
    return ("--userns", str(namespaces.limited), "--userns2", str(namespaces.inner))
