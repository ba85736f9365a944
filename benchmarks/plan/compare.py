"""Compare ``tugline plan`` with a run of real agents: planned and measured cost of a session.

A scripted engine answers at a known rate. Server and node are separate processes, so that their
processor time can be compared with the parts of a plan. Sessions of two lengths run in bubblewrap,
call their shell once per turn and read pieces of this package. The plan gets the token counts of
the run, so that only its constants are compared. The idle use of server and node is measured first
and subtracted. Processor time of agents is that of the node's child processes.

    python benchmarks/plan/compare.py [--harness pi] [--sessions 12] [--turns 4 16] [--json]
"""

# ruff: noqa: INP001, T201 - a program, not a package
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

import tugline
from tugline.cli.harness_check import cases_of
from tugline.cli.plan import BUSY, DATABASE_S, Workload
from tugline.client.api import Client
from tugline.inference.server import create_app
from tugline.protocol import EventKind
from tugline.recording.file import read
from tugline.recording.folder import list_recordings
from tugline.testing import (
    CONTEXT_WINDOW,
    END_ID,
    Reply,
    ScriptedEngine,
    ScriptedModel,
    ScriptedTurn,
    make_tokenizer,
)
from tugline.types import Ids, Limits, PluginSpec, Task
from tugline.web.serve import serve

TUGLINE = Path(sys.executable).with_name("tugline")
LINES = [
    line
    for path in sorted(Path(str(tugline.__file__)).parent.rglob("*.py"))
    for line in path.read_text(encoding="utf-8").splitlines()
][:1000]
WAIT_S = 900.0
IDLE_S = 20.0
WARM = 2


def instruct(turns: int) -> str:
    """Make the instruction, which selects the script."""
    return f"Look {turns} times at code.txt."


def script(harness: str, turns: int) -> list[ScriptedTurn]:
    """Make the turns: each but the last has some text and a shell command."""
    [case, *_] = cases_of(harness)
    rng = random.Random(turns)
    commands = []
    for _ in range(turns - 1):
        first, lines = rng.randrange(len(LINES)), rng.choices(LINES, k=8)
        call = case.call(f"sed -n {first},{first + 29}p code.txt")
        commands.append(ScriptedTurn(" ".join(" ".join(lines).split()), calls=(call,)))
    return [*commands, ScriptedTurn("Done.")]


@contextlib.asynccontextmanager
async def serve_engine(options: argparse.Namespace, folder: Path) -> AsyncIterator[str]:
    """Serve the scripts at the given rate, with random logprobs."""
    tokenizer, rng = make_tokenizer(), random.Random(0)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    lengths = {WARM, *options.turns}
    scripts = {instruct(turns): script(options.harness, turns) for turns in lengths}
    model = ScriptedModel(tokenizer, scripts)

    def reply(prompt: Ids, request: str) -> Reply:
        scripted = model.reply(prompt, request)
        logprobs = [-rng.expovariate(2.0) for _ in scripted.ids]
        return replace(scripted, delay_s=options.token_ms / 1000, logprobs=logprobs)

    engine = ScriptedEngine(
        reply, vocab_size=tokenizer.size, max_model_len=CONTEXT_WINDOW, eos_ids=[END_ID]
    )
    async with serve(create_app(engine, model_name="scripted")) as url:
        yield url


@contextlib.contextmanager
def program(folder: Path, name: str, *argv: str, **env: str) -> Iterator[psutil.Process]:
    """Run a ``tugline`` command in `folder` during the block."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [TUGLINE, *argv], cwd=folder, env={**os.environ, **env}, stdout=log, stderr=log
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


async def until(condition: Callable[[], Any], message: str) -> None:
    """Wait until `condition()` is true; stop with `message` after `WAIT_S`."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"the benchmark stopped: {message} within {WAIT_S:.0f} s")
        await asyncio.sleep(0.1)


async def run_sessions(client: Client, name: str, harness: str, count: int, turns: int) -> None:
    """Run `count` sessions of `turns` turns to their end."""
    [case, *_] = cases_of(harness)
    task = Task(
        id=name,
        instruction=instruct(turns),
        files={"code.txt": "\n".join(LINES)},
        harness=PluginSpec(harness, case.options),
        runtime=PluginSpec("bubblewrap"),
        evaluator=PluginSpec("session_completed"),
        samples=count,
        limits=Limits(init_s=300.0, agent_s=WAIT_S, total_s=WAIT_S),
    )
    before = (await client.status()).position
    await client.submit(task)
    async with (
        asyncio.timeout(WAIT_S),
        contextlib.aclosing(client.events(after=before, task=name)) as events,
    ):
        async for event in events:
            if event.kind is EventKind.RELEASED:
                break
    for number in range(count):
        result = await client.result(f"{name}-{number}")
        if result.failure is not None:
            sys.exit(f"{name}-{number}: {result.failure.message}")


