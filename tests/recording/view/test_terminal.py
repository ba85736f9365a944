"""A session on a terminal: readable without colour, short, without escape sequences of others."""

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from recording.view.synthetic import HOSTILE, LAST_WORD, long, small, tokenizer, view
from tugline.chat.tokenizer import Tokenizer
from tugline.log import visible
from tugline.recording.view.session_view import TokenText, ViewedSession
from tugline.recording.view.terminal import Terminal


def render(
    session: ViewedSession,
    *,
    texts: TokenText | None = None,
    turn: int | None = None,
    colour: bool = False,
) -> str:
    """The printed text; with `colour` that for a terminal."""
    file, system = io.StringIO(), "truecolor" if colour else None
    console = Console(
        file=file, force_terminal=colour, color_system=system, width=140, highlight=False
    )
    terminal = Terminal(console, session, texts or TokenText(tokenizer()))
    terminal.print_session() if turn is None else terminal.print_turn(turn)
    return file.getvalue()


@pytest.fixture
def session(tmp_path: Path) -> ViewedSession:
    """The small session."""
    return view(small(tmp_path))


def test_the_view_is_complete_without_colour(session: ViewedSession) -> None:
    """The view has the outcome, each turn, the events, each trace and the ledger."""
    text = render(session)
    assert "\x1b" not in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "completed, reward 0.5 (tests 0.5)" in lines["status"]
    assert re.search(r"3 +main a +forked\(history_edited\) 0 +1,078\+9 +5 ", text)
    assert re.search(r"2 +main a +exact +1,191\+1 +6 .* client_gone +5 ", text)
    assert re.search(r"~ +engine_fault +in call 2 +5\.20 +replica \\x1b\[2J b died", text)
    branch = "trace 1  branch  1,092 tokens, 5 trainable, 1 answer  forks from trace 0, 1,078 ids"
    assert branch in text
    assert "call 2         6 (client_gone) never heard" in text
    assert "sampled 85 = trainable 79 + masked(client_gone) 6" in lines["ledger"]
    assert "… 1,054 tokens …" in text


def test_colour_follows_the_mask(session: ViewedSession) -> None:
    """On a terminal, trained tokens are green and masked ones yellow."""
    text = render(session, colour=True)
    assert "\x1b[32mI read it." in text
    assert "\x1b[33mnever heard" in text


def test_text_is_escaped_for_the_terminal(session: ViewedSession) -> None:
    """Escape sequences and direction marks of models and tools are spelled out."""
    for text in (render(session), render(session, turn=1)):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\\x1b[31m red \\u202e backwards 界🙂" in text


def test_a_turn_has_its_messages_and_answer(session: ViewedSession) -> None:
    """A turn also has its tokens, ledger and events."""
    text = render(session, turn=1)
    assert visible(HOSTILE) in text.split("tool\n")[1]
    assert "assistant (as returned to the harness)" in text
    assert "sampled 56 = trainable 56" in text
    assert "engine_fault" not in text
    assert "engine_fault" in render(session, turn=2)


def test_a_long_session_is_abbreviated(tmp_path: Path) -> None:
    """Each turn has a line, but only the first and last answers are printed; others on request."""
    session = view(long(tmp_path, turns=400, base=400, length=20))
    began = time.process_time()
    text = render(session)
    assert time.process_time() - began < 5
    lines = text.splitlines()
    assert len(lines) < 401 + 300
    assert "… 388 more answers" in text
    assert LAST_WORD in "\n".join(lines[-60:])
    assert "  call 200 " not in text
    assert "  call 200 " in render(session, turn=200)


def test_many_traces_are_abbreviated(tmp_path: Path) -> None:
    """`per_request` makes a trace for each call, of which the first and last are listed."""
    text = render(view(long(tmp_path, turns=40, base=50, length=5), "per_request"))
    assert "… 17 more traces" in text
    assert "trace 20  main" not in text


def test_without_a_tokenizer_ids_are_printed(session: ViewedSession) -> None:
    """Each token is printed as its id, a number."""
    lines = render(session, texts=TokenText(None)).splitlines()
    (line,) = (line for line in lines if line.startswith("  call 0 "))
    assert line.split()[3:] == [str(token) for token in session.calls[0].sampled_ids]


def test_tokens_keep_their_leading_spaces() -> None:
    """A word that a vocabulary like SentencePiece's marks with a bar begins with a space."""
    backend = Backend(models.WordLevel({"▁a": 0, "▁world": 1, "?": 2}, unk_token="?"))
    backend.decoder = decoders.Metaspace()
    metaspace = Tokenizer(backend, "metaspace")
    metaspace.token_bytes = None  # as for every vocabulary whose ids have no bytes of their own
    assert TokenText(metaspace).pieces([0, 1, 1]) == [" a", " world", " world"]
