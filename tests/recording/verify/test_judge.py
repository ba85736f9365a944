"""A recorded session passes as it is, and every kind of falsehood in it is found."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from calls import make_call, make_header, write_calls
from recording.verify.recorded import LOOK, changed, one_changed, read_in, rewritten, verify, work
from rig import RENDERING, ids, rig, says, until
from tugline.chat.model_call import Piece, join_pieces
from tugline.chat.stream_parser import StreamParser
from tugline.gateway.policy import CallSettings
from tugline.recording.file import Recording, write_result
from tugline.recording.records import RecordedResult
from tugline.recording.verify.session import VerifyVerdict, verify_session
from tugline.recording.verify.text import TextVerifier
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
    VersionSpan,
)

LONG = " ".join(f"word{i}" for i in range(20))
(Z,) = ids("Z", end=False)
LONG_SPAN = (VersionSpan(0, 0, 9),)
NEVER = Message(Role.ASSISTANT, "Never.")


@pytest.mark.parametrize(
    ("change", "wrong", "expected"),
    [
        (one_changed(0, "sampled_ids", 3, Z), "lineage text", "call 0 was answered with text 'Let"),
        (one_changed(1, "prompt_ids", 5, 0), "lineage", "call 1 has only 5 of the"),
        (one_changed(3, "sampled_ids", 2, -1), "numbers text", "call 3 has an id below 0"),
        (one_changed(2, "logprobs", 2, 0.5), "numbers", "call 2 has the logprob 0.5 at sampled"),
        (one_changed(2, "logprobs", 2, np.nan), "numbers traces", "logprob nan at sampled"),
        (changed(2, versions=()), "ledger numbers traces", "versions for none of 7"),
        (changed(2, versions=LONG_SPAN), "ledger numbers traces", "versions for 0-9 of 7"),
        (changed(2, answer=NEVER), "text", "'Never.'; its ids decode to text"),
        (changed(3, branch=None), "lineage", "call 3 has only"),
        (changed(3, parent=7), "lineage", "continues call 7, which is not recorded"),
    ],
)
async def test_what_is_false_is_found(
    change: Callable[[Call], Call], wrong: str, expected: str, tmp_path: Path
) -> None:
    """One changed id, number, text or link fails its check and is named with its call."""
    await work(tmp_path)
    rewritten(*read_in(tmp_path), change)
    found = verify(tmp_path)
    failed = {name for name, check in found.checks.items() if check.verdict is VerifyVerdict.FAIL}
    assert " ".join(sorted(failed)) == wrong
    assert expected in " ".join(fault for turn in found.turns for fault in turn.faults)
    assert found.failed


async def test_the_recorded_ledger_must_be_the_builders(tmp_path: Path) -> None:
    """A result with the same books passes, one with others fails."""
    await work(tmp_path)
    path, recording = read_in(tmp_path)
    right = PrefixMerging().build(recording.calls).ledger
    wrong = replace(right, trained=right.trained - 1, masked={})
    for ledger, verdict in ((right, VerifyVerdict.PASS), (wrong, VerifyVerdict.FAIL)):
        result = RecordedResult(status=Status.COMPLETED, builder="prefix_merging", ledger=ledger)
        write_result(path, result)
        found = verify(tmp_path)
        assert found.checks["ledger"].verdict is verdict
        assert found.notes == []


class Careless(PrefixMerging):
    """A builder that trains on another context than was sampled in."""

    def build(self, calls: Sequence[Call]) -> Built:
        """Like the default one, but for an id of the prompt."""
        traces, ledger, _ = super().build(calls)
        ids = traces[0].ids.copy()
        ids[0] += 1
        return Built((replace(traces[0], ids=ids), *traces[1:]), ledger)


class Lossy(PrefixMerging):
    """A builder that loses a trace."""

    def build(self, calls: Sequence[Call]) -> Built:
        """Without the last trace, in a ledger that does not say so."""
        traces, ledger, _ = super().build(calls)
        return Built(traces[:-1], replace(ledger, sampled=ledger.sampled + 1))


@pytest.mark.parametrize(
    ("builder", "ledger", "traces"),
    [
        (f"{__name__}:Careless", VerifyVerdict.PASS, VerifyVerdict.FAIL),
        (f"{__name__}:Lossy", VerifyVerdict.FAIL, VerifyVerdict.FAIL),
        ("nobody:Knows", VerifyVerdict.UNCHECKED, VerifyVerdict.UNCHECKED),
    ],
)
async def test_a_builder_is_held_to_what_was_sampled(
    builder: str, ledger: VerifyVerdict, traces: VerifyVerdict, tmp_path: Path
) -> None:
    """A wrong context, a lost trace and a builder that is not here are told apart."""
    await work(tmp_path)
    path, recording = read_in(tmp_path)
    assert recording.header is not None
    recording.header = replace(
        recording.header, task=replace(recording.header.task, builder=PluginSpec(builder))
    )
    found = verify_session(path, recording, TextVerifier())
    assert (found.checks["ledger"].verdict, found.checks["traces"].verdict) == (ledger, traces)


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
async def test_answers_that_the_gateway_shaped_are_read_back(
    fields: dict[str, object], tmp_path: Path
) -> None:
    """Stop strings, forced tool calls and cut answers say what was told."""
    answer = LOOK if "tool_choice" in fields else LONG
    async with rig(tmp_path, says(answer)) as it:
        reply = await it.ask(**fields)
        assert reply["status"] == 200, reply
    found = verify(tmp_path)
    assert found.checks["text"].verdict is VerifyVerdict.PASS, found.checks
    assert read_in(tmp_path)[1].calls[0].answer is not None


@pytest.mark.parametrize(
    "fields",
    [{}, {"tool_choice": {"type": "tool", "name": "read"}}, {"tool_choice": {"type": "any"}}],
    ids=["free", "named", "any"],
)
async def test_an_answer_that_broke_off_and_was_taken_up_is_read_back(
    fields: dict[str, object], tmp_path: Path
) -> None:
    """Both halves say what was told, and the second goes on exactly from the first."""
    answer = LOOK.replace("a.py", LONG) if fields else LONG
    async with rig(tmp_path, says(answer, delay_s=0.004), tuning=CallSettings(grace_s=0.01)) as it:
        response = await it.post(it.body(stream=True, **fields))
        await response.content.readany()
        await until(lambda: it.sampled > 12)
        response.close()
        await until(lambda: it.calls)
        (received,) = (await it.ask(**fields))["content"]
    assert received.get("text") == LONG or received["input"] == {"path": LONG, "n": 1}
    found = verify(tmp_path)
    path, recording = read_in(tmp_path)
    assert [call.outcome for call in recording.calls] == [
        CallOutcome.CLIENT_GONE,
        CallOutcome.COMPLETE,
    ]
    assert [turn.continuation for turn in found.turns] == [Continuation.FIRST, Continuation.EXACT]
    assert not found.failed, found.checks
    rewritten(path, recording, changed(1, answer=Message(Role.ASSISTANT, "word0 wort1")))
    assert verify(tmp_path).checks["text"].verdict is VerifyVerdict.FAIL


def _call(
    sampled: list[int], answer: Message | None, outcome: CallOutcome, stop: str, **changes: Any
) -> Call:
    fields: dict[str, Any] = {
        "messages": (Message(Role.USER, "x"),),
        "answer": answer,
        "sampling": Sampling(temperature=1.0, stop=(stop,) if stop else ()),
        "outcome": outcome,
    }
    prompt = RENDERING.render((Message(Role.USER, "x"),), ())
    return make_call(0, prompt, sampled, **fields | changes)


HEADER = make_header(template="qwen3", thinking_retention="all")
PIECES = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", LOOK, "é\n", " a"])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_is_sampled_reads_the_same_again(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random ids, told in random pieces to the end or until hung up on, are read back alike."""
    words = data.draw(st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=8))
    sampled = ids("".join(words), end=data.draw(st.booleans()))
    sampled += data.draw(st.lists(st.integers(0, RENDERING.tokenizer.size - 1), max_size=4))
    gone, stop = data.draw(st.booleans()), data.draw(st.sampled_from(["", "a", "\n"]))
    prompt = RENDERING.render((Message(Role.USER, "x"),), ())
    decoder = StreamParser(RENDERING, prompt[-64:], "0", stops=(stop,) if stop else ())
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
    told = join_pieces(pieces) or Message(Role.ASSISTANT)
    received = told if gone else decoder.finish()[1]
    outcome = CallOutcome.CLIENT_GONE if gone else CallOutcome.COMPLETE
    call = _call(sampled[: decoder.length], received, outcome, stop)
    assert TextVerifier(folder).find_faults(folder / "s.rec", HEADER, [call]) == {}
    lie = replace(call, answer=replace(received, content=received.content + "!"))
    assert TextVerifier(folder).find_faults(folder / "s.rec", HEADER, [lie])


