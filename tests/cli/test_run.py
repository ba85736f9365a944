"""``tugline run``, ``tugline eval`` and ``tugline generate``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cli.conftest import Run
from launch.processes import World, task, world, write
from support.commands import run_command
from support.training import write_config
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.recording.trajectories import RESULTS, read_folder
from tugline.trainers.sft import read_set
from tugline.web.serve import serve

__all__ = ["world"]

SECRET, VARIABLE = "sk-3f9d27c1a8", "KEY_OF_THE_API"
API = ("--messages-only", "--model", "strong", "--api-key-env", VARIABLE)
RUN = ("run", "tasks.jsonl", "--out", "o", "--tokenizer", "tokenizer.json", "--renderer", "qwen3")
USAGE = {"prompt_tokens": 40, "completion_tokens": 5, "total_tokens": 45}


def write_tasks(folder: Path) -> None:
    """Write a set of five tasks with a tag, an agent of one call and a random reward."""
    config = msgspec.json.decode(write_config(folder).read_bytes())
    template = config["template"] | {"tags": {"kind": "say"}}
    tasks = {"taskset": config["tasks"]["taskset"], "template": template}
    (folder / "set.json").write_bytes(msgspec.json.encode(tasks))


def run_set(run_here: Run, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a command with the set and the model; its JSON output."""
    done = run_here(*arguments, "--model", "model", "--renderer", "qwen3", "--json")
    assert done.returncode == code, done.stderr
    return msgspec.json.decode(done.stdout, type=dict[str, Any])


def test_run_writes_results_and_resumes(world: World) -> None:
    """Results are lines and trajectories; the same command with another task runs only that."""
    run = (*RUN, "--engine", world.engine())
    write(world.folder / "tasks.jsonl", [task("a")])
    (first,) = world.ask(*run)
    assert (first["sessions"], first["reward"], first["failures"]) == (2, 1.0, {})
    write(world.folder / "tasks.jsonl", [task("a"), task("b", samples=1)])
    (second,) = world.ask(*run)
    assert second["sessions"] == 3
    lines = (world.folder / "o/results.jsonl").read_text().splitlines()
    assert [json.loads(line)["session"] for line in lines][2] == "b-0"
    trajectories = read_folder(world.folder / "o/trajectories")
    assert sorted(each.session for each in trajectories) == ["a-0", "a-1", "b-0"]
    write(world.folder / "tasks.jsonl", [task("a", samples=5)])
    refused = world.call(*run)
    assert (refused.returncode, "'a'" in refused.stderr) == (2, True), refused.stderr


def test_run_reports_that_no_session_completed(world: World) -> None:
    """The command exits with code 1 and prints the end of the agent's output."""
    broken = task("a")
    broken["harness"]["options"] = {"command": "echo oh no; exit 3"}
    write(world.folder / "tasks.jsonl", [broken])
    done = world.call(*RUN, "--engine", world.engine())
    assert done.returncode == 1, done.stderr
    assert "2 failed in the harness" in done.stderr
    assert "oh no" in done.stderr


