"""``tugline plan`` beside a run of real agents: what a session was to cost, and what it did.

A scripted engine answers at a known rate; server and node are programs of their own, so that their
processor time is that of the parts which a plan has. Sessions of two lengths call their shell once
a turn in bubblewrap and read pieces of this package. The plan gets the tokens of the run, so that
its constants are what is compared. What server and node use while idle is measured first, and
taken off; processor time of agents is that of the node's children.

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
from tugline.cli.bench import BUSY, DATABASE_S, Workload
from tugline.cli.harness_check import cases_of
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
PATIENCE_S = 900.0
IDLE_S = 20.0
WARM = 2


def instruct(turns: int) -> str:
    """The instruction, which chooses the script."""
    return f"Look {turns} times at code.txt."


def script(harness: str, turns: int) -> list[ScriptedTurn]:
    """Some words and a call of the shell in each turn, and an end."""
    [case, *_] = cases_of(harness)
    dice = random.Random(turns)
    looks = []
    for _ in range(turns - 1):
        first, words = dice.randrange(len(LINES)), dice.choices(LINES, k=8)
        call = case.call(f"sed -n {first},{first + 29}p code.txt")
        looks.append(ScriptedTurn(" ".join(" ".join(words).split()), calls=(call,)))
    return [*looks, ScriptedTurn("Done.")]


@contextlib.asynccontextmanager
async def serve_engine(options: argparse.Namespace, folder: Path) -> AsyncIterator[str]:
    """Serve the scripts at their rate, with logprobs that are not all alike."""
    tokenizer, dice = make_tokenizer(), random.Random(0)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    lengths = {WARM, *options.turns}
    scripts = {instruct(turns): script(options.harness, turns) for turns in lengths}
    model = ScriptedModel(tokenizer, scripts)

    def reply(prompt: Ids, request: str) -> Reply:
        made = model.reply(prompt, request)
        logprobs = [-dice.expovariate(2.0) for _ in made.ids]
        return replace(made, delay_s=options.token_ms / 1000, logprobs=logprobs)

    engine = ScriptedEngine(
        reply, vocab_size=tokenizer.size, max_model_len=CONTEXT_WINDOW, eos_ids=[END_ID]
    )
    async with serve(create_app(engine, model_name="scripted")) as url:
        yield url


@contextlib.contextmanager
def program(folder: Path, name: str, *argv: str, **env: str) -> Iterator[psutil.Process]:
    """Run a program of tugline in `folder`, to the end of the block."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [TUGLINE, *argv], cwd=folder, env={**os.environ, **env}, stdout=log, stderr=log
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


async def until(found: Callable[[], Any], what: str) -> None:
    """Wait until `found()` is true."""
    end = time.monotonic() + PATIENCE_S
    while not found():
        if time.monotonic() > end:
            sys.exit(f"the benchmark stopped: {what} within {PATIENCE_S:.0f} s")
        await asyncio.sleep(0.1)


async def run_sessions(client: Client, name: str, harness: str, count: int, turns: int) -> None:
    """Run so many sessions of so many turns to their end."""
    [case, *_] = cases_of(harness)
    task = Task(
        id=name,
        instruction=instruct(turns),
        files={"code.txt": "\n".join(LINES)},
        harness=PluginSpec(harness, case.options),
        runtime=PluginSpec("bubblewrap"),
        evaluator=PluginSpec("session_completed"),
        samples=count,
        limits=Limits(init_s=300.0, agent_s=PATIENCE_S, total_s=PATIENCE_S),
    )
    before = (await client.status()).position
    await client.submit(task)
    async with (
        asyncio.timeout(PATIENCE_S),
        contextlib.aclosing(client.events(after=before, task=name)) as events,
    ):
        async for event in events:
            if event.kind is EventKind.RELEASED:
                break
    for number in range(count):
        result = await client.result(f"{name}-{number}")
        if result.failure is not None:
            sys.exit(f"{name}-{number}: {result.failure.message}")


def used(server: psutil.Process, node: psutil.Process) -> dict[str, float]:
    """Processor time so far, by part."""
    own, theirs = node.cpu_times(), server.cpu_times()
    return {
        "agent": own.children_user + own.children_system,
        "node": own.user + own.system,
        "server": theirs.user + theirs.system,
    }


def read_recordings(folder: Path, name: str) -> tuple[dict[str, int], float]:
    """The tokens of these sessions in the words of a plan, and the bytes of a recording."""
    paths = [path for path in list_recordings(folder) if path.name.startswith(f"{name}-")]
    calls = [read(path).calls for path in paths]
    turns = round(sum(map(len, calls)) / len(calls))
    sampled = sum(len(call.sampled_ids) for one in calls for call in one) / len(calls)
    prompt = sum(len(one[0].prompt_ids) for one in calls) / len(calls)
    ids = sum(len(one[-1].prompt_ids) + len(one[-1].sampled_ids) for one in calls) / len(calls)
    tokens = {
        "turns": turns,
        "turn_tokens": round(sampled / turns),
        "result_tokens": round((ids - prompt - sampled) / turns),
        "prompt": round(prompt),
    }
    return tokens, sum(path.stat().st_size for path in paths) / len(paths)


def make_plan(options: argparse.Namespace, tokens: dict[str, int]) -> dict[str, float]:
    """What `tugline plan` says of one such session, and how many this machine runs."""
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
    """Run it all; return tokens, plan and measurement for sessions of each length."""
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serve_engine(options, folder))
        up = ("up", "--no-node", "--port", "0", "--dir", "server")
        server = stack.enter_context(program(folder, "server", *up))
        await until((folder / "server" / "server.json").exists, "no server came up")
        url = json.loads((folder / "server" / "server.json").read_text())["url"]
        join = json.loads((folder / "server" / "tokens.json").read_text())["join"]
        words = ["node", "--server", url, "--dir", "node", "--slots", str(options.slots)]
        words += ["--engine", engine, "--renderer", "qwen3", "--tokenizer", "tokenizer.json"]
        node = stack.enter_context(program(folder, "node", *words, TUGLINE_JOIN_TOKEN=join))
        client = await stack.enter_async_context(Client(folder=folder / "server"))
        await run_sessions(client, "warm", options.harness, WARM, WARM)
        before = used(server, node)
        await asyncio.sleep(IDLE_S)
        idle = {name: (now - before[name]) / IDLE_S for name, now in used(server, node).items()}
        report: dict[str, Any] = {"idle": idle}
        for turns in options.turns:
            name = f"turns{turns}"
            before, began = used(server, node), time.monotonic()
            await run_sessions(client, name, options.harness, options.sessions, turns)
            wall, after = time.monotonic() - began, used(server, node)
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
    for one in report.values():
        print(", ".join(f"{name} {value}" for name, value in one["tokens"].items()))
        for part, planned in one["plan"].items():
            found = one["measured"][part]
            print(f"{part:12}{planned:12.4g}{found:12.4g}{found / planned:8.2f}")


if __name__ == "__main__":
    main()
