"""Run the agent's programs in one sandbox and make the verdict in another.

In one sandbox, a program that is judged runs as the same user as its judge: it can trace it, end
it, and write its report. Here the judge's sandbox has none of the agent's work. Its program
``$JUDGED`` runs its arguments in the other sandbox, which has the work and neither the evaluator's
files nor its report, and passes through input, output, errors and exit code (124 after a minute).
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path

from tugline.evaluators.script import ScriptRunner
from tugline.patch import FileChange

_PROGRAM = ".judged"
_CLIENT = Path(__file__).with_name("judged.sh").read_bytes()
"""The program ``$JUDGED``: requests a run by files in its home and waits for the result."""
_REDIRECT = 'exec "$@" < "$0.input" 2> "$0.error"'
_REQUEST_S = 60.0
_POLL_S = 0.02
_MAX_OUTPUT_BYTES = 8 << 20


@contextlib.asynccontextmanager
async def serve_programs(judge: ScriptRunner, work: ScriptRunner) -> AsyncIterator[dict[str, str]]:
    """Run what ``$JUDGED`` asks for in the sandbox of `work`; yield the judge's environment.

    Raises errors of either sandbox.
    """
    home = judge.sandbox.home
    await judge.sandbox.put(home, {_PROGRAM: FileChange(_CLIENT, executable=True)})
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(_serve_requests(judge, work))
            yield {"JUDGED": str(home / _PROGRAM)}
            serving.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _serve_requests(judge: ScriptRunner, work: ScriptRunner) -> None:
    """Run the programs that the judge requests, one after another."""
    client = judge.sandbox
    server = work.sandbox
    for number in itertools.count(1):
        folder = f"{_PROGRAM}.{number}"
        log_name = f"judged-{number}"
        argv = None
        while argv is None:
            await asyncio.sleep(_POLL_S)
            argv = await client.get(client.home / folder / "argv")
        stdin = await client.get(client.home / folder / "input", max_bytes=_MAX_OUTPUT_BYTES)
        await server.put(server.home, {f"{number}.input": FileChange(stdin or b"")})
        words = os.fsdecode(argv).split("\0")[:-1]
        end = await work.run(
            ("sh", "-c", _REDIRECT, str(server.home / str(number)), *words),
            timeout_s=_REQUEST_S,
            log_name=log_name,
        )
        code = end.code if end.code >= 0 else 128 - end.code  # 128 plus the signal, as in a shell
        if end.timed_out:
            code = 124
        output = await work.read_log(log_name, head=_MAX_OUTPUT_BYTES, tail=0)
        error = await server.get(server.home / f"{number}.error", max_bytes=_MAX_OUTPUT_BYTES)
        for name, data in (("output", output), ("error", error or b""), ("code", b"%d\n" % code)):
            await client.put(client.home, {f"{folder}/{name}": FileChange(data)})
