"""Text of an answer from its ids, told as soon as it is certain and never taken back.

Held back are an incomplete character, blank space that may turn out to be trailing, and what may be
the beginning of a stop string. Every segment is a line of its own, without blank space at its ends.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping


class Detokenizer:
    """The text, or the reasoning, of one answer. What a method returns is to be told now."""

    __slots__ = (
        "_begun",
        "_bytes",
        "_fresh",
        "_guard",
        "_held",
        "_longest",
        "_opening",
        "_preface",
        "_stops",
        "_token_bytes",
        "said",
        "stopped",
    )  # fmt: skip

    def __init__(
        self, token_bytes: Mapping[int, bytes], *, stops: tuple[str, ...] = (), guard: str = ""
    ) -> None:
        """`guard` is text that belongs to a special token if that follows."""
        self.said: list[str] = []
        self.stopped: str | None = None
        self._token_bytes = token_bytes
        self._stops = stops
        self._guard = (*stops, guard + "\0") if guard else stops
        self._longest = max(map(len, self._guard), default=1) - 1
        self._bytes = b""
        self._opening = ""
        self._held = self._preface = ""
        self._begun, self._fresh = False, True

    def tell(self, ids: list[int]) -> str:
        """Go on with these ids."""
        token_bytes = self._token_bytes
        data = b"".join([token_bytes[token] for token in ids])
        if self._bytes:
            data = self._bytes + data
        text, used = utf_8_decode(data, "replace", False)
        self._bytes = data[used:]
        if self._preface:
            text = self._introduced(text)
        if self._guard:
            text = self._watched(text)
        return self._say(text) if text else ""

    def write(self, text: str) -> str:
        """A whole segment that is certain."""
        ready = self._say(text)
        self._fresh = True
        return ready

    def close(self) -> str:
        """The segment is over: its end is certain, its trailing blank space is not told."""
        text, _ = utf_8_decode(self._bytes, "replace", True)
        text = self._opening + text
        if self._preface:
            self._preface = ""
        ready = self._say(text) if text and self.stopped is None else ""
        self._bytes, self._opening, self._fresh = b"", "", True
        return ready

    def watch(self, text: str) -> str:
        """What of a whole text stands before the first stop string."""
        text = self._watched(text) + self._opening
        self._opening = ""
        return text

    def skip(self, preface: str) -> None:
        """Do not tell these words if the next segment begins with them."""
        self._preface = preface

    def taken(self) -> str:
        """The guarded text at the end, which turned out to be no text."""
        held, self._opening = self._opening, ""
        return held

    def _say(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip()
            if not text:
                return ""
            self._fresh = False
            self._held = "\n" if self._begun else ""
            self._begun = True
        text = self._held + text
        ready = text.rstrip()
        self._held = text[len(ready) :]
        if ready:
            self.said.append(ready)
        return ready

    def _introduced(self, text: str) -> str:
        """Without the preface, once it is known to be one."""
        text, self._opening = self._opening + text, ""
        if text.startswith(self._preface):
            text, self._preface = text.removeprefix(self._preface), ""
        elif self._preface.startswith(text):
            text, self._opening = "", text
        else:
            self._preface = ""
        return text

    def _watched(self, text: str) -> str:
        """What of the text cannot belong to a stop string."""
        text = self._opening + text
        found = min(((text.find(stop), stop) for stop in self._stops if stop in text), default=None)
        if found is not None:
            at, self.stopped = found
            self._opening = ""
            return text[:at]
        kept = 0
        for length in range(min(len(text), self._longest), 0, -1):
            if any(word.startswith(text[-length:]) for word in self._guard):
                kept = length
                break
        self._opening = text[len(text) - kept :]
        return text[: len(text) - kept]
