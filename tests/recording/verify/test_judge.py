"""A recorded session passes, and every kind of error in it is detected."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from recording.verify.recorded import LOOK, changed, one_changed, read_in, rewritten, verify, work
from support.calls import make_call, make_header, write_calls
from support.engine import RENDERING, ids, reply_with
from support.gateway import open_session
from support.polling import until
from tugline.chat.model_call import Piece, join_pieces
from tugline.chat.stream_parser import StreamParser
from tugline.gateway.policy import CallSettings
from tugline.recording.file import Recording, write_result
from tugline.recording.records import Header, RecordedResult
from tugline.recording.verify.session import VerifyVerdict, verify_session
from tugline.recording.verify.text import TextVerifier, make_rendering
from tugline.traces.base import Built, PrefixMerging
from tugline.traces.lineage import Continuation
from tugline.types import (
    Call,
    CallOutcome,
    Message,
    Mode,
    PluginSpec,
    Role,
    Sampling,
    Status,
    Tool,
    VersionSpan,
)

LONG = " ".join(f"word{i}" for i in range(20))
(Z,) = ids("Z", end=False)
LONG_SPAN = (VersionSpan(0, 0, 9),)
NEVER = Message(Role.ASSISTANT, "Never.")


@pytest.mark.parametrize(
    ("change", "wrong", "expected"),
    [
        (one_changed(0, "sampled_ids", 3, Z), "lineage text", "call 0 returned text 'Let"),
        (one_changed(1, "prompt_ids", 5, 0), "lineage", "call 1 repeats only 5 of the"),
        (one_changed(3, "sampled_ids", 2, -1), "numbers text", "call 3 has a negative token id"),
        (one_changed(2, "logprobs", 2, 0.5), "numbers", "call 2 has the logprob 0.5 at sampled"),
        (one_changed(2, "logprobs", 2, np.nan), "numbers traces", "logprob nan at sampled"),
        (changed(2, versions=()), "ledger numbers traces", "versions cover none of 7"),
        (changed(2, versions=LONG_SPAN), "ledger numbers traces", "versions cover 0-9 of 7"),
        (changed(2, answer=NEVER), "text", "'Never.', but its ids decode to text"),
        (changed(3, branch=None), "lineage", "call 3 repeats only"),
        (changed(3, parent=7), "lineage", "continues call 7, which is not recorded"),
    ],
)
async def test_false_records_are_detected(
    change: Callable[[Call], Call], wrong: str, expected: str, tmp_path: Path
) -> None:
    """One changed id, number, text or link fails its check and is reported with its call."""
    await work(tmp_path)
    rewritten(*read_in(tmp_path), change)
    report = verify(tmp_path)
    failed = {name for name, check in report.checks.items() if check.verdict is VerifyVerdict.FAIL}
    assert " ".join(sorted(failed)) == wrong
    assert expected in " ".join(fault for turn in report.turns for fault in turn.faults)
    assert report.failed


async def test_the_recorded_ledger_must_equal_the_builders(tmp_path: Path) -> None:
    """A result with the same ledger passes, one with another fails."""
    await work(tmp_path)
    path, recording = read_in(tmp_path)
    right = PrefixMerging().build(recording.calls).ledger
    wrong = replace(right, trained=right.trained - 1, masked={})
    for ledger, verdict in ((right, VerifyVerdict.PASS), (wrong, VerifyVerdict.FAIL)):
        result = RecordedResult(status=Status.COMPLETED, builder="prefix_merging", ledger=ledger)
        write_result(path, result)
        report = verify(tmp_path)
        assert report.checks["ledger"].verdict is verdict
        assert report.notes == []


class WrongContext(PrefixMerging):
    """A builder whose traces have another context than the calls."""

    def build(self, calls: Sequence[Call]) -> Built:
        """Change the first id of the prompt."""
        traces, ledger, _ = super().build(calls)
        ids = traces[0].ids.copy()
        ids[0] += 1
        return Built((replace(traces[0], ids=ids), *traces[1:]), ledger)


class LostTrace(PrefixMerging):
    """A builder that loses a trace."""

    def build(self, calls: Sequence[Call]) -> Built:
        """Omit the last trace, with a wrong ledger."""
        traces, ledger, _ = super().build(calls)
        return Built(traces[:-1], replace(ledger, sampled=ledger.sampled + 1))


@pytest.mark.parametrize(
    ("builder", "ledger", "traces"),
    [
        (f"{__name__}:WrongContext", VerifyVerdict.PASS, VerifyVerdict.FAIL),
        (f"{__name__}:LostTrace", VerifyVerdict.FAIL, VerifyVerdict.FAIL),
        ("missing_module:Builder", VerifyVerdict.UNCHECKED, VerifyVerdict.UNCHECKED),
    ],
)
async def test_traces_must_match_the_sampled_tokens(
    builder: str, ledger: VerifyVerdict, traces: VerifyVerdict, tmp_path: Path
) -> None:
    """A wrong context and a lost trace fail; a builder that is not installed is not checked."""
    await work(tmp_path)
    path, recording = read_in(tmp_path)
    recording.header = replace(
        recording.header, task=replace(recording.header.task, builder=PluginSpec(builder))
    )
    checks = verify_session(path, recording, TextVerifier()).checks
    assert (checks["ledger"].verdict, checks["traces"].verdict) == (ledger, traces)


# --------------------------------------------------------------------------- reading ids
@pytest.mark.parametrize(
    "fields",
    [
        {"stop_sequences": ["word12"]},
        {"tool_choice": {"type": "tool", "name": "read"}},
        {"tool_choice": {"type": "any"}},
        {"max_tokens": 30},
    ],
    ids=["stop", "named", "any", "cut"],
)
async def test_answers_changed_by_the_gateway_pass(
    fields: dict[str, object], tmp_path: Path
) -> None:
    """The ids of stopped, forced and cut answers decode to what the harness received."""
    answer = LOOK if "tool_choice" in fields else LONG
    async with open_session(tmp_path, reply_with(answer)) as session:
        reply = await session.ask(**fields)
        assert reply["status"] == 200, reply
    checks = verify(tmp_path).checks
    assert checks["text"].verdict is VerifyVerdict.PASS, checks
    assert read_in(tmp_path)[1].calls[0].answer is not None


@pytest.mark.parametrize(
    "fields",
    [{}, {"tool_choice": {"type": "tool", "name": "read"}}, {"tool_choice": {"type": "any"}}],
    ids=["free", "named", "any"],
)
async def test_a_resumed_answer_passes(fields: dict[str, object], tmp_path: Path) -> None:
    """Both halves decode to what the harness received; the second extends the first exactly."""
    answer = LOOK.replace("a.py", LONG) if fields else LONG
    async with open_session(
        tmp_path, reply_with(answer, delay_s=0.004), tuning=CallSettings(grace_s=0.01)
    ) as session:
        response = await session.post(session.body(stream=True, **fields))
        await response.content.readany()
        await until(lambda: session.sampled > 12)
        response.close()
        await until(lambda: session.calls)
        (received,) = (await session.ask(**fields))["content"]
    assert received.get("text") == LONG or received["input"] == {"path": LONG, "n": 1}
    report = verify(tmp_path)
    path, recording = read_in(tmp_path)
    assert [call.outcome for call in recording.calls] == [
        CallOutcome.CLIENT_GONE,
        CallOutcome.COMPLETE,
    ]
    assert [turn.continuation for turn in report.turns] == [Continuation.FIRST, Continuation.EXACT]
    assert not report.failed, report.checks
    rewritten(path, recording, changed(1, answer=Message(Role.ASSISTANT, "word0 wort1")))
    assert verify(tmp_path).checks["text"].verdict is VerifyVerdict.FAIL


QUESTION = (Message(Role.USER, "x"),)
PROMPT = RENDERING.render(QUESTION, ())
TOOLS = (Tool("read", "", {}),)


def _call(sampled: list[int], answer: Message | None, **fields: Any) -> Call:
    return make_call(0, PROMPT, sampled, messages=QUESTION, answer=answer, **fields)


HEADER = make_header(template="qwen3", thinking_retention="all")
PIECES = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", LOOK, "é\n", " a"])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_sampled_answer_passes(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random ids, streamed in random chunks, complete or not, decode to the received answer."""
    texts = data.draw(st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=8))
    sampled = ids("".join(texts), end=data.draw(st.booleans()))
    sampled += data.draw(st.lists(st.integers(0, RENDERING.tokenizer.size - 1), max_size=4))
    gone, stops = data.draw(st.booleans()), data.draw(st.sampled_from([(), ("a",), ("\n",)]))
    decoder = StreamParser(RENDERING, PROMPT[-64:], "0", stops=stops, tools=TOOLS)
    at = 0
    pieces: list[Piece] = []
    while at < len(sampled) and decoder.matched_stop is None:
        more = sampled[at : at + data.draw(st.integers(1, 9))]
        pieces += decoder.feed(more)
        at += len(more)
    folder = tmp_path_factory.getbasetemp() / "tokenizer"
    if not folder.exists():
        folder.mkdir()
        RENDERING.tokenizer.save(folder)
    streamed = join_pieces(pieces) or Message(Role.ASSISTANT)
    received = streamed if gone else decoder.finish()[1]
    outcome = CallOutcome.CLIENT_GONE if gone else CallOutcome.COMPLETE
    sampling = Sampling(temperature=1.0, stop=stops)
    call = _call(
        sampled[: decoder.length], received, outcome=outcome, sampling=sampling, tools=TOOLS
    )
    call = replace(call, malformed=decoder.malformed)
    assert TextVerifier(folder).find_faults(folder / "s.rec", HEADER, [call]) == {}
    false = replace(call, answer=replace(received, content=received.content + "!"))
    assert TextVerifier(folder).find_faults(folder / "s.rec", HEADER, [false])