def cpu_times(server: psutil.Process, node: psutil.Process) -> dict[str, float]:
    """Processor seconds so far, by part of the plan."""
    own, theirs = node.cpu_times(), server.cpu_times()
    return {
        "agent": own.children_user + own.children_system,
        "node": own.user + own.system,
        "server": theirs.user + theirs.system,
    }


def read_recordings(folder: Path, name: str) -> tuple[dict[str, int], float]:
    """Token counts of these sessions as arguments of a plan, and mean size of a recording."""
    paths = [path for path in list_recordings(folder) if path.name.startswith(f"{name}-")]
    calls = [read(path).calls for path in paths]
    turns = round(sum(map(len, calls)) / len(calls))
    sampled = sum(len(call.sampled_ids) for session in calls for call in session) / len(calls)
    prompt = sum(len(session[0].prompt_ids) for session in calls) / len(calls)
    ids = sum(
        len(session[-1].prompt_ids) + len(session[-1].sampled_ids) for session in calls
    ) / len(calls)
    tokens = {
        "turns": turns,
        "turn_tokens": round(sampled / turns),
        "result_tokens": round((ids - prompt - sampled) / turns),
        "prompt": round(prompt),
    }
    return tokens, sum(path.stat().st_size for path in paths) / len(paths)


def make_plan(options: argparse.Namespace, tokens: dict[str, int]) -> dict[str, float]:
    """Return the planned cost of one such session, and how many this machine runs a minute."""
    load = Workload(
        gpus=1, model_tps=1e6, harness=options.harness, token_ms=options.token_ms, tool_s=0.0,
        tool_cpu_s=0.0, eval_s=0.0, **tokens,
    )  # fmt: skip
    needs = load.compute()
    rate = needs.sessions_per_hour / 3600
    agent, node = needs.agent_cores / rate, needs.gateway_cores / rate
    fits = BUSY * (os.cpu_count() or 1) / (agent + node)
    return {
        "agent": agent,
        "node": node,
        "server": needs.server_cores / rate - DATABASE_S,
        "bytes": needs.disk_gb_per_day * 1e9 / 86400 / rate,
        "seconds": needs.session_s,
        "per_minute": 60 * min(options.slots / needs.session_s, fits),
    }


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run everything; return tokens, plan and measurement for sessions of each length."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serve_engine(options, folder))
        up = ("up", "--no-node", "--port", "0", "--dir", "server")
        server = stack.enter_context(program(folder, "server", *up))
        await until((folder / "server" / "server.json").exists, "the server did not start")
        url = json.loads((folder / "server" / "server.json").read_text())["url"]
        join = json.loads((folder / "server" / "tokens.json").read_text())["join"]
        arguments = ["node", "--server", url, "--dir", "node", "--slots", str(options.slots)]
        arguments += ["--engine", engine, "--renderer", "qwen3", "--tokenizer", "tokenizer.json"]
        node = stack.enter_context(program(folder, "node", *arguments, TUGLINE_JOIN_TOKEN=join))
        client = await stack.enter_async_context(Client(folder=folder / "server"))
        await run_sessions(client, "warm", options.harness, WARM, WARM)
        before = cpu_times(server, node)
        await asyncio.sleep(IDLE_S)
        idle = {
            name: (now - before[name]) / IDLE_S for name, now in cpu_times(server, node).items()
        }
        report: dict[str, Any] = {"idle": idle}
        for turns in options.turns:
            name = f"turns{turns}"
            before, began = cpu_times(server, node), time.monotonic()
            await run_sessions(client, name, options.harness, options.sessions, turns)
            wall, after = time.monotonic() - began, cpu_times(server, node)
            tokens, size = read_recordings(folder / "node", name)
            measured = {
                part: (after[part] - before[part] - idle[part] * wall) / options.sessions
                for part in after
            }
            results = [await client.result(f"{name}-{n}") for n in range(options.sessions)]
            measured["bytes"] = size
            measured["seconds"] = sum(sum(one.seconds.values()) for one in results) / len(results)
            measured["per_minute"] = 60 * options.sessions / wall
            plan = make_plan(options, tokens)
            report[name] = {"tokens": tokens, "plan": plan, "measured": measured}
    return report


def main() -> None:
    """Print plan, measurement and their ratio."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--harness", default="pi")
    parser.add_argument("--sessions", type=int, default=12, help="of each length")
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--token-ms", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tugline-bench-") as name:
        report = asyncio.run(measure(options, Path(name)))
    if options.json:
        print(json.dumps(report))
        return
    print("idle", ", ".join(f"{part} {share:.2%}" for part, share in report.pop("idle").items()))
    for figures in report.values():
        print(", ".join(f"{name} {value}" for name, value in figures["tokens"].items()))
        for part, planned in figures["plan"].items():
            measured = figures["measured"][part]
            print(f"{part:12}{planned:12.4g}{measured:12.4g}{measured / planned:8.2f}")


if __name__ == "__main__":
    main()
