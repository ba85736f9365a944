"""One engine at a time, serving the tiny model that calls tools."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engines import servers, tool_model
from engines.tool_model import Folders
from tugline.gateway.probe import EngineReport, probe
from tugline.trainers.publish import RemoteWeightUpdater, SglangWeightUpdater, VllmWeightUpdater

FURTHEST = "largest logprob difference"
"""Property in which tests report it; printed at the end of the run."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how far captured logprobs were from recomputed ones."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == FURTHEST and report.when == "call":
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {value:.1e}")


@dataclass(slots=True)
class Served:
    """A running engine, and the models that its log probabilities are compared with."""

    name: str
    url: str
    folders: Folders
    models: tuple[PreTrainedModel, PreTrainedModel]
    version: int = 0
    """Of the first weights, as served now; it only grows, since tests share the engine."""
    report: EngineReport | None = None

    async def get_report(self) -> EngineReport:
        """The report of the probe, made once."""
        self.report = self.report or await probe(self.url)
        return self.report

    def weights(self) -> RemoteWeightUpdater:
        """An updater for the weights of this engine."""
        sglang = self.name == "sglang"
        return SglangWeightUpdater(self.url) if sglang else VllmWeightUpdater(self.url)


@pytest.fixture(scope="session")
def folders() -> Folders:
    """Both sets of weights of the tiny model."""
    return tool_model.make()


OTHERS = [name for name in servers.COMMANDS if name != "vllm"]
"""Engines that the core of the suite leaves out."""


@pytest.fixture(
    scope="module",
    params=["vllm", *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)],
)
def served(
    request: pytest.FixtureRequest, folders: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Each engine in turn."""
    torch.set_num_threads(1)
    first, second = (AutoModelForCausalLM.from_pretrained(f, dtype="float32") for f in folders)
    with servers.running(request.param, folders.first, tmp_path_factory.mktemp("logs")) as server:
        yield Served(request.param, server.url, folders, (first, second))
