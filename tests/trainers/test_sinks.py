"""Sinks of figures: what they have written is read back."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import sqlite3
import sys
import time
from pathlib import Path

import pytest
import structlog
from msgspec.structs import replace
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.server import TOKENS, serve
from tugline import protocol
from tugline.client.api import Client
from tugline.errors import ServerError, UsageError
from tugline.trainers.metrics import flatten
from tugline.trainers.publish import Publication
from tugline.trainers.sinks import METRICS, PLOT, ServerSink, Sinks, make_sinks, read_lines
from tugline.types import Ledger, PluginSpec, Reason

CAUSE = "no group has a signal: the tasks are too hard"
PUBLISHED = Publication(version=1, seconds=0.1, max_abs_dlogprob=1e-5, moved=0.1, arrived=1.0)


def log_steps(folder: Path, *parts: PluginSpec, steps: tuple[int, ...], after: int) -> None:
    """Log a number and a NaN for each step, as a process of a run does."""
    sinks = make_sinks(parts, Console(file=io.StringIO()))
    log_all(sinks, folder, steps, after)
    sinks.close()


def log_all(sinks: Sinks, folder: Path, steps: tuple[int, ...], after: int) -> None:
    """Start a run and log its steps."""
    folder.mkdir(exist_ok=True)
    sinks.start(folder, {"lr": 1e-6}, after)
    for step in steps:
        sinks.log(step, {"rollout/reward": step / 10, "update/kl": math.nan})
    sinks.note(steps[-1], "held out", "pass@1 50%")
    sinks.alarm(steps[-1], "no_signal", CAUSE)


def test_lines_of_lost_steps_are_replaced(tmp_path: Path) -> None:
    """A run that was killed after step 3 and continues after step 2 replaces the line of step 3."""
    log_steps(tmp_path, steps=(1, 2, 3), after=0)
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b'{"step":4,"torn')
    log_steps(tmp_path, steps=(3, 4), after=2)
    rows = [row for row in read_lines(tmp_path / METRICS) if "rollout/reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    lines = read_lines(tmp_path / METRICS)
    assert [row["step"] for row in lines if row.get("alarm/no_signal") == 1.0] == [4]
    assert lines[-1] == {"step": 4, "note": "alarm no_signal", "text": CAUSE}


async def test_the_server_has_the_figures_of_the_file(tmp_path: Path) -> None:
    """Figures that were not sent before a kill are sent later; NaN is left out."""
    folder = tmp_path / "my run"

    async def run(client: Client, steps: tuple[int, ...], after: int) -> list[protocol.RunStep]:
        own = make_sinks((), Console(file=io.StringIO()))
        sinks = Sinks([own, ServerSink(client.report_step)])
        log_all(sinks, folder, steps, after)
        await asyncio.to_thread(sinks.close)
        (stored,) = await client.runs()
        assert stored.name == f"my_run-{(folder / 'name').read_text().rstrip('.')}"
        return await client.run_steps(stored.name)

    async with (
        serve(f"sqlite:{tmp_path / 'db'}", tmp_path) as served,
        Client(served.url, TOKENS.client) as client,
    ):
        await run(client, (1, 2, 3), 0)
        lines = '{"step":2,"time/step_s":1.5}\n{"step":2,"note":"held out","text":"all"}\n'
        with (folder / METRICS).open("a") as file:
            file.write(lines)
        steps = await run(client, (3, 4), 2)
    assert [step.step for step in steps] == [0, 1, 2, 3, 4]
    assert steps[2] == protocol.RunStep(
        step=2,
        figures={"rollout/reward": 0.2, "time/step_s": 1.5},
        notes={"held out": "all", "resumed": "after step 2"},
    )
    assert steps[3].notes == {}
    assert steps[4].figures == {"rollout/reward": 0.4, "alarm/no_signal": 1.0}
    assert steps[4].notes == {"held out": "pass@1 50%", "alarm no_signal": CAUSE}


async def test_figures_that_cannot_be_sent_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run continues, and the file has the figures; no report is waited for for ever."""
    monkeypatch.setattr("tugline.trainers.sinks._SEND_S", 0.1)

    async def report(_run: str, step: int, **_fields: object) -> None:
        if step == 0:
            raise ServerError("the server is away")
        await asyncio.Event().wait()

    sinks = Sinks([make_sinks((), Console(file=io.StringIO())), ServerSink(report)])
    with structlog.testing.capture_logs() as logs:
        sinks.start(tmp_path, {}, 0)
        sinks.log(1, {"rollout/reward": 0.5})
        await asyncio.wait_for(asyncio.to_thread(sinks.close), 20)
        await asyncio.sleep(0.2)  # the time limit of the second report
    assert [row["step"] for row in read_lines(tmp_path / METRICS)] == [1]
    assert [entry["step"] for entry in logs if entry["event"] == "figures not sent"] == [0, 1]


