"""A model recomputes what a gateway recorded from the embedded engine: experts, sets, lineage."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.test_engine import make
from support.gateway import OpenSession, open_session
from support.polling import until
from support.upcycle import make_mixture, save_mixture
from tugline.chat.engines.generate import Embedded
from tugline.inference.server import create_app
from tugline.protocol import PauseMode
from tugline.recording.verify.session import verify_session
from tugline.recording.verify.text import TextVerifier
from tugline.traces.base import PerRequest, PrefixMerging
from tugline.trainers.recompute import Recomputer, verify_with_model
from tugline.types import Policy, Reason
from tugline.web.serve import serve

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
ALONE = ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"temperature": 0.7})
TOGETHER = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05}


def make_wire() -> Embedded:
    """The format as a probe of the engine would set it."""
    wire = Embedded()
    wire.experts = (4, 2)
    wire.kept = True
    return wire


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts in the hub's format."""
    return save_mixture(tmp_path_factory.mktemp("mixture"))


async def ask(session: OpenSession, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """The answer's message, to be echoed."""
    async with session.post_openai(messages=messages, **fields) as response:
        body = await response.json()
        assert response.status == 200, body
        message: dict[str, Any] = body["choices"][0]["message"]
        return message


async def talk(session: OpenSession, **sampling: Any) -> None:
    """Turns, an edited question, and a title with a distribution of its own."""
    messages: list[Any] = [{"role": "user", "content": "Mend the file a.py."}]
    fields = {"max_tokens": 24, "tools": TOOLS, **sampling}
    for turn in range(3):
        answer = await ask(session, messages, **fields)
        messages += [answer, {"role": "user", "content": f"Go on {turn}."}]
    edited = {"role": "user", "content": "Mend the file b.py."}
    await ask(session, [edited, *messages[1:]], **fields)
    title = {"role": "user", "content": "Write a title."}
    await ask(session, [title], max_tokens=12, top_p=0.5)


@pytest.mark.parametrize(
    "sampling",
    [{}, TOGETHER, *(pytest.param(each, marks=pytest.mark.slow) for each in ALONE)],
    ids=lambda sampling: "+".join(sampling) or "plain",
)
async def test_every_trained_token_is_recomputed(
    tmp_path: Path, folder: Path, sampling: dict[str, float]
) -> None:
    """With recorded experts and kept sets, no captured log probability differs by over 1e-4."""
    model = make_mixture()
    async with (
        make(model, max_model_len=1024) as engine,
        serve(create_app(engine, model_name="m")) as url,
        open_session(tmp_path, url, wire=make_wire(), policy=Policy.ALLOW) as session,
    ):
        await talk(session, **sampling)
        recording = session.recording
    calls = recording.calls
    assert len(calls) == 5
    assert all(call.experts is not None for call in calls)
    assert {call.sampling.top_p for call in calls} == {sampling.get("top_p", 1.0), 0.5}
    recomputer = Recomputer(folder)
    for builder in (PrefixMerging(train_side=True), PerRequest(train_side=True)):
        traces, ledger, _ = builder.build(calls)
        assert ledger.masked == {}
        result = recomputer.compute(traces, calls)
        for call in calls:
            apart = np.abs(result.logprobs[call.number] - call.logprobs)
            assert np.isfinite(apart).all(), "no token is unreproducible"
            assert apart.max(initial=0) <= 1e-4
    report = verify_session(tmp_path / "none.rec", recording, TextVerifier(None))
    verify_with_model(report, recording, recomputer, 1e-4)
    assert report.checks["model"].verdict == "pass"
    assert len(report.experts_changed) == 4


async def test_an_answer_across_new_weights_is_trained_with_the_experts_of_its_longer_part(
    tmp_path: Path, folder: Path
) -> None:
    """The other part is masked; what is trained is recomputed under the weights that sampled it."""
    old, new = make_mixture(), make_mixture(seed=1)
    async with (
        make(make_mixture(), max_model_len=1024) as engine,
        serve(create_app(engine, model_name="m")) as url,
        open_session(tmp_path, url, wire=make_wire(), policy=Policy.ALLOW) as session,
    ):
        question = [{"role": "user", "content": "Count to a hundred."}]
        asking = asyncio.ensure_future(ask(session, question, max_tokens=60, stop=["never"]))
        await until(lambda: engine.stats().sampled_tokens >= 4)
        await engine.swap(new.state_dict(), 1, PauseMode.KEEP)
        await asking
        (call,) = session.recording.calls
    assert [span.version for span in call.versions] == [0, 1]
    (masked,) = call.masked
    assert masked.reason is Reason.ROUTES_CHANGED
    kept_version = 0 if masked.start else 1
    weights = old if kept_version == 0 else new
    weights.save_pretrained(tmp_path / "weights")
    shutil.copy(folder / "tokenizer.json", tmp_path / "weights")
    traces, ledger, _ = PrefixMerging().build([call])
    assert ledger.masked == {Reason.ROUTES_CHANGED: masked.end - masked.start}
    result = Recomputer(tmp_path / "weights").compute(traces, [call])
    apart = np.abs(result.logprobs[0] - call.logprobs)
    assert np.isfinite(apart).sum() == ledger.trained > 0
    assert np.nanmax(apart) <= 1e-4