@pytest.mark.parametrize(("recorded", "used"), [("", "tokens"), ("text", "text")])
def test_a_recording_keeps_its_encoding_of_special_tokens(recorded: str, used: str) -> None:
    """A recording from before the setting has the tokenizer's encoding of special tokens."""
    header = msgspec.json.encode(replace(HEADER, special_tokens_in_contents=recorded))
    read = msgspec.json.decode(header, type=Header)
    assert make_rendering(read, RENDERING.tokenizer).special_tokens_in_contents == used


# --------------------------------------------------------------------------- other modes
def _observed(tmp_path: Path, mode: Mode, **fields: Any) -> tuple[Path, Recording]:
    call = replace(_call(ids("Hi. "), Message(Role.ASSISTANT, "Hi.")), mode=mode, **fields)
    write_calls(tmp_path / "s.0.rec", [call], replace(HEADER, template="", mode=mode))
    return read_in(tmp_path)


def test_an_observed_answer_is_checked_with_a_tokenizer_only(tmp_path: Path) -> None:
    """Without a tokenizer the text is not checked; with one, the sampled ids must decode to it."""
    path, recording = _observed(tmp_path, Mode.OBSERVED)
    check = verify_session(path, recording, TextVerifier()).checks["text"]
    assert check.verdict is VerifyVerdict.UNCHECKED
    assert "give one with --tokenizer" in check.detail
    (tmp_path / "tokenizer").mkdir()
    RENDERING.tokenizer.save(tmp_path / "tokenizer")
    texts = TextVerifier(tmp_path / "tokenizer")
    for text, verdict in (("Hi.", VerifyVerdict.PASS), ("Ho.", VerifyVerdict.FAIL)):
        answer = Message(Role.ASSISTANT, text)
        recording.calls = (replace(recording.calls[0], answer=answer),)
        assert verify_session(path, recording, texts).checks["text"].verdict is verdict


def test_a_call_without_ids_is_in_the_ledger(tmp_path: Path) -> None:
    """A call in text mode is neither exact nor broken; its tokens are counted by reason."""
    none = np.empty(0, np.int32)
    no_ids = {"prompt_ids": none, "sampled_ids": none, "logprobs": np.empty(0, np.float32)}
    recorded = _observed(tmp_path, Mode.TEXT, versions=(), unreported_tokens=4, **no_ids)
    report = verify_session(*recorded, TextVerifier())
    assert [turn.continuation for turn in report.turns] == [Continuation.NO_TOKEN_IDS]
    assert report.turns[0].sampled == 4
    assert report.checks["ledger"].verdict is VerifyVerdict.PASS
    assert "4 no_token_ids" in report.checks["ledger"].detail