def test_an_evaluation_has_a_cost(world: World) -> None:
    """It follows from the prices of the settings, is printed, and is a figure of the run."""
    write(world.folder / "tasks.jsonl", [task("a", samples=1), task("b", samples=1)])
    prices = ("--set", "prices.gpu_hour=3600", "--set", "prices.prompt_tokens=1e6")
    measure = ("eval", *RUN[1:], "--engine", world.engine(), *prices)
    (report,) = world.ask(*measure)
    lines = (world.folder / "o/results.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    prompt = sum(result["prompt_tokens"] for result in results)
    seconds = sum(sum(result["seconds"].values()) for result in results)
    assert prompt > 0
    assert prompt < report["cost"]["total"] <= prompt + seconds
    assert report["cost"]["solved"] == report["cost"]["total"] / 2
    again = world.call(*measure)
    assert f"{report['cost']['total']:.4g}; " in again.stdout
    assert "per solved task" in again.stdout
    with contextlib.closing(sqlite3.connect(world.folder / "o" / "server.db")) as store:
        [(figures,)] = store.execute("SELECT figures FROM run_steps WHERE step = 0")
    assert json.loads(figures)["cost/solved"] == pytest.approx(report["cost"]["solved"])
    (plain,) = world.ask("run", "tasks.jsonl", "--out", "p", *measure[4:])
    assert plain["cost"]["total"] > prompt


def test_an_evaluation_gets_more_samples_in_its_folder(world: World) -> None:
    """Only the missing sessions run, and the report has the new k; fewer are refused."""
    write(world.folder / "tasks.jsonl", [task("a", samples=1), task("b", samples=1)])
    measure = ("eval", *RUN[1:], "--engine", world.engine(), "--k")
    (first,) = world.ask(*measure, "2")
    assert sorted(first["evaluation"]["pass_at"]) == ["1", "2"]
    before = {path: path.stat().st_mtime_ns for path in world.folder.glob("o/trajectories/*.traj")}
    (second,) = world.ask(*measure, "4")
    assert (second["evaluation"]["attempts"], max(second["evaluation"]["pass_at"])) == (8, "4")
    after = {path: path.stat().st_mtime_ns for path in world.folder.glob("o/trajectories/*.traj")}
    assert len(after) == 8
    assert before.items() <= after.items()
    refused = world.call(*measure, "3")
    assert refused.returncode == 2
    assert "not lowered to 3" in refused.stderr


@pytest.mark.engine
def test_changes_apply_to_settings_and_task_sets(tmp_path: Path, run_here: Run) -> None:
    """A key of a task-set file changes that file, another one a setting; both are strict."""
    write_tasks(tmp_path)
    own = ("--set", "select.limit=2", "--set", "template.tags.kind=other", "--set", "node.slots=1")
    report = run_set(run_here, "eval", "set.json", "--out", "o", *own)["evaluation"]
    assert (report["attempts"], [*report["by_tag"]]) == (2, ["kind=other"])
    for option, message in {
        "template.harnes.name=pi": "unknown key 'harnes'",
        "templat.harness.name=pi": "unknown key 'templat'",
    }.items():
        refused = run_here("run", "set.json", "--out", "other", "--set", option)
        assert refused.returncode == 2
        assert message in refused.stderr
    write(tmp_path / "tasks.jsonl", [task("a")])
    refused = run_here("run", "tasks.jsonl", "--out", "other", "--set", "select.limit=1")
    assert refused.returncode == 2
    assert "--set select.limit: none of the files is a task-set file" in refused.stderr
    refused = run_here("up", "--set", "select.limit=1")
    assert "unknown key 'select'" in refused.stderr


@pytest.mark.engine
def test_two_runs_are_compared_task_by_task(tmp_path: Path, run_here: Run) -> None:
    """Two runs of three sessions per task are compared; a finished run is read, not repeated."""
    write_tasks(tmp_path)
    measure = partial(run_set, run_here, "eval", "set.json", "--out", "first", "--k", "3")
    first = measure()
    evaluation = first["evaluation"]
    assert (evaluation["attempts"], evaluation["unrewarded"], first["change"]) == (15, 0, None)
    assert sorted(evaluation["pass_at"]) == ["1", "2", "3"]
    rates = [evaluation["pass_at"][k]["value"] for k in "123"]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(evaluation["reward"])
    before = (tmp_path / "first" / RESULTS).read_bytes()
    again = measure("--compare", "first")
    assert (tmp_path / "first" / RESULTS).read_bytes() == before
    assert again["evaluation"] == evaluation
    change = again["change"]
    assert (change["better"], change["worse"], change["difference"]["tasks"]) == ([], [], 5)
    assert change["difference"]["low"] < 0 < change["difference"]["high"]


@pytest.mark.engine
def test_accepted_sessions_become_a_set_with_exact_ids(tmp_path: Path, run_here: Run) -> None:
    """With another condition, the same command makes another set without a model call."""
    write_tasks(tmp_path)
    options = ("--out", "run", "--samples", "2", "--price-out", "2")
    generate = partial(run_set, run_here, "generate", "set.json", *options)
    every = generate("--accept", "reward>=0")
    total, results = every["tags"]["all"], (tmp_path / "run" / RESULTS).read_bytes()
    assert (total["sessions"], total["accepted"], total["failed"]) == (10, 10, 0)
    assert total["cost"] == pytest.approx(2e-6 * total["sampled_tokens"])
    assert every["tags"]["kind=say"] == total
    assert every["files"]["traces.parquet"] == 10
    tokenizer = Tokenizer.load(tmp_path / "model")
    samples, left_out = read_set(
        [tmp_path / "run"], tokenizer, lambda: Rendering(tokenizer, "qwen3"), 512
    )
    assert (len(samples), left_out) == (10, {})
    trained = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert trained == total["sampled_tokens"]
    rewards = [json.loads(line)["reward"] for line in results.splitlines()]
    won = rewards.count(1.0)
    again = generate(code=0 if won else 1)
    assert again["tags"]["all"]["accepted"] == won
    assert again["files"].get("traces.parquet", 0) == won
    assert (tmp_path / "run" / RESULTS).read_bytes() == results


def find_files(folder: Path, text: bytes) -> set[Path]:
    """Files below `folder` that contain `text`."""
    return {path for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()}


def make_api(*, lists_freely: bool = False) -> Starlette:
    """A provider's chat API: it requires a key and returns text and usage, but no token ids.

    With `lists_freely` it lists its models without the key. Its errors repeat a wrong key.
    """

    async def answer(request: Request) -> Response:
        given, lists = request.headers.get("authorization", ""), request.method == "GET"
        if given != f"Bearer {SECRET}" and not (lists and lists_freely):
            error = {"message": f"Incorrect API key provided: {given}"}
            return JSONResponse({"error": error}, 401)
        if lists:
            return JSONResponse({"data": [{"id": "weak"}, {"id": "strong"}]})
        body = await request.json()
        assert body["model"] == "strong"
        part = {"role": "assistant", "content": "Two words."}
        choice = {"index": 0, "finish_reason": "stop"}
        choice["delta" if body.get("stream") else "message"] = part
        reply = {"id": "1", "model": "strong", "usage": USAGE, "choices": [choice]}
        if not body.get("stream"):
            return JSONResponse(reply)
        events = f"data: {json.dumps(reply)}\n\ndata: [DONE]\n\n"
        return Response(events, media_type="text/event-stream")

    app = Starlette()
    app.add_route("/v1/{path:path}", answer, methods=["GET", "POST"])
    return app


async def test_an_api_with_a_key_and_without_token_ids(tmp_path: Path) -> None:
    """Prices follow from the API's token counts; the set has text and is tokenized when read.

    The API's key is in no file.
    """
    write_tasks(tmp_path)
    async with serve(make_api()) as url:
        done = await asyncio.to_thread(
            run_command, "generate", "set.json", "--out", "run", "--json",
            "--engine", f"{url}/v1", *API, "--accept", "reward>=0", "--price-in", "1",
            "--price-out", "10", "--log", "log.jsonl",
            cwd=tmp_path, env={VARIABLE: SECRET}, timeout=200,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout, type=dict[str, Any])
    assert find_files(tmp_path, b"engine") > {tmp_path / "log.jsonl"}
    assert not find_files(tmp_path, SECRET.encode())
    total = report["tags"]["all"]
    assert (total["sessions"], total["accepted"]) == (5, 5)
    assert (total["prompt_tokens"], total["sampled_tokens"]) == (200, 25)
    assert total["cost"] == pytest.approx((200 + 250) / 1e6)
    assert report["files"] == {"conversations.jsonl": 5}
    lines = (tmp_path / "run" / "conversations.jsonl").read_text().splitlines()
    assert {json.loads(line)["messages"][-1]["content"] for line in lines} == {"Two words."}
    tokenizer = Tokenizer.load(tmp_path / "model")
    samples, _ = read_set([tmp_path / "run"], tokenizer, lambda: Rendering(tokenizer, "qwen3"), 512)
    answer = samples[0].input_ids[samples[0].loss_mask].tolist()
    assert tokenizer.decode(answer).endswith("Two words.<|im_end|>")


@pytest.mark.parametrize("command", ["generate", "eval"])
@pytest.mark.parametrize(
    ("key", "lists_freely", "message"),
    [
        ("", False, f"the environment variable {VARIABLE} is not set"),
        ("sk-stale-key", False, "(--api-key-env) to an environment variable"),
        (
            "sk-stale-key",
            True,
            "the engine answered 401: it rejects the API key; see engine.api_key_env",
        ),
    ],
)
async def test_a_missing_or_wrong_key_is_named(
    tmp_path: Path, command: str, key: str, message: str, *, lists_freely: bool
) -> None:
    """A bad key is an error before any session; a key that the API repeats is not printed."""
    write_tasks(tmp_path)
    async with serve(make_api(lists_freely=lists_freely)) as url:
        done = await asyncio.to_thread(
            run_command, command, "set.json", "--out", "run", "--engine", url, *API,
            cwd=tmp_path, env={VARIABLE: key},
        )  # fmt: skip
    output = " ".join(done.stderr.split())
    assert done.returncode == 2
    assert message in output
    assert "stale" not in output
