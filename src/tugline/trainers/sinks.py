"""Sinks for the figures of a training run; plug-ins of the kind ``metrics``.

Figures have names such as ``rollout/reward``. A resumed run continues after its checkpoint.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from tugline import log
from tugline.atomic import write_file
from tugline.errors import TuglineError
from tugline.launch.naming import name_run
from tugline.plugins import import_extra, make
from tugline.schema import read_values
from tugline.types import PluginSpec

METRICS = "metrics.jsonl"
PLOT = "training.png"
FAILED = "failed"
"""Name of the note on the sessions of a step without a reward."""
RESUMED = "resumed"
"""Name of the note on the step after which a run was resumed."""
_SEND_S = 20.0
"""Deadline in seconds for sending the figures of a step to the server."""
_SHOWN = read_values(Path(__file__).with_name("sinks.toml"))
_log = log.get("trainers.sinks")
Figures = Mapping[str, float]
ReportStep = Callable[..., Awaitable[object]]
"""Reports a step, with the parameters of `Client.report_step`."""


class Sink:
    """Base class of sinks; a subclass overrides the methods that it needs."""

    def start(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Start or resume a run in `folder` after `step` steps; later figures are replaced."""

    def log(self, step: int, figures: Figures) -> None:
        """Record figures of a step."""

    def note(self, step: int, name: str, text: str) -> None:
        """Record a line of text, such as the result of an evaluation."""

    def alarm(self, step: int, name: str, text: str) -> None:
        """Record an alarm with its likely cause; by default as a figure of 1 and a note."""
        self.log(step, {f"alarm/{name}": 1.0})
        self.note(step, f"alarm {name}", text)

    def close(self) -> None:
        """Write pending data and close."""


class Sinks(Sink):
    """A sink that forwards every call to several sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def start(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Start every sink."""
        self._call("start", folder, config, step)

    def log(self, step: int, figures: Figures) -> None:
        """Record figures in every sink."""
        self._call("log", step, figures)

    def note(self, step: int, name: str, text: str) -> None:
        """Record a line in every sink."""
        self._call("note", step, name, text)

    def alarm(self, step: int, name: str, text: str) -> None:
        """Record an alarm in every sink."""
        self._call("alarm", step, name, text)

    def close(self) -> None:
        """Close every sink."""
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        for sink in self._sinks:
            getattr(sink, method)(*arguments)


def make_sinks(parts: Sequence[PluginSpec], console: Console) -> Sinks:
    """Make the sinks of the terminal, the folder, and `parts`.

    Raises `ConfigError`, or `UsageError` for a package that is not installed.
    """
    named = [make("metrics", part, Sink) for part in parts]
    return Sinks([ConsoleSink(console), JsonLinesSink(), *named])


class ConsoleSink(Sink):
    """Prints a line per step, once its weights are published, and a line per note."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._row: dict[str, float] = {}
        self._failed = ""

    def log(self, step: int, figures: Figures) -> None:
        """Print the most important figures once the step's time is known."""
        self._row.update(figures)
        if "time/step_s" in figures:
            row, self._row = self._row, {}
            cells = _SHOWN["console"].items()
            shown = [f"{name} {row[key]:{form}}" for name, (key, form) in cells if key in row]
            failed, self._failed = self._failed, ""
            self.note(step, "", "  ".join([*shown, *([f"({failed})"] if failed else [])]))

    def note(self, step: int, name: str, text: str) -> None:
        """Print a line; that about failed sessions is part of the step's line."""
        if name == FAILED:
            self._failed = text
            return
        head = f"step {step}  {name}: " if name else f"step {step}  "
        self._console.print(head + text, markup=False, soft_wrap=True)


