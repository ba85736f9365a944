"""Alarms, with real steps, a real engine, and published weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace

from support.calls import make_call
from trainers.sessions import VERSION, groups, recaptured, tiny
from tugline.inference.engine import Engine
from tugline.inference.sampling import score
from tugline.inference.server import create_app
from tugline.protocol import PauseMode
from tugline.recording.verify.engine import connect_scorer
from tugline.server.blobs import LocalBlobs
from tugline.server.control import ControlPlane
from tugline.server.store.database import open_database
from tugline.trainers.grpo.config import GrpoConfig
from tugline.trainers.grpo.train import Grpo
from tugline.trainers.metrics import find_alarms, measure_rollout
from tugline.trainers.proof import Probe
from tugline.trainers.publish import Publication, Publisher
from tugline.types import Call, Message, Role, Tool, ToolCall, Trace, Trajectory
from tugline.web.serve import serve


def answer(text: str = "", *tools: tuple[str, str]) -> Call:
    """A call with the tool `read`; its answer has text, and names and arguments of tools."""
    called = tuple(ToolCall(str(n), name, given) for n, (name, given) in enumerate(tools))
    read = Tool("read", "", {"type": "object"})
    return make_call(0, [1], [2], tools=(read,), answer=Message(Role.ASSISTANT, text, called))


READS = answer("", ("read", '{"path": "a"}'))


def be_sure(trace: Trace) -> Any:
    """Logprobs of a policy without entropy."""
    return trace.logprobs / 1000


def multiply_traces(original: Trajectory) -> Trajectory:
    """One session has fifty times its traces; the others are as they were."""
    if original.session != "t0/0":
        return original
    trained = 50 * original.ledger.trained
    ledger = replace(original.ledger, trained=trained, sampled=trained + 2)
    return replace(original, traces=original.traces * 50, ledger=ledger)


class Case(NamedTuple):
    """A step that differs from a good one in one respect, and its alarms."""

    alarms: set[str]
    change: Callable[[Trajectory], Trajectory] = lambda it: it
    calls: Sequence[Call] = (READS,)
    lr: float = 1e-3
    noise: float = 0.0
    """Added to the engine's weights, as by an engine of lower precision."""


CASES: Mapping[str, Case] = {
    "good": Case(set()),
    "failed": Case({"no_tokens", "no_signal", "failed"}, lambda it: replace(it, reward=None)),
    "alike": Case(
        {"no_tokens", "no_signal"}, lambda it: replace(it, reward=replace(it.reward, value=1.0))
    ),
    "no tool called": Case({"no_tool_calls"}, calls=[answer("I would read it.")] * 200),
    "not recognised": Case({"malformed"}, calls=[READS, answer("<tool_call>read a</tool_call>")]),
    "unknown tool": Case({"malformed"}, calls=[READS, answer("", ("write", "{}"))]),
    "bad arguments": Case({"malformed"}, calls=[READS, answer("", ("read", '{"path": '))]),
    "lower precision": Case({"mismatch"}, noise=0.02),
    "wrong logprobs": Case(
        {"mismatch"}, partial(recaptured, change=lambda each: each.logprobs - 0.5)
    ),
    "rate too small": Case({"unchanged"}, lr=1e-30),
    "many traces": Case({"session_weight"}, multiply_traces),
    "sure of all": Case({"entropy", "mismatch"}, partial(recaptured, change=be_sure)),
}


@pytest.mark.parametrize("name", CASES)
async def test_alarms_of_a_step(name: str, tmp_path: Path) -> None:
    """Each cause raises its alarms, and a good step raises none."""
    case, model = CASES[name], tiny()
    good = groups(model)
    batch = [case.change(each) for each in good]
    ids = good[0].traces[0].ids
    weights = copy.deepcopy(model)  # the engine's weights
    before = score(model, ids, 1.0)
    report = Grpo(model, GrpoConfig(lr=case.lr)).step(batch, version=VERSION)
    probe, sent = Probe(ids, before, score(model, ids, 1.0)), copy.deepcopy(model)
    with torch.no_grad():
        noise = case.noise * torch.randn_like(sent.lm_head.weight)
        for engine in (weights, sent):
            engine.lm_head.weight += noise
    published = await publish(weights, sent, probe, tmp_path)
    rollout = measure_rollout(batch, case.calls, version=VERSION)
    usual = measure_rollout(good, [], version=VERSION).entropy
    assert usual is not None
    alarms = find_alarms(rollout, report, published, [usual] * 5 + [rollout.entropy])
    assert set(alarms) == case.alarms


async def publish(weights: Any, sent: torch.nn.Module, probe: Probe, folder: Path) -> Publication:
    """Publish `sent` to a running engine that has `weights`."""
    database = open_database(f"sqlite:{folder / 'server.db'}")
    async with (
        Engine(weights, eos_ids=(), max_model_len=256, threads=1) as engine,
        serve(create_app(engine, model_name="m")) as url,
        ControlPlane(database, LocalBlobs(folder / "blobs"), folder=folder) as server,
    ):

        async def swap(_folder: Path, version: int, running: PauseMode) -> None:
            await engine.swap(sent.state_dict(), version, running)

        make = partial(Publisher, server, {url: swap}, mode=PauseMode.WAIT, within_s=60)
        publisher = make()
        assert await publisher.find_outdated(VERSION + 1) == [url]
        publication = await publisher.publish(folder, VERSION + 1, probe)
        assert await publisher.find_outdated(VERSION + 1) == []
        outdated = make(connect=partial(connect_scorer, model="a missing adapter"))
        assert await outdated.find_outdated(VERSION + 1) == [url]
        return publication
