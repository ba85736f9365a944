"""Draws recorded steps as an animated picture, for `newcomer.py`."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pyte
from newcomer_console import HEIGHT, open_tab
from newcomer_terminal import COLUMNS, ROWS, Command, Step, hide_token
from PIL import Image

CSS = Path(__file__).resolve().parents[2] / "console" / "src" / "app.css"
CAPTION = 60
"""Height of the caption in CSS pixels."""
TYPED_S, DONE_S, LOOK_S, END_S, LAST_S = 0.5, 0.5, 1.0, 1.2, 3.0
"""How long is shown: a command that was just entered, all that it printed, a picture of the
console, a step's end in addition, and the times."""
FAST_S = 2.0
"""Waits above this are shown faster."""
LONG = {"demo": (10, 4.0), "train": (7, 3.0)}
"""Steps with how many frames of a long wait are shown, in how many seconds."""
SHORT = (3, 0.9)
"""The same for all other steps."""
COLOURS = {
    "red": "bad", "green": "good", "brown": "agent", "blue": "accent", "magenta": "evaluator",
    "cyan": "runtime", "ff005f": "accent", "5faf00": "good", "3a3a3a": "line",
}  # fmt: skip
"""The terminal's colours, and those of a progress bar, as the console's."""
STYLE = f"""
body {{ width: 900px; height: {CAPTION + HEIGHT}px; overflow: hidden; }}
header {{ height: {CAPTION}px; padding: 0 20px; display: flex; align-items: center; gap: 12px;
  background: var(--raised); border-bottom: 1px solid var(--line); }}
header i {{ font: 600 15px/28px system-ui; width: 28px; text-align: center; border-radius: 14px;
  background: var(--selected); color: var(--accent); }}
header b {{ font: 600 19px system-ui; }}
header span {{ margin-left: auto; color: var(--muted); font: 17px system-ui;
  font-variant-numeric: tabular-nums; }}
pre {{ margin: 0; padding: 12px 20px; font: 14.2px/20.6px "DejaVu Sans Mono", monospace; }}
img {{ width: 900px; height: {HEIGHT}px; display: block; }}
p {{ margin: 0; text-align: center; color: var(--muted); font: 16px system-ui; }}
table {{ margin: 44px auto 30px; width: 560px; border-collapse: collapse;
  font: 20px/46px system-ui; }}
td {{ border-bottom: 1px solid var(--line); padding: 0; }}
td + td {{ text-align: right; font-variant-numeric: tabular-nums; }}
"""


@dataclass(frozen=True)
class Frame:
    """What is shown, and for how long."""

    number: str
    title: str
    note: str
    body: str
    seconds: float


def spell(seconds: float) -> str:
    """A duration in words."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def draw_screen(screen: pyte.Screen) -> str:
    """The screen of a terminal as HTML."""
    lines = []
    for row in range(ROWS):
        line = ""
        for column in range(COLUMNS):
            char = screen.buffer[row][column]
            text = html.escape(char.data)
            style = "font-weight:700;" if char.bold else ""
            if char.fg in COLOURS:
                style += f"color:var(--{COLOURS[char.fg]})"
            line += f'<span style="{style}">{text}</span>' if style else text
        lines.append(line.rstrip())
    return f"<pre>{chr(10).join(lines)}</pre>"


class Film:
    """The frames of all steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.frames: list[Frame] = []

    def add_command(self, screen: pyte.Screen, step: Step, command: Command, number: str) -> None:
        """Type a command on a screen, then show what came, with the time that has passed."""
        stream = pyte.Stream(screen)
        stream.feed(f"\x1b[34m{command.prompt}\x1b[0m")
        states: list[tuple[float, str]] = []
        for at, text in command.events:
            if at > command.seconds:
                break  # how a server ends
            typed, newline, output = "", "", hide_token(text)
            if not states:
                typed, newline, output = output.partition("\n")
            stream.feed(typed + newline)
            if newline and command.seconds > FAST_S:
                self.add(step, number, "", draw_screen(screen), TYPED_S)
            stream.feed(output)
            states.append((at, draw_screen(screen)))
        if not states:
            return
        if command.seconds > FAST_S:
            count, shown_s = LONG.get(step.name, SHORT)
            for passed, body in pick(states, command.seconds, count):
                self.add(step, number, spell(passed), body, shown_s / count)
        note = f"took {spell(command.seconds)} (shown faster)" if command.seconds > FAST_S else ""
        self.add(step, number, note, states[-1][1], DONE_S)

    def add_looks(self, step: Step, number: str, note: str, names: Sequence[str]) -> None:
        """Show pictures of the console."""
        for name in names:
            data = base64.b64encode((self.folder / name).read_bytes()).decode()
            body = f'<img src="data:image/png;base64,{data}">'
            self.add(step, number, note, body, LOOK_S)

    def add(self, step: Step, number: str, note: str, body: str, seconds: float) -> None:
        """One frame; one that shows the same as the last only makes that longer."""
        last = self.frames[-1] if self.frames else None
        if last and (last.number, last.note, last.body) == (number, note, body):
            seconds += self.frames.pop().seconds
        self.frames.append(Frame(number, step.title, note, body, seconds))

    def hold(self, seconds: float, note: str | None = None) -> None:
        """Show the last frame longer, with another note if one is given."""
        last = self.frames.pop()
        longer = last.seconds + seconds
        self.frames.append(replace(last, seconds=longer, note=last.note if note is None else note))


