"""One engine at a time, serving the tiny model that calls tools."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines import servers, tool_model
from engines.tool_model import Folders
from tugline.gateway.engine import EngineReport
from tugline.gateway.probe import probe
from tugline.protocol import PauseMode
from tugline.trainers.publish import RemoteWeightUpdater, SglangWeightUpdater, VllmWeightUpdater

FURTHEST = "largest logprob difference"
"""What a test notes and the end of the run tells, since it is the point of it all."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how far captured logprobs were from recomputed ones."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == FURTHEST and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {value:.1e}")


class EmbeddedUpdater(RemoteWeightUpdater):
    """The embedded engine's server of the tests, which pauses and resumes within a swap."""

    _running: PauseMode = PauseMode.KEEP

    async def pause(self, running: PauseMode = PauseMode.KEEP) -> None:
        """Store the mode for `load`."""
        self._running = running

    async def load(self, folder: Path, version: int) -> None:
        """Swap the weights between two steps."""
        body = {"folder": str(folder), "version": version, "running": self._running}
        await self._post("/swap", body)

    async def resume(self) -> None:
        """Do nothing: `pause` held nothing."""


UPDATERS = {"embedded": EmbeddedUpdater, "vllm": VllmWeightUpdater, "sglang": SglangWeightUpdater}


@dataclass(slots=True)
class Served:
    """A running engine and what judges it."""

    name: str
    url: str
    folders: Folders
    models: tuple[PreTrainedModel, PreTrainedModel]
    versions: Iterator[int]
    """Fresh version numbers: an engine outlives the tests that change its weights."""
    version: int = 0
    """Of the first weights, as served now."""
    report: list[EngineReport] = field(default_factory=list)

    async def examined(self) -> EngineReport:
        """The doctor's report, made once."""
        if not self.report:
            self.report.append(await probe(self.url))
        return self.report[0]

    @asynccontextmanager
    async def weights(self) -> AsyncIterator[RemoteWeightUpdater]:
        """How this engine's weights are changed."""
        async with UPDATERS[self.name](self.url) as weights:
            yield weights


@pytest.fixture(scope="session")
def folders() -> Folders:
    """Both weights of the tiny model."""
    return tool_model.make()


@pytest.fixture(scope="session", params=list(servers.COMMANDS))
def served(
    request: pytest.FixtureRequest, folders: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Each engine in turn."""
    torch.set_num_threads(1)
    first, second = (AutoModelForCausalLM.from_pretrained(f, dtype="float32") for f in folders)
    with servers.running(request.param, folders.first, tmp_path_factory.mktemp("logs")) as server:
        yield Served(request.param, server.url, folders, (first, second), iter(range(1, 1000)))