# --------------------------------------------------------------------------- other modes
def _observed(tmp_path: Path, mode: Mode, **fields: Any) -> tuple[Path, Recording]:
    call = _call(ids("Hi. "), Message(Role.ASSISTANT, "Hi."), CallOutcome.COMPLETE, "", mode=mode)
    path = tmp_path / "s.0.rec"
    write_calls(path, [replace(call, **fields)], replace(HEADER, template="", mode=mode))
    return read_in(tmp_path)


def test_an_observed_answer_is_checked_with_a_tokenizer_and_never_without(tmp_path: Path) -> None:
    """No tokenizer: said so, not passed. With one, the told words must be among the sampled."""
    path, recording = _observed(tmp_path, Mode.OBSERVED)
    check = verify_session(path, recording, TextVerifier()).checks["text"]
    assert check.verdict is VerifyVerdict.UNCHECKED
    assert "give --tokenizer" in check.detail
    (tmp_path / "tokenizer").mkdir()
    RENDERING.tokenizer.save(tmp_path / "tokenizer")
    texts = TextVerifier(tmp_path / "tokenizer")
    for words, verdict in (("Hi.", VerifyVerdict.PASS), ("Ho.", VerifyVerdict.FAIL)):
        answer = Message(Role.ASSISTANT, words)
        recording.calls = (replace(recording.calls[0], answer=answer),)
        assert verify_session(path, recording, texts).checks["text"].verdict is verdict


def test_a_call_without_ids_is_untold_and_its_tokens_are_in_the_ledger(tmp_path: Path) -> None:
    """Text mode is neither exact nor broken."""
    none = np.empty(0, np.int32)
    nothing = {"prompt_ids": none, "sampled_ids": none, "logprobs": np.empty(0, np.float32)}
    recorded = _observed(tmp_path, Mode.TEXT, versions=(), unreported_tokens=4, **nothing)
    found = verify_session(*recorded, TextVerifier())
    assert [turn.continuation for turn in found.turns] == [Continuation.NO_TOKEN_IDS]
    assert found.turns[0].sampled == 4
    assert found.checks["ledger"].verdict is VerifyVerdict.PASS
    assert "4 no_token_ids" in found.checks["ledger"].detail