class JsonLinesSink(Sink):
    """Writes ``metrics.jsonl``: objects with the figures and the notes of each step."""

    def start(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Keep the lines of finished steps, and remove torn and later lines."""
        path = folder / METRICS
        rows = [row for row in read_lines(path) if row["step"] <= step]
        write_file(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, figures: Figures) -> None:
        """Append an object."""
        self._write({"step": step, **figures})

    def note(self, step: int, name: str, text: str) -> None:
        """Append a note with its name."""
        self._write({"step": step, "note": name, "text": text})

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(msgspec.json.encode(row) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a ``metrics.jsonl``; none if the file does not exist."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # text after the last newline is torn
    return [msgspec.json.decode(line, type=dict[str, Any]) for line in lines]


class ServerSink(Sink):
    """Reports figures to the server of a run, whose console shows them; unsent ones are dropped."""

    def __init__(self, report_step: ReportStep) -> None:
        """Reports are made in the running event loop, in their order."""
        self._report_step = report_step
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._closed = False

    def start(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Resend the rows of `step`, in case of an earlier kill."""
        self._run = name_run(folder)
        self._send(step, rewound=True, notes={RESUMED: f"after step {step}"} if step else {})
        for row in [row for row in read_lines(folder / METRICS) if row.pop("step") == step]:
            if "note" in row:
                self.note(step, row["note"], row["text"])
            else:
                self.log(step, {name: row[name] for name in row if row[name] is not None})

    def log(self, step: int, figures: Figures) -> None:
        """Report figures."""
        finite = {name: value for name, value in figures.items() if math.isfinite(value)}
        self._send(step, figures=finite)

    def note(self, step: int, name: str, text: str) -> None:
        """Report a note."""
        self._send(step, notes={name: text})

    def close(self) -> None:
        """Wait for pending reports, at most the deadline of a report; not in the event loop."""
        wait([self._last], _SEND_S)
        self._closed = True

    def _send(self, step: int, **fields: Any) -> None:
        self._last = asyncio.run_coroutine_threadsafe(self._report(step, fields), self._loop)

    async def _report(self, step: int, fields: Mapping[str, Any]) -> None:
        async with self._turn:
            if self._closed:
                return
            try:
                async with asyncio.timeout(_SEND_S):
                    await self._report_step(self._run, step, **fields)
            except (TuglineError, TimeoutError) as error:
                _log.warning("figures not sent", step=step, error=str(error))


class TensorBoardSink(Sink):
    """Writes event files to ``tensorboard/``; needs ``tugline[tensorboard]``."""

    def __init__(self) -> None:
        self._module = import_extra(
            "torch.utils.tensorboard", "tensorboard", "metrics 'tensorboard'"
        )

    def start(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Open a writer that hides figures after `step`."""
        path = str(folder / "tensorboard")
        self._writer = self._module.SummaryWriter(path, purge_step=step + 1)

    def log(self, step: int, figures: Figures) -> None:
        """Add a scalar for each figure."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def note(self, step: int, name: str, text: str) -> None:
        """Add a text under its name."""
        self._writer.add_text(name, text, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class PlotSink(Sink):
    """Draws ``training.png`` at the end of the run; needs ``tugline[plots]``."""

    def __init__(self) -> None:
        self._module = import_extra("matplotlib.figure", "plots", "metrics 'plots'")

    def start(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Set the folder of the plot."""
        self._folder = folder

    def close(self) -> None:
        """Draw every panel from ``metrics.jsonl``, evaluations with their intervals."""
        lines = read_lines(self._folder / METRICS)
        figure = self._module.Figure(figsize=(10, 6), dpi=150, layout="constrained")
        for axes, (title, key) in zip(
            figure.subplots(2, 2).flat, _SHOWN["plot"].items(), strict=True
        ):
            rows = [row for row in lines if key in row]
            steps = [row["step"] for row in rows]
            axes.plot(steps, [row[key] for row in rows], marker="o", markersize=3)
            if key.startswith("heldout/"):
                low, high = (
                    [row[f"heldout/pass_at/1/{end}"] for row in rows] for end in ("low", "high")
                )
                axes.fill_between(steps, low, high, alpha=0.2)
            axes.set_title(title, loc="left")
            axes.set_xlabel("step")
        figure.savefig(self._folder / PLOT, format="png")


class TrackingSink(Sink):
    """A run of Weights & Biases or of Trackio, which has the same interface."""

    package = ""

    def __init__(self, **options: Any) -> None:
        """`options` are those of the package's ``init``, such as ``project`` and ``mode``."""
        self._module = import_extra(self.package, self.package, f"metrics {self.package!r}")
        self._options = {"project": "tugline", **options}

    def start(self, folder: Path, config: Mapping[str, Any], step: int) -> None:
        """Start a run."""
        self._module.init(config=dict(config), **self._run_options(folder))

    def _run_options(self, folder: Path) -> dict[str, Any]:
        """Return the options of ``init``, which include the name of the run."""
        return {"name": folder.name, "resume": "allow"} | self._options

    def log(self, step: int, figures: Figures) -> None:
        """Log figures at `step`."""
        self._module.log(dict(figures), step=step)

    def alarm(self, step: int, name: str, text: str) -> None:
        """Send an alert as well."""
        super().alarm(step, name, text)
        self._module.alert(title=name, text=f"step {step}: {text}")

    def close(self) -> None:
        """Finish the run."""
        self._module.finish()


class WandbSink(TrackingSink):
    """Weights & Biases; needs ``tugline[wandb]``. Without an account: ``mode: offline``."""

    package = "wandb"

    def _run_options(self, folder: Path) -> dict[str, Any]:
        return {"dir": str(folder), "id": folder.name} | super()._run_options(folder)


class TrackioSink(TrackingSink):
    """Trackio, which stores figures on this machine; needs ``tugline[trackio]``."""

    package = "trackio"
