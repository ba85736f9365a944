"""A session on a terminal: readable without colour, short when it is long, never obeyed."""

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from recording.view.synthetic import HOSTILE, LAST_WORD, long, small, tokenizer
from tugline.chat.tokenizer import Tokenizer
from tugline.log import visible
from tugline.recording.file import read
from tugline.recording.view.session_view import TokenText, ViewedSession, view_session
from tugline.recording.view.terminal import Terminal


def render(
    session: ViewedSession,
    *,
    texts: TokenText | None = None,
    turn: int | None = None,
    colour: bool = False,
) -> str:
    """What is printed; with `colour` as a terminal gets it."""
    file, system = io.StringIO(), "truecolor" if colour else None
    console = Console(
        file=file, force_terminal=colour, color_system=system, width=140, highlight=False
    )
    view = Terminal(console, session, texts or TokenText(tokenizer()))
    view.print_session() if turn is None else view.print_turn(turn)
    return file.getvalue()


@pytest.fixture
def session(tmp_path: Path) -> ViewedSession:
    """The small session."""
    path = small(tmp_path)
    return view_session(path, read(path))


def test_all_is_said_in_words(session: ViewedSession) -> None:
    """Without colour: who ran, each turn, what happened between, each trace, the ledger."""
    text = render(session)
    assert "\x1b" not in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "completed, reward 0.5 (tests 0.5)" in lines["status"]
    assert re.search(r"3 +main a +forked\(history_edited\) 0 +1,078\+9 +5 ", text)
    assert re.search(r"2 +main a +exact +1,195\+1 +6 .* client_gone +5 ", text)
    assert re.search(r"~ +engine_fault +in call 2 +5\.20 +replica \\x1b\[2J b died", text)
    branch = "trace 1  branch  1,092 tokens, 5 trained, 1 answer  forks from trace 0, 1,078 ids"
    assert branch in text
    assert "call 2         6 (client_gone) never heard" in text
    assert "sampled 87 = trained 81 + masked(client_gone) 6" in lines["ledger"]
    assert "… 1,054 tokens …" in text


def test_colour_follows_the_mask(session: ViewedSession) -> None:
    """On a terminal, trained tokens are green and those that are not are yellow."""
    text = render(session, colour=True)
    assert "\x1b[32mI read it." in text
    assert "\x1b[33mnever heard" in text


def test_nothing_that_was_written_reaches_the_terminal_raw(session: ViewedSession) -> None:
    """Escape sequences and marks of direction of models and tools are spelled out."""
    for text in (render(session), render(session, turn=1)):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\\x1b[31m red \\u202e backwards 界🙂" in text


def test_one_turn_shows_all_that_was_said(session: ViewedSession) -> None:
    """Its messages, its answer, its tokens and what became of them."""
    text = render(session, turn=1)
    assert visible(HOSTILE) in text.split("tool\n")[1]
    assert "assistant (as the harness received it)" in text
    assert "sampled 58 = trained 58" in text
    assert "engine_fault" not in text
    assert "engine_fault" in render(session, turn=2)


def test_hundreds_of_turns_stay_a_page_or_two(tmp_path: Path) -> None:
    """A line per turn, the first and last answers, in time; the others one by one."""
    path = long(tmp_path, turns=400, base=400, words=20)
    session = view_session(path, read(path))
    began = time.process_time()
    text = render(session)
    assert time.process_time() - began < 5
    lines = text.splitlines()
    assert len(lines) < 401 + 300
    assert "… 388 more answers" in text
    assert LAST_WORD in "\n".join(lines[-60:])
    assert "  call 200 " not in text
    assert "  call 200 " in render(session, turn=200)


def test_many_traces_are_a_line_each_and_folded(tmp_path: Path) -> None:
    """`per_request` makes one for each call: the first and last are told."""
    path = long(tmp_path, turns=40, base=50, words=5)
    session = view_session(path, read(path), "per_request")
    assert "… 17 more traces" in render(session)
    assert "trace 20  main" not in render(session)


def test_without_a_tokenizer_ids_are_shown(session: ViewedSession) -> None:
    """Numbers instead of words, as many as there are tokens."""
    lines = render(session, texts=TokenText(None)).splitlines()
    (line,) = (line for line in lines if line.startswith("  call 0 "))
    assert line.split()[3:] == [str(token) for token in session.calls[0].sampled_ids]


def test_tokens_keep_their_spaces_where_a_tokenizer_drops_the_first() -> None:
    """Of a vocabulary that marks words by a leading bar, each piece has its space."""
    backend = Backend(models.WordLevel({"▁a": 0, "▁world": 1, "?": 2}, unk_token="?"))
    backend.decoder = decoders.Metaspace()
    found = Tokenizer(backend, "metaspace")
    found.token_bytes = None  # as for every vocabulary whose ids have no spelling of their own
    assert TokenText(found).pieces([0, 1, 1]) == [" a", " world", " world"]
