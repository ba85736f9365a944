"""A session on a terminal: a header, a line per turn, traces token by token, the ledger.

Colours repeat what the text says. Long contexts and the middle of long sessions are folded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby

from msgspec.structs import asdict
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tugline.recording.records import RecordedResult
from tugline.recording.view.session_view import (
    NEWLINE,
    TimelineEvent,
    TokenText,
    TraceView,
    TurnView,
    ViewedSession,
    finite_mean,
    fold_range,
    indent_levels,
    split_runs,
    visible,
)
from tugline.traces.lineage import Continuation
from tugline.types import Ledger, Message, Sampling, Span, Trace, TraceKind

_WIDTH = 120
"""Cells of a line of tokens if the output is not a terminal."""
_GUTTER = 26
_RUNS = 12
"""Answers of a trace, and traces of a session, that are shown token by token."""
_CLIP = 2000
"""Characters of a message."""
CONTINUATION_STYLES = {
    Continuation.FIRST: "green",
    Continuation.EXACT: "green",
    Continuation.ECHO_CHANGED: "cyan",
    Continuation.FORKED: "yellow",
    Continuation.BROKEN: "red",
    Continuation.NO_TOKEN_IDS: "yellow",
}
_LEVELS = ((-0.05, "green"), (-0.5, "cyan"), (-1.5, "yellow"), (-3.0, "magenta"))
_VERSIONS = ("green", "cyan", "magenta", "yellow", "blue", "red")


class ColourBy(StrEnum):
    """The property that a token's colour shows."""

    MASK = "mask"
    LOGPROB = "logprob"
    VERSION = "version"