def pick(
    states: Sequence[tuple[float, str]], seconds: float, count: int
) -> Iterator[tuple[float, str]]:
    """What stood on the screen at moments of equal distance."""
    for number in range(1, count + 1):
        moment = seconds * number / (count + 1)
        before = [body for at, body in states if at <= moment]
        yield moment, before[-1] if before else states[0][1]


def plan(steps: Sequence[Step], folder: Path, where: str) -> list[Frame]:
    """All frames, in order; the last one says where the times were measured."""
    film = Film(folder)
    for at, step in enumerate(steps, 1):
        number = str(at)
        screen = pyte.Screen(COLUMNS, ROWS)
        if step.name != "serve":
            for command in step.commands[: 1 if step.name == "train" else None]:
                film.add_command(screen, step, command, number)
            film.hold(END_S, f"took {spell(step.seconds)} (shown faster)")
            continue
        server, submit = step.commands[:2]
        film.add_command(screen, step, server, number)
        film.hold(END_S / 2)
        screen = pyte.Screen(COLUMNS, ROWS)
        film.add_command(screen, step, submit, number)
        film.hold(END_S / 2)
        looks = sorted(path.name for path in folder.glob("console-run-*.png"))[1:]
        looks = looks[:: max(1, len(looks) // 3)][:3]
        film.add_looks(step, number, "the console, while it runs", looks)
        film.add_looks(step, number, "the console, when it has ended", ["console-end-overview.png"])
        film.add_looks(step, number, "a session", ["console-end-session.png"])
        film.add_looks(step, number, "its patch", ["console-end-patch.png"])
        film.hold(END_S / 2)
    rows = "".join(f"<tr><td>{s.title}</td><td>{spell(s.seconds)}</td></tr>" for s in steps)
    total = spell(sum(step.seconds for step in steps))
    film.frames.append(
        Frame("", "Measured", f"{total} in all", f"<table>{rows}</table><p>{where}</p>", LAST_S)
    )
    return film.frames


async def draw(steps: Sequence[Step], folder: Path, where: str) -> bytes:
    """Draw every frame in Chromium, as one WebP; each is left in the folder as PNG, too."""
    frames = plan(steps, folder, where)
    images = []
    async with open_tab(CAPTION + HEIGHT) as tab:
        style = CSS.read_text(encoding="utf-8") + STYLE
        await tab.js('document.documentElement.dataset.theme = "dark"')
        await tab.js(f"document.head.innerHTML = `<style>${{{json.dumps(style)}}}</style>`")
        for number, each in enumerate(frames):
            head = f"<i>{each.number}</i><b>{each.title}</b><span>{each.note}</span>"
            page = f"<header>{head}</header>{each.body}"
            await tab.js(f"document.body.innerHTML = {json.dumps(page)}")
            await tab.until("[...document.images].every(one => one.complete)")
            data = await tab.picture()
            (folder / f"frame-{number:03}.png").write_bytes(data)
            images.append(Image.open(io.BytesIO(data)).convert("RGB"))
    durations = [round(1000 * each.seconds) for each in frames]
    buffer = io.BytesIO()
    images[0].save(
        buffer, "WEBP", save_all=True, append_images=images[1:], duration=durations, loop=0,
        lossless=True, method=4,
    )  # fmt: skip
    print(f"{len(frames)} frames, {sum(durations) / 1000:.0f} s, {buffer.tell():,} bytes")
    return buffer.getvalue()
