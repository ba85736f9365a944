"""Print a session on a terminal: header, a line per turn, traces token by token, ledger.

Colours only repeat information in the text. Long contexts and the middle of long sessions are
folded.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tugline.log import NEWLINE, visible
from tugline.recording.records import RecordedEvent, RecordedResult
from tugline.recording.view.session_view import (
    TokenText,
    TraceView,
    TurnView,
    ViewedSession,
    fold_range,
    split_runs,
)
from tugline.traces.lineage import Continuation
from tugline.types import Ledger, Message, Sampling, Span, Trace, TraceKind

_RUNS = 12
"""Number of answers per trace, and of traces, that are shown token by token."""
CONTINUATION_STYLES = {
    Continuation.FIRST: "green",
    Continuation.EXACT: "green",
    Continuation.ECHO_CHANGED: "cyan",
    Continuation.FORKED: "yellow",
    Continuation.BROKEN: "red",
    Continuation.NO_TOKEN_IDS: "yellow",
}
_Row = tuple[tuple[str, str], ...]
"""Text and style of each cell of a table's row."""
_UNLIMITED = 1 << 16
"""Maximum width of a table in cells; the terminal wraps lines, so that nothing is cut."""


class Terminal:
    """Printer of one session."""

    def __init__(self, console: Console, session: ViewedSession, texts: TokenText) -> None:
        self.console, self.session, self.texts = console, session, texts
        threads = dict.fromkeys(turn.thread for turn in session.view.turns)
        self._threads = {thread: _letter(index) for index, thread in enumerate(threads)}
        """Short name of each thread, in order of appearance."""

    def print_line(self, *parts: str | tuple[str, str]) -> None:
        """Print one line; the terminal wraps it."""
        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def print_session(self) -> None:
        """Print the whole session."""
        self._print_header()
        view = self.session.view
        moments: list[TurnView | RecordedEvent] = [*view.turns, *view.events]
        self._print_table(sorted(moments, key=lambda moment: moment.at))
        self._print_traces()
        self.print_line("")
        self._print_ledger("ledger", view.ledger)

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
            facts["patch"] = f"{result.patch[:16]} (--patch prints it)" if result.patch else ""
        facts |= {"status": _format_status(result), "damage": view.damage}
        if view.torn_bytes:
            facts["damage"] += f"{view.torn_bytes} bytes at the end are an incomplete record"
        if len(self._threads) > 1:
            named = (f"{letter} = {name or 'unnamed'}" for name, letter in self._threads.items())
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
    def _print_table(self, moments: Sequence[TurnView | RecordedEvent]) -> None:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for title in _TITLES:
            table.add_column(title, justify="left" if title in _LEFT else "right")
        for item in moments:
            row = self._make_row(item) if isinstance(item, TurnView) else _make_event_row(item)
            table.add_row(*(Text(*cell) for cell in row))
        unlimited = self.console.options.update(max_width=_UNLIMITED)
        table.width = self.console.measure(table, options=unlimited).maximum
        self.print_line("")
        self.console.print(table, soft_wrap=True)

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
            (f"{turn.continuation.value}{reasons}{source}", CONTINUATION_STYLES[turn.continuation]),
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
        index = next(i for i, turn in enumerate(view.turns) if turn.call == number)
        turn, call = view.turns[index], self.session.calls[index]
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
            spans = [span for span in trace.spans if span.call == number]
            self._print_runs(trace, [(span.start, span.end, span) for span in spans])
        self.print_line("")
        self._print_ledger("ledger", turn.ledger)

    def _print_message(self, message: Message, *, received: bool = False) -> None:
        self.print_line("")
        suffix = " (as returned to the harness)" if received else ""
        self.print_line((f"{message.role.value}{suffix}", "bold"))
        if message.reasoning:
            self._print_text(message.reasoning, "dim italic")
        if message.content:
            self._print_text(message.content, "")
        for tool in message.tool_calls:
            self._print_text(f"{tool.name}({tool.arguments})", "cyan")

    def _print_text(self, text: str, style: str) -> None:
        for line in text.split("\n"):
            self.print_line((f"  {visible(line)}", style))

    # ----------------------------------------------------------------------- traces
    def _print_traces(self) -> None:
        view = self.session.view
        self.print_line("")
        if view.build_error:
            self.print_line(("no traces  ", "red"), visible(view.build_error))
            return
        size = len(view.traces)
        self.print_line(f"{_plural(size, 'trace')} of {view.builder}")
        first, last = fold_range(size, _RUNS, _RUNS)
        for index, (item, trace) in enumerate(zip(view.traces, self.session.traces, strict=True)):
            if index == first:
                self.print_line((f"… {last - first:,} more traces (--html shows them) …", "dim"))
            if first <= index < last:
                continue
            with_tokens = index < _RUNS
            if with_tokens:
                self.print_line("")
            self._print_trace(item)
            if with_tokens:
                self._print_runs(trace, list(split_runs(trace)))

    def _print_trace(self, view: TraceView) -> None:
        parent = ""
        if view.parent is not None:
            whole = self.session.view.traces[view.parent].length
            relation = "continues" if view.shared == whole else "forks from"
            relation = "started by" if view.kind is TraceKind.SUBAGENT else relation
            parent = f"  {relation} trace {view.parent}, {view.shared:,} ids in common"
        answers = _plural(len({span.call for span in view.spans}), "answer")
        self.print_line(
            (f"trace {view.index}  {view.kind.value}", "bold"),
            f"  {view.length:,} tokens, {view.trained:,} trainable, {answers}{parent}",
            ("" if view.exact else "  not exact", "red"),
        )

    def _print_runs(self, trace: Trace, runs: Sequence[tuple[int, int, Span | None]]) -> None:
        """Print runs of adjacent tokens of one origin, with the origin in a gutter."""
        grid = Table.grid(padding=(0, 1))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        first, last = fold_range(len(runs), _RUNS, _RUNS)
        for index, (start, end, span) in enumerate(runs):
            if index == first:
                count = len({span.call for _, _, span in runs[first:last] if span})
                line = f"… {count} more answers (--turn N or --html shows them) …"
                grid.add_row("", Text(line, "dim"))
            if not first <= index < last:
                origin = "context " if span is None else f"call {span.call:<3}"
                reason = f" ({span.masked.value})" if span and span.masked else ""
                gutter = Text(f"  {origin} {end - start:>7,}{reason}")
                grid.add_row(gutter, self._render_run(trace, start, end, span))
        self.console.print(grid)

    def _render_run(self, trace: Trace, start: int, end: int, span: Span | None) -> Text:
        pieces = self.texts.pieces(trace.ids[start:end].tolist())
        head, tail = (40, 24) if span else (12, 12)
        left, right = fold_range(len(pieces), head, tail)
        ends = [visible("".join(part)) for part in (pieces[:left], pieces[right:])]
        folded = (f" … {right - left:,} tokens … " if left < right else "", "dim italic")
        style = "dim" if span is None else "yellow" if span.masked else "green"
        text = Text.assemble(ends[0], folded, ends[1], style=style)
        return Text("\n").join(text.split(NEWLINE, include_separator=True))

    def _print_ledger(self, title: str, ledger: Ledger) -> None:
        parts: list[str | tuple[str, str]] = [(f"{title:<12}", "dim")]
        parts += [f"sampled {ledger.sampled:,} = ", (f"trainable {ledger.trained:,}", "green")]
        for what, reasons in (("masked", ledger.masked), ("dropped", ledger.dropped)):
            parts += [
                (f" + {what}({reason.value}) {count:,}", "yellow")
                for reason, count in reasons.items()
            ]
        if not ledger.balanced:
            parts.append((" (does not balance)", "red"))
        self.print_line(*parts)


