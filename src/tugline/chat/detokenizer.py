"""Incremental detokenizer: text from ids, emitted as soon as it is certain and never taken back.

Held back are an incomplete character, white space that may turn out to be trailing, and text that
may be the beginning of a stop string. Each segment begins on a new line, without white space at
its ends.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping


class Detokenizer:
    """The text, or the reasoning, of one answer. Methods return the text that is now certain."""

    __slots__ = (
        "_at_start", "_bytes", "_guard", "_longest", "_preface", "_space", "_stops", "_token_bytes",
        "_undecided", "emitted", "matched_stop",
    )  # fmt: skip

    def __init__(
        self, token_bytes: Mapping[int, bytes], *, stops: tuple[str, ...] = (), guard: str = ""
    ) -> None:
        """`guard` is text that belongs to a special token if that follows."""
        self.emitted: list[str] = []
        self.matched_stop: str | None = None
        self._token_bytes = token_bytes
        self._stops = stops
        self._guard = (*stops, guard + "\0") if guard else stops
        self._longest = max(map(len, self._guard), default=1) - 1
        self._bytes = b""
        """An incomplete character."""
        self._undecided = ""
        """May belong to a stop string, the guard or the preface."""
        self._space = ""
        """May be trailing."""
        self._preface = ""
        self._at_start = True

    def feed(self, ids: list[int]) -> str:
        """Add ids to the segment."""
        token_bytes = self._token_bytes
        data = b"".join([token_bytes[token] for token in ids])
        if self._bytes:
            data = self._bytes + data
        text, used = utf_8_decode(data, "replace", False)
        self._bytes = data[used:]
        if self._preface:
            text = self._strip_preface(text)
        if self._guard:
            text = self._hold_back(text)
        return self._emit(text) if text else ""

    def write(self, text: str) -> str:
        """Add a whole segment that is certain."""
        ready = self._emit(text)
        self._at_start = True
        return ready

    def finish_text(self) -> str:
        """End the segment: its end is certain, its trailing white space is dropped."""
        text, _ = utf_8_decode(self._bytes, "replace", True)
        text = self._undecided + text
        self._preface = ""
        ready = self._emit(text) if text and self.matched_stop is None else ""
        self._bytes, self._undecided, self._at_start = b"", "", True
        return ready

    def cut_at_stop(self, text: str) -> str:
        """The part of a whole text that precedes the first stop string."""
        text = self._hold_back(text) + self._undecided
        self._undecided = ""
        return text

    def skip(self, preface: str) -> None:
        """Do not emit `preface` if the next segment begins with it."""
        self._preface = preface

    def take_guarded(self) -> str:
        """Take the guarded text at the end, which turned out to be no text."""
        text, self._undecided = self._undecided, ""
        return text

    def _emit(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip()
            if not text:
                return ""
            self._at_start = False
            self._space = "\n" if self.emitted else ""
        text = self._space + text
        ready = text.rstrip()
        self._space = text[len(ready) :]
        if ready:
            self.emitted.append(ready)
        return ready

    def _strip_preface(self, text: str) -> str:
        text, self._undecided = self._undecided + text, ""
        if text.startswith(self._preface):
            text, self._preface = text.removeprefix(self._preface), ""
        elif self._preface.startswith(text):
            text, self._undecided = "", text
        else:
            self._preface = ""
        return text

    def _hold_back(self, text: str) -> str:
        """The part of the text that cannot belong to a stop string, or to the guard."""
        text = self._undecided + text
        match = min(((text.find(stop), stop) for stop in self._stops if stop in text), default=None)
        if match is not None:
            at, self.matched_stop = match
            self._undecided = ""
            return text[:at]
        held = 0
        for length in range(min(len(text), self._longest), 0, -1):
            if any(word.startswith(text[-length:]) for word in self._guard):
                held = length
                break
        self._undecided = text[len(text) - held :]
        return text[: len(text) - held]
