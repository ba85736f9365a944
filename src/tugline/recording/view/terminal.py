"""A story on a terminal: a header, a line per turn, the traces token by token, the ledger.

Whatever colour says is also said in words beside it, for pipes and ``NO_COLOR``. Long contexts
and the middle of long sessions are folded, so that hundreds of turns stay a page or two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import groupby

from msgspec.structs import asdict
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tugline.recording.records import Result
from tugline.recording.view.session_view import Told, mean
from tugline.recording.view.story import How, TimelineEvent, TraceView, Turn
from tugline.recording.view.texts import NEWLINE, Texts, folded, visible
from tugline.types import Ledger, Message, Sampling, Span, Trace, TraceKind

_WIDTH = 120
"""Of a line of tokens where the output is no terminal."""
_GUTTER = 26
_RUNS = 12
"""Answers of a trace, and traces of a session, that are shown token by token."""
_CLIP = 2000
"""Characters of a message."""
_HOW = {How.EXACT: "green", How.HEALED: "cyan", How.FORKED: "yellow", How.TEXT: "red"}
_LEVELS = ((-0.05, "green"), (-0.5, "cyan"), (-1.5, "yellow"), (-3.0, "magenta"))
_VERSIONS = ("green", "cyan", "magenta", "yellow", "blue", "red")


class By(StrEnum):
    """What the colour of a token says."""

    MASK = "mask"
    LOGPROB = "logprob"
    VERSION = "version"


class Terminal:
    """Prints one story."""

    def __init__(
        self, console: Console, told: Told, texts: Texts, *, by: By = By.MASK, full: bool = False
    ) -> None:
        self.console, self.told, self.texts = console, told, texts
        self.by, self.full = by, full
        self._threads = _letters([turn.thread for turn in told.story.turns])
        versions = {v.version for turn in told.story.turns for v in turn.versions}
        self._colour = {v: _VERSIONS[i % len(_VERSIONS)] for i, v in enumerate(sorted(versions))}

    def say(self, *parts: str | tuple[str, str]) -> None:
        """One line, longer than the terminal if need be."""
        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def show(self) -> None:
        """The whole session."""
        self._header()
        self._turns()
        self._traces()
        self.say("")
        self._ledger("ledger", self.told.story.ledger)

    # ----------------------------------------------------------------------- header
    def _header(self) -> None:
        story, header, result = self.told.story, self.told.story.header, self.told.story.result
        facts = {"file": story.recording}
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
        facts |= {"status": _status(result), "damage": story.damage}
        if story.torn_bytes:
            facts["damage"] += f"{story.torn_bytes} bytes at the end were cut off"
        if len(self._threads) > 1:
            named = (f"{letter} = {one or 'unnamed'}" for one, letter in self._threads.items())
            facts["threads"] = ", ".join(named)
        self.say((visible(header.session.id if header else "the first record is lost"), "bold"))
        self._facts(facts, alarms={"damage"})

    def _facts(self, facts: Mapping[str, str], alarms: Collection[str] = ()) -> None:
        for name, fact in facts.items():
            if said := visible(fact.strip()):
                self.say((f"{name:<12}", "dim"), (said, "red" if name in alarms else ""))

    # ----------------------------------------------------------------------- turns
    def _turns(self) -> None:
        story = self.told.story
        moments: list[Turn | TimelineEvent] = [*story.turns, *story.events]
        self._table(sorted(moments, key=lambda one: one.at))

    def _table(self, moments: Sequence[Turn | TimelineEvent]) -> None:
        rows = [self._row(one) if isinstance(one, Turn) else _event(one) for one in moments]
        cells = [_TITLES, *(row for row in rows if isinstance(row, tuple))]
        widths = [max(cell_len(row[i][0]) for row in cells) for i in range(len(_TITLES))]
        self.say("")
        for row in (_TITLES, *rows):
            if isinstance(row, tuple):
                self.say(*_aligned(row, widths))
            else:
                self.say((" " * (widths[0] + 2) + row, "magenta"))

    def _row(self, turn: Turn) -> _Row:
        thread = self._threads.get(turn.thread, "") if len(self._threads) > 1 else ""
        source = "" if turn.parent is None or turn.how is How.EXACT else f" {turn.parent}"
        reasons = f"({', '.join(turn.why)})" if turn.why else ""
        finish = turn.finish.value if turn.outcome == "complete" else turn.outcome.value
        finish += ", constrained" * turn.constrained + ", replayed" * turn.replayed
        return (
            (str(turn.call), "bold"),
            (f"{turn.kind.value} {thread}".strip(), ""),
            (f"{turn.how.value}{reasons}{source}", _HOW.get(turn.how, "")),
            (f"{turn.reused:,}+{turn.prompt - turn.reused:,}", ""),
            (f"{turn.sampled:,}", ""),
            (_number(turn.mean_logprob), ""),
            (finish, "" if finish == "stop" else "yellow"),
            (",".join(str(span.version) for span in turn.versions) or "-", ""),
            (f"{turn.at:.2f}", "dim"),
            (_number(turn.first_token_s), ""),
            (_number(turn.total_s), ""),
            (visible(", ".join(turn.tools)), "cyan"),
        )

    def turn(self, number: int) -> None:
        """One call with all that was said in it."""
        story = self.told.story
        place = next(i for i, turn in enumerate(story.turns) if turn.call == number)
        turn, call = story.turns[place], self.told.calls[place]
        mine = [event for event in story.events if event.call == number]
        self._table([turn, *mine])
        self.say("")
        self._facts(
            {
                "thread": call.thread or "",
                "dialect": f"{call.dialect}, {call.mode.value}",
                "sampling": _told(call.sampling),
                "asked for": _told(call.requested),
                "stop": repr(call.stop) if call.stop else "",
                "replicas": ", ".join(call.replicas),
                "tools": ", ".join(tool.name for tool in call.tools),
            }
        )
        for message in call.messages:
            self._message(message)
        if call.answer is not None:
            self._message(call.answer, told=True)
        if turn.trace is not None:
            self.say("")
            trace = self.told.traces[turn.trace]
            for span in (span for span in trace.spans if span.call == number):
                self._run(trace, span.start, span.end, span)
        self.say("")
        self._ledger("ledger", turn.ledger)

    def _message(self, message: Message, *, told: bool = False) -> None:
        self.say("")
        self.say((f"{message.role.value}{' (told to the harness)' if told else ''}", "bold"))
        if message.reasoning:
            self._text(message.reasoning, "dim italic")
        if message.content:
            self._text(message.content, "")
        for tool in message.tool_calls:
            self._text(f"{tool.name}({tool.arguments})", "cyan")

    def _text(self, text: str, style: str) -> None:
        rest = 0 if self.full else max(0, len(text) - _CLIP)
        for line in text[: len(text) - rest].split("\n"):
            self.say((f"  {visible(line)}", style))
        if rest:
            self.say((f"  … {rest:,} more characters (--full shows them)", "dim"))

    # ----------------------------------------------------------------------- traces
    def _traces(self) -> None:
        story = self.told.story
        self.say("")
        if story.unbuilt:
            self.say(("no traces  ", "red"), visible(story.unbuilt))
            return
        found = _plural(len(story.traces), "trace")
        self.say(f"{found} of {story.builder}, coloured by {self.by.value}")
        depth = depths(story.traces)
        size = len(story.traces)
        first, last = (size, size) if self.full else folded(size, _RUNS, _RUNS)
        for view, trace in zip(story.traces, self.told.traces, strict=True):
            if view.index == first:
                self.say((f"… {last - first:,} more traces (--full shows them) …", "dim"))
            if not first <= view.index < last:
                whole = view.index < _RUNS or self.full
                if whole:
                    self.say("")
                self._trace(view, "  " * min(depth[view.index], 8))
                if whole:
                    self._tokens(trace)

    def _trace(self, view: TraceView, indent: str) -> None:
        parent = ""
        if view.parent is not None:
            whole = self.told.story.traces[view.parent].length
            goes_on = "goes on from" if view.shared == whole else "leaves"
            how = "started by" if view.kind is TraceKind.SUBAGENT else goes_on
            parent = f"  {how} trace {view.parent}, {view.shared:,} ids in common"
        answers = _plural(len({span.call for span in view.spans}), "answer")
        self.say(
            (f"{indent}trace {view.index}  {view.kind.value}", "bold"),
            f"  {view.length:,} tokens, {view.trained:,} trained, {answers}{parent}",
            ("" if view.exact else "  not exact", "red"),
        )

    def _tokens(self, trace: Trace) -> None:
        runs = list(_runs(trace))
        first, last = (len(runs), len(runs)) if self.full else folded(len(runs), _RUNS, _RUNS)
        for place, (start, end, span) in enumerate(runs):
            if place == first:
                left = len({span.call for _, _, span in runs[first:last] if span})
                self.say((f"  … {left} more answers (--full or --turn N shows them) …", "dim"))
            if not first <= place < last:
                self._run(trace, start, end, span)

    def _run(self, trace: Trace, start: int, end: int, span: Span | None) -> None:
        """Neighbouring tokens of one origin, behind a gutter that says which."""
        pieces = self.texts.pieces(trace.ids[start:end].tolist())
        logprobs = trace.logprobs[start:end].tolist()
        styles = [self._style(span, logprob) for logprob in logprobs]
        head, tail = (40, 24) if span else (12, 12)
        left, right = (len(pieces),) * 2 if self.full else folded(len(pieces), head, tail)
        tokens = [*zip(pieces, styles, strict=True)]
        if left < right:
            tokens[left:right] = [(f" … {right - left:,} tokens … ", "dim italic")]
        gutter = f"  {_origin(span)} {end - start:>7,}"
        if span and span.masked:
            gutter += f" ({span.masked.value})"
        if span and self.by is By.LOGPROB:
            gutter += f" {_number(mean(logprobs))}"
        if span and self.by is By.VERSION:
            gutter += f" v{span.version}"
        for line in _wrapped(tokens, self._room()):
            self.say((f"{gutter:<{_GUTTER - 1}} ", "dim"), *line)
            gutter = ""

    def _room(self) -> int:
        width = self.console.width if self.console.is_terminal else _WIDTH
        return max(20, width - _GUTTER)

    def _style(self, span: Span | None, logprob: float) -> str:
        if span is None:
            return "dim"
        if self.by is By.VERSION:
            return self._colour.get(span.version, "")
        if self.by is By.LOGPROB:
            return next((style for least, style in _LEVELS if logprob >= least), "bold red")
        return "yellow" if span.masked else "green"

    def _ledger(self, title: str, ledger: Ledger) -> None:
        parts: list[str | tuple[str, str]] = [(f"{title:<12}", "dim")]
        parts += [f"sampled {ledger.sampled:,} = ", (f"trained {ledger.trained:,}", "green")]
        for what, reasons in (("masked", ledger.masked), ("dropped", ledger.dropped)):
            parts += [
                (f" + {what}({reason.value}) {count:,}", "yellow")
                for reason, count in reasons.items()
            ]
        if not ledger.balanced:
            parts.append((" (does not balance)", "red"))
        self.say(*parts)


# --------------------------------------------------------------------------- words
_Row = tuple[tuple[str, str], ...]
_TITLES: _Row = tuple(
    (title, "dim")
    for title in (
        *("call", "kind", "goes on", "prompt", "sampled", "logprob", "finish"),
        *("version", "at s", "first s", "total s", "calls"),
    )
)
_LEFT = {1, 2, 6}


def _event(event: TimelineEvent) -> str:
    which = "" if event.call is None else f" in call {event.call}"
    return f"~ {event.at:.2f} s  {event.kind.value}{which}  {visible(event.detail)}"


def _aligned(row: _Row, widths: Sequence[int]) -> Iterator[tuple[str, str]]:
    for place, ((text, style), width) in enumerate(zip(row, widths, strict=True)):
        gap = " " * (width - cell_len(text))
        last = place == len(row) - 1
        yield (text if last else f"{text}{gap}  " if place in _LEFT else f"{gap}{text}  "), style


def _letters(threads: Sequence[str | None]) -> dict[str | None, str]:
    """A short name for each thread, in order of appearance."""
    return {thread: _letter(place) for place, thread in enumerate(dict.fromkeys(threads))}


def _letter(place: int) -> str:
    before = _letter(place // 26 - 1) if place >= 26 else ""
    return before + chr(ord("a") + place % 26)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)


def _status(result: Result | None) -> str:
    if result is None:
        return "no result recorded: it runs, its node died, or nobody judged it"
    if result.failure is not None:
        return f"{result.status}, {result.failure.boundary}: {result.failure.message}"
    if result.reward is None:
        return f"{result.status}, no reward"
    parts = ", ".join(f"{name} {value:g}" for name, value in result.reward.parts.items())
    return f"{result.status}, reward {result.reward.value:g}" + (f" ({parts})" if parts else "")


def _told(sampling: Sampling) -> str:
    fields = asdict(sampling).items()
    return ", ".join(f"{name} {value}" for name, value in fields if value not in (None, ()))


def _origin(span: Span | None) -> str:
    if span is None:
        return "context "
    return f"call {span.call:<3}"


def depths(traces: Sequence[TraceView]) -> list[int]:
    """How far each trace stands to the right: a fork one step, a continuation none."""
    found: list[int] = []
    for view in traces:
        if view.parent is None or view.parent >= view.index:
            found.append(0)
        else:
            fork = view.shared < traces[view.parent].length
            found.append(found[view.parent] + fork)
    return found


def _runs(trace: Trace) -> Iterator[tuple[int, int, Span | None]]:
    at = 0
    for span in trace.spans:
        if at < span.start:
            yield at, span.start, None
        yield span.start, span.end, span
        at = span.end
    if at < len(trace.ids):
        yield at, len(trace.ids), None


def _wrapped(tokens: Sequence[tuple[str, str]], room: int) -> Iterator[list[tuple[str, str]]]:
    """Lines of at most `room` cells; a token is split only where a line of its text ends."""
    line: list[tuple[str, str]] = []
    used = 0
    for text, style in tokens:
        for part in text.splitlines(keepends=True) if "\n" in text else [text]:
            seen = visible(part)
            width = cell_len(seen)
            if line and used + width > room:
                yield _joined(line)
                line, used = [], 0
            line.append((seen, style))
            used += width
            if seen.endswith(NEWLINE):
                yield _joined(line)
                line, used = [], 0
    if line:
        yield _joined(line)


def _joined(line: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Neighbours of one style as one piece."""
    style_of: Callable[[tuple[str, str]], str] = lambda piece: piece[1]  # noqa: E731
    return [("".join(text for text, _ in group), key) for key, group in groupby(line, style_of)]