class Terminal:
    """Prints one session."""

    def __init__(
        self,
        console: Console,
        session: ViewedSession,
        texts: TokenText,
        *,
        by: ColourBy = ColourBy.MASK,
        full: bool = False,
    ) -> None:
        self.console, self.session, self.texts = console, session, texts
        self.by, self.full = by, full
        threads = dict.fromkeys(turn.thread for turn in session.view.turns)
        self._threads = {thread: _letter(place) for place, thread in enumerate(threads)}
        """A short name for each thread, in order of appearance."""
        versions = {v.version for turn in session.view.turns for v in turn.versions}
        self._colour = {v: _VERSIONS[i % len(_VERSIONS)] for i, v in enumerate(sorted(versions))}

    def print_line(self, *parts: str | tuple[str, str]) -> None:
        """Print one line; the terminal wraps it."""
        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def print_session(self) -> None:
        """Print the whole session."""
        self._print_header()
        moments: list[TurnView | TimelineEvent] = [
            *self.session.view.turns,
            *self.session.view.events,
        ]
        self._print_table(sorted(moments, key=lambda moment: moment.at))
        self._print_traces()
        self.print_line("")
        self._print_ledger("ledger", self.session.view.ledger)

    # ----------------------------------------------------------------------- header
    def _print_header(self) -> None:
        view = self.session.view
        header, result = view.header, view.result
        facts = {"file": view.recording}
        if header is not None:
            facts |= {
                "task": f"{header.task.id} (sample {header.session.sample})",
                "ran": f"{header.task.harness.name} -> {header.model} on {header.engine}",
                "prompts": f"{header.mode} {header.template} {header.thinking_retention}",
                "forked from": header.forked_from,
            }
        if result is not None:
            parts = [f"{name} {s:.1f}" for name, s in result.seconds.items()]
            facts["seconds"] = ", ".join(parts)
        facts |= {"status": _format_status(result), "damage": view.damage}
        if view.torn_bytes:
            facts["damage"] += f"{view.torn_bytes} bytes at the end were cut off"
        if len(self._threads) > 1:
            named = (f"{letter} = {one or 'unnamed'}" for one, letter in self._threads.items())
            facts["threads"] = ", ".join(named)
        self.print_line(
            (visible(header.session.id if header else "the first record is lost"), "bold")
        )
        self._print_facts(facts, alarms={"damage"})

    def _print_facts(self, facts: Mapping[str, str], alarms: Collection[str] = ()) -> None:
        for name, fact in facts.items():
            if text := visible(fact.strip()):
                self.print_line((f"{name:<12}", "dim"), (text, "red" if name in alarms else ""))

    # ----------------------------------------------------------------------- turns
    def _print_table(self, moments: Sequence[TurnView | TimelineEvent]) -> None:
        rows = [
            self._make_row(one) if isinstance(one, TurnView) else _format_event(one)
            for one in moments
        ]
        cells = [_TITLES, *(row for row in rows if isinstance(row, tuple))]
        widths = [max(cell_len(row[i][0]) for row in cells) for i in range(len(_TITLES))]
        self.print_line("")
        for row in (_TITLES, *rows):
            if isinstance(row, tuple):
                self.print_line(*_align(row, widths))
            else:
                self.print_line((" " * (widths[0] + 2) + row, "magenta"))

    def _make_row(self, turn: TurnView) -> _Row:
        thread = self._threads.get(turn.thread, "") if len(self._threads) > 1 else ""
        exact = turn.parent is None or turn.continuation is Continuation.EXACT
        source = "" if exact else f" {turn.parent}"
        reasons = f"({', '.join(turn.reasons)})" if turn.reasons else ""
        finish = turn.finish.value if turn.outcome == "complete" else turn.outcome.value
        finish += ", constrained" * turn.constrained + ", replayed" * turn.replayed
        return (
            (str(turn.call), "bold"),
            (f"{turn.kind.value} {thread}".strip(), ""),
            (
                f"{turn.continuation.value}{reasons}{source}",
                CONTINUATION_STYLES[turn.continuation],
            ),
            (f"{turn.shared:,}+{turn.prompt - turn.shared:,}", ""),
            (f"{turn.sampled:,}", ""),
            (_format_number(turn.mean_logprob), ""),
            (finish, "" if finish == "stop" else "yellow"),
            (",".join(str(span.version) for span in turn.versions) or "-", ""),
            (f"{turn.at:.2f}", "dim"),
            (_format_number(turn.first_token_s), ""),
            (_format_number(turn.total_s), ""),
            (visible(", ".join(turn.tools)), "cyan"),
        )

    def print_turn(self, number: int) -> None:
        """Print one call with its messages."""
        view = self.session.view
        place = next(i for i, turn in enumerate(view.turns) if turn.call == number)
        turn, call = view.turns[place], self.session.calls[place]
        events = [event for event in view.events if event.call == number]
        self._print_table([turn, *events])
        self.print_line("")
        self._print_facts(
            {
                "thread": call.thread or "",
                "dialect": f"{call.dialect}, {call.mode.value}",
                "sampling": _format_sampling(call.sampling),
                "requested": _format_sampling(call.requested),
                "stop": repr(call.stop) if call.stop else "",
                "replicas": ", ".join(call.replicas),
                "tools": ", ".join(tool.name for tool in call.tools),
            }
        )
        for message in call.messages:
            self._print_message(message)
        if call.answer is not None:
            self._print_message(call.answer, received=True)
        if turn.trace is not None:
            self.print_line("")
            trace = self.session.traces[turn.trace]
            for span in (span for span in trace.spans if span.call == number):
                self._print_run(trace, span.start, span.end, span)
        self.print_line("")
        self._print_ledger("ledger", turn.ledger)

    def _print_message(self, message: Message, *, received: bool = False) -> None:
        self.print_line("")
        suffix = " (as the harness received it)" if received else ""
        self.print_line((f"{message.role.value}{suffix}", "bold"))
        if message.reasoning:
            self._print_text(message.reasoning, "dim italic")
        if message.content:
            self._print_text(message.content, "")
        for tool in message.tool_calls:
            self._print_text(f"{tool.name}({tool.arguments})", "cyan")

    def _print_text(self, text: str, style: str) -> None:
        rest = 0 if self.full else max(0, len(text) - _CLIP)
        for line in text[: len(text) - rest].split("\n"):
            self.print_line((f"  {visible(line)}", style))
        if rest:
            self.print_line((f"  … {rest:,} more characters (--full shows them)", "dim"))

    # ----------------------------------------------------------------------- traces
    def _print_traces(self) -> None:
        view = self.session.view
        self.print_line("")
        if view.build_error:
            self.print_line(("no traces  ", "red"), visible(view.build_error))
            return
        size = len(view.traces)
        count = _plural(size, "trace")
        self.print_line(f"{count} of {view.builder}, coloured by {self.by.value}")
        levels = indent_levels(view.traces)
        first, last = (size, size) if self.full else fold_range(size, _RUNS, _RUNS)
        for index, (item, trace) in enumerate(zip(view.traces, self.session.traces, strict=True)):
            if index == first:
                self.print_line((f"… {last - first:,} more traces (--full shows them) …", "dim"))
            if first <= index < last:
                continue
            with_tokens = index < _RUNS or self.full
            if with_tokens:
                self.print_line("")
            self._print_trace(item, "  " * min(levels[index], 8))
            if with_tokens:
                self._print_tokens(trace)

    def _print_trace(self, view: TraceView, indent: str) -> None:
        parent = ""
        if view.parent is not None:
            whole = self.session.view.traces[view.parent].length
            relation = "continues" if view.shared == whole else "forks from"
            relation = "started by" if view.kind is TraceKind.SUBAGENT else relation
            parent = f"  {relation} trace {view.parent}, {view.shared:,} ids in common"
        answers = _plural(len({span.call for span in view.spans}), "answer")
        self.print_line(
            (f"{indent}trace {view.index}  {view.kind.value}", "bold"),
            f"  {view.length:,} tokens, {view.trained:,} trained, {answers}{parent}",
            ("" if view.exact else "  not exact", "red"),
        )

    def _print_tokens(self, trace: Trace) -> None:
        runs = list(split_runs(trace))
        first, last = (len(runs), len(runs)) if self.full else fold_range(len(runs), _RUNS, _RUNS)
        for index, (start, end, span) in enumerate(runs):
            if index == first:
                count = len({span.call for _, _, span in runs[first:last] if span})
                line = f"  … {count} more answers (--full or --turn N shows them) …"
                self.print_line((line, "dim"))
            if not first <= index < last:
                self._print_run(trace, start, end, span)

    def _print_run(self, trace: Trace, start: int, end: int, span: Span | None) -> None:
        """Print neighbouring tokens of one origin, behind a gutter that names it."""
        pieces = self.texts.pieces(trace.ids[start:end].tolist())
        logprobs = trace.logprobs[start:end].tolist()
        styles = [self._choose_style(span, logprob) for logprob in logprobs]
        head, tail = (40, 24) if span else (12, 12)
        left, right = (len(pieces),) * 2 if self.full else fold_range(len(pieces), head, tail)
        tokens = [*zip(pieces, styles, strict=True)]
        if left < right:
            tokens[left:right] = [(f" … {right - left:,} tokens … ", "dim italic")]
        origin = "context " if span is None else f"call {span.call:<3}"
        gutter = f"  {origin} {end - start:>7,}"
        if span and span.masked:
            gutter += f" ({span.masked.value})"
        if span and self.by is ColourBy.LOGPROB:
            gutter += f" {_format_number(finite_mean(logprobs))}"
        if span and self.by is ColourBy.VERSION:
            gutter += f" v{span.version}"
        width = self.console.width if self.console.is_terminal else _WIDTH
        for line in _wrap(tokens, max(20, width - _GUTTER)):
            self.print_line((f"{gutter:<{_GUTTER - 1}} ", "dim"), *line)
            gutter = ""

    def _choose_style(self, span: Span | None, logprob: float) -> str:
        if span is None:
            return "dim"
        if self.by is ColourBy.VERSION:
            return self._colour.get(span.version, "")
        if self.by is ColourBy.LOGPROB:
            return next((style for least, style in _LEVELS if logprob >= least), "bold red")
        return "yellow" if span.masked else "green"

    def _print_ledger(self, title: str, ledger: Ledger) -> None:
        parts: list[str | tuple[str, str]] = [(f"{title:<12}", "dim")]
        parts += [f"sampled {ledger.sampled:,} = ", (f"trained {ledger.trained:,}", "green")]
        for what, reasons in (("masked", ledger.masked), ("dropped", ledger.dropped)):
            parts += [
                (f" + {what}({reason.value}) {count:,}", "yellow")
                for reason, count in reasons.items()
            ]
        if not ledger.balanced:
            parts.append((" (does not balance)", "red"))
        self.print_line(*parts)