# --------------------------------------------------------------------------- formatting
_LEFT = {"kind", "continues", "finish", "calls"}
_TITLES = (
    *("call", "kind", "continues", "prompt", "sampled", "logprob", "finish"),
    *("version", "at s", "first s", "total s", "calls"),
)


def _make_event_row(event: RecordedEvent) -> _Row:
    which = "" if event.call is None else f"in call {event.call}"
    cells = ("~", event.kind.value, which, *[""] * 5, f"{event.at:.2f}", "", "")
    return tuple((cell, "magenta") for cell in (*cells, visible(event.detail)))


def _letter(index: int) -> str:
    before = _letter(index // 26 - 1) if index >= 26 else ""
    return before + chr(ord("a") + index % 26)


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)


def _format_status(result: RecordedResult | None) -> str:
    if result is None:
        return "no result recorded: the session is still running, or its node was lost"
    if result.failure is not None:
        return f"{result.status}, {result.failure.boundary}: {result.failure.message}"
    if result.reward is None:
        return f"{result.status}, no reward"
    parts = ", ".join(f"{name} {value:g}" for name, value in result.reward.parts.items())
    return f"{result.status}, reward {result.reward.value:g}" + (f" ({parts})" if parts else "")


def _format_sampling(sampling: Sampling) -> str:
    fields = asdict(sampling).items()
    return ", ".join(f"{name} {value}" for name, value in fields if value not in (None, ()))
