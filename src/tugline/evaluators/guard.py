"""Notice that a run changed the files that decide its verdict.

The agent's code runs beside the tests, so the program that one test runs could rewrite the next
test, or what that test compares with, or leave settings for the runner's next start. Nobody could
deny it that in one sandbox with one user; but a run after which these files differ is not believed.
"""

import asyncio
from collections.abc import Collection, Mapping

import msgspec

from tugline.evaluators.filters import filter_patch
from tugline.evaluators.script import ScriptRunner
from tugline.patch import Patch
from tugline.sandbox.base import Content
from tugline.sandbox.patch import PatchLimits

LIMITS = PatchLimits(files=20_000, seen_files=200_000, file_bytes=128 << 20, total_bytes=512 << 20)
"""Limits of a search for what programs of an evaluation wrote."""
_TOO_MANY = "more new files than can be checked"


class Guard:
    """Watches the trusted and the protected files in the sandbox of `runner`.

    `work` has the rules, and names in `present` the files that are there before the run.
    """

    def __init__(
        self, runner: ScriptRunner, work: ScriptRunner, trusted: Mapping[str, Content]
    ) -> None:
        self._sandbox = runner.sandbox
        self._rules = work.rules
        self._trusted = {path for path, content in trusted.items() if content is not None}
        self._present = runner.present | set(trusted)
        self._before: Mapping[str, object] = {}

    async def begin(self) -> None:
        """Take the state of the files before a run."""
        protected = await asyncio.to_thread(self._rules.list_protected)
        self._before = await self._sandbox.read_states({*protected, *self._trusted})

    async def find_changes(self) -> set[str]:
        """Return the files that were changed or removed, and new ones that a runner would load.

        Ends all programs in the sandbox.
        """
        after = await self._sandbox.read_states(self._before)
        changed = {path for path, state in self._before.items() if after[path] != state}
        made = await self._sandbox.diff(LIMITS)
        if made.notes and not made.files:
            return changed | {_TOO_MANY}
        new = Patch({p: c for p, c in made.files.items() if c and p not in self._present})
        rules = msgspec.structs.replace(self._rules, protected=self._list_loaded())
        _, loaded = await asyncio.to_thread(filter_patch, new, rules)
        return changed | set(loaded)

    def _list_loaded(self) -> Collection[str]:
        """Return the patterns of files that a runner loads, without those of whole folders.

        In a folder of tests, or hidden, tests may write what they like.
        """
        patterns = self._rules.permit_built().protected
        return tuple(each for each in patterns if not each.endswith(("/", "/*")) and each != ".*")