# --------------------------------------------------------------------------- formatting
_Row = tuple[tuple[str, str], ...]
_TITLES: _Row = tuple(
    (title, "dim")
    for title in (
        *("call", "kind", "continues", "prompt", "sampled", "logprob", "finish"),
        *("version", "at s", "first s", "total s", "calls"),
    )
)
_LEFT = {1, 2, 6}


def _format_event(event: TimelineEvent) -> str:
    which = "" if event.call is None else f" in call {event.call}"
    return f"~ {event.at:.2f} s  {event.kind.value}{which}  {visible(event.detail)}"


def _align(row: _Row, widths: Sequence[int]) -> Iterator[tuple[str, str]]:
    for place, ((text, style), width) in enumerate(zip(row, widths, strict=True)):
        gap = " " * (width - cell_len(text))
        last = place == len(row) - 1
        yield (text if last else f"{text}{gap}  " if place in _LEFT else f"{gap}{text}  "), style


def _letter(place: int) -> str:
    before = _letter(place // 26 - 1) if place >= 26 else ""
    return before + chr(ord("a") + place % 26)


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)


def _format_status(result: RecordedResult | None) -> str:
    if result is None:
        return "no result recorded: it is still running, or its node died"
    if result.failure is not None:
        return f"{result.status}, {result.failure.boundary}: {result.failure.message}"
    if result.reward is None:
        return f"{result.status}, no reward"
    parts = ", ".join(f"{name} {value:g}" for name, value in result.reward.parts.items())
    return f"{result.status}, reward {result.reward.value:g}" + (f" ({parts})" if parts else "")


def _format_sampling(sampling: Sampling) -> str:
    fields = asdict(sampling).items()
    return ", ".join(f"{name} {value}" for name, value in fields if value not in (None, ()))


def _wrap(tokens: Sequence[tuple[str, str]], room: int) -> Iterator[list[tuple[str, str]]]:
    """Yield lines of at most `room` cells; a token is split only at its own line ends."""
    line: list[tuple[str, str]] = []
    used = 0
    for text, style in tokens:
        for part in text.splitlines(keepends=True) if "\n" in text else [text]:
            escaped = visible(part)
            width = cell_len(escaped)
            if line and used + width > room:
                yield _join_styles(line)
                line, used = [], 0
            line.append((escaped, style))
            used += width
            if escaped.endswith(NEWLINE):
                yield _join_styles(line)
                line, used = [], 0
    if line:
        yield _join_styles(line)


def _join_styles(line: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Join neighbours of one style."""
    style_of: Callable[[tuple[str, str]], str] = lambda piece: piece[1]  # noqa: E731
    return [("".join(text for text, _ in group), key) for key, group in groupby(line, style_of)]
