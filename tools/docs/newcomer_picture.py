"""Draw recorded steps as an animated picture, for `newcomer.py`."""

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
TYPED_S, DONE_S, PICTURE_S, END_S, LAST_S = 0.5, 0.5, 1.0, 1.2, 3.0
"""Seconds to show a command just typed, its complete output, a picture of the console, additionally
the end of a step, and the last frame."""
FAST_S = 2.0
"""Longer waits are shortened."""
LONG = {"demo": (10, 4.0), "train": (7, 3.0)}
"""Number of frames and seconds for a long wait, by step."""
SHORT = (3, 0.9)
"""The same for all other steps."""
COLOURS = {
    "red": "bad", "green": "good", "brown": "agent", "blue": "accent", "magenta": "evaluator",
    "cyan": "runtime", "ff005f": "accent", "5faf00": "good", "3a3a3a": "line",
}  # fmt: skip
"""Colours of the console for those of the terminal and of progress bars."""
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
    """A frame of the animation, and its duration."""

    number: str
    title: str
    note: str
    body: str
    seconds: float


def format_duration(seconds: float) -> str:
    """Format a duration."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def draw_screen(screen: pyte.Screen) -> str:
    """Convert a terminal's screen to HTML."""
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
    """Collects the frames of all steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.frames: list[Frame] = []

    def add_command(self, screen: pyte.Screen, step: Step, command: Command, number: str) -> None:
        """Add frames of a command: its line, then its output with the time passed."""
        stream = pyte.Stream(screen)
        stream.feed(f"\x1b[34m{command.prompt}\x1b[0m")
        states: list[tuple[float, str]] = []
        for at, text in command.events:
            if at > command.seconds:
                break  # output of a server's end
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
                self.add(step, number, format_duration(passed), body, shown_s / count)
        note = (
            f"took {format_duration(command.seconds)} (shown faster)"
            if command.seconds > FAST_S
            else ""
        )
        self.add(step, number, note, states[-1][1], DONE_S)

    def add_pictures(self, step: Step, number: str, note: str, names: Sequence[str]) -> None:
        """Add pictures of the console."""
        for name in names:
            data = base64.b64encode((self.folder / name).read_bytes()).decode()
            body = f'<img src="data:image/png;base64,{data}">'
            self.add(step, number, note, body, PICTURE_S)

    def add(self, step: Step, number: str, note: str, body: str, seconds: float) -> None:
        """Add a frame, or extend the last frame if it is equal."""
        last = self.frames[-1] if self.frames else None
        if last and (last.number, last.note, last.body) == (number, note, body):
            seconds += self.frames.pop().seconds
        self.frames.append(Frame(number, step.title, note, body, seconds))

    def hold(self, seconds: float, note: str | None = None) -> None:
        """Extend the last frame, optionally with another note."""
        last = self.frames.pop()
        longer = last.seconds + seconds
        self.frames.append(replace(last, seconds=longer, note=last.note if note is None else note))


def pick(
    states: Sequence[tuple[float, str]], seconds: float, count: int
) -> Iterator[tuple[float, str]]:
    """Yield the screen at `count` equidistant moments."""
    for number in range(1, count + 1):
        moment = seconds * number / (count + 1)
        before = [body for at, body in states if at <= moment]
        yield moment, before[-1] if before else states[0][1]


def choose(folder: Path, name: str) -> list[str]:
    """Choose three pictures of a page, in their order, but not the first."""
    pictures = sorted(path.name for path in folder.glob(f"console-{name}-*.png"))[1:]
    return [pictures[(at + 1) * len(pictures) // 3 - 1] for at in range(3)] if pictures else []


def make_frames(steps: Sequence[Step], folder: Path, where: str) -> list[Frame]:
    """Make all frames in order; the last one names the machine of the measurement."""
    film = Film(folder)
    for at, step in enumerate(steps, 1):
        number = str(at)
        screen = pyte.Screen(COLUMNS, ROWS)
        if step.name != "serve":
            for command in step.commands[: 1 if step.name == "train" else None]:
                film.add_command(screen, step, command, number)
            if step.name == "train":
                film.hold(END_S / 2)
                film.add_pictures(step, number, "the console meanwhile", choose(folder, "train"))
            film.hold(END_S, f"took {format_duration(step.seconds)} (shown faster)")
            continue
        server, submit = step.commands[:2]
        film.add_command(screen, step, server, number)
        film.hold(END_S / 2)
        screen = pyte.Screen(COLUMNS, ROWS)
        film.add_command(screen, step, submit, number)
        film.hold(END_S / 2)
        film.add_pictures(step, number, "the console, while it runs", choose(folder, "run"))
        film.add_pictures(
            step, number, "the console, when it has ended", ["console-end-overview.png"]
        )
        film.add_pictures(step, number, "a session", ["console-end-session.png"])
        film.add_pictures(step, number, "its patch", ["console-end-patch.png"])
        film.hold(END_S / 2)
    rows = "".join(
        f"<tr><td>{s.title}</td><td>{format_duration(s.seconds)}</td></tr>" for s in steps
    )
    total = format_duration(sum(step.seconds for step in steps))
    film.frames.append(
        Frame("", "Measured", f"{total} in all", f"<table>{rows}</table><p>{where}</p>", LAST_S)
    )
    return film.frames


async def draw(steps: Sequence[Step], folder: Path, where: str) -> bytes:
    """Draw all frames in Chromium into one WebP; also write each as a PNG into the folder."""
    frames = make_frames(steps, folder, where)
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