def test_tensorboard(tmp_path: Path) -> None:
    """Scalars by step leave out lost steps; an alarm is a scalar and a text."""
    log_steps(tmp_path, PluginSpec("tensorboard"), steps=(1, 2, 3), after=0)
    log_steps(tmp_path, PluginSpec("tensorboard"), steps=(3, 4), after=2)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = {event.step: event.value for event in events.Scalars("rollout/reward")}
    assert scalars == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
    alarms = [(event.step, event.value) for event in events.Scalars("alarm/no_signal")]
    assert alarms == [(4, 1.0)]
    text = events.Tensors("alarm no_signal/text_summary")[-1]
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (4, CAUSE)


def test_weights_and_biases_offline(tmp_path: Path) -> None:
    """Figures are logged without an account or a network, and alarms are alerts."""
    options = {"mode": "offline", "project": "tests"}
    log_steps(tmp_path / "run", PluginSpec("wandb", options), steps=(1, 2), after=0)
    (run,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (file,) = run.glob("*.wandb")
    wanted = (b"alarm/no_signal", f"step 2: {CAUSE}".encode())
    deadline = time.monotonic() + 20  # a process of W&B writes the file
    while not all(text in file.read_bytes() for text in wanted):
        assert time.monotonic() < deadline, file.read_bytes()[:2000]
        time.sleep(0.02)


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures and alerts are in Trackio's local database."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [module for module in sys.modules if module.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads the folder when it is first imported
    log_steps(tmp_path / "run", PluginSpec("trackio", {"project": "tests"}), steps=(1, 2), after=0)
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "tests.db")) as store:
        metrics = store.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
        alerts = store.execute("SELECT title, text, level FROM alerts").fetchall()
    figures = [(step, json.loads(text)) for step, text in metrics]
    rewards = [(step, row["rollout/reward"]) for step, row in figures[:-1]]
    assert rewards == [(1, 0.1), (2, 0.2)]
    assert figures[-1] == (2, {"alarm/no_signal": 1.0})
    assert alerts == [("no_signal", f"step 2: {CAUSE}", "warn")]


def test_a_run_is_plotted(tmp_path: Path) -> None:
    """A run with or without evaluations becomes a PNG file."""
    log_steps(tmp_path, PluginSpec("plots"), steps=(1, 2), after=0)
    assert (tmp_path / PLOT).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["plots", "tensorboard", "wandb", "trackio"])
def test_missing_packages_are_reported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs the package."""
    for module in (name, "torch.utils.tensorboard", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"pip install 'tugline\[{name}\]'"):
        make_sinks([PluginSpec(name)], Console())


def test_figures_are_flat() -> None:
    """Numbers have the path of their field as their name; None is left out."""
    figures = flatten(replace(PUBLISHED, arrived=None), "publish")
    assert figures == {
        "publish/version": 1.0, "publish/seconds": 0.1, "publish/max_abs_dlogprob": 1e-5,
        "publish/moved": 0.1,
    }  # fmt: skip
    ledger = Ledger(9, 5, {Reason.STALE: 4})
    assert flatten(ledger, "ledger")["ledger/masked/stale"] == 4
