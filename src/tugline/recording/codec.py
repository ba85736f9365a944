"""How records become bytes and calls come back: what is new of each, in one stream of zstd.

A call's prompt is stored as the longest prefix that it shares with one of the calls before, plus
the rest; so is its raw body, which also shares its end (I7). Messages are kept as the JSON text
that the body has as well, and a section of a file is one zstd stream that is flushed after every
record, so that what was said before costs next to nothing when it is said again. A picture is kept
once. The low bytes of logprobs are noise: they are left out of the stream and stored as they are.

Reading shares memory as the file shares bytes: the ids of calls that go on from each other are
views of one buffer, so that a conversation of T turns takes O(tokens) of memory, not O(T x tokens).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zstandard

from tugline.recording.records import Event, Header, Result
from tugline.types import Call, Ids, Image, Logprobs, Message, Tool, decode, encode, shared_prefix

Packed = tuple[bytes, bytes]
"""What a record adds to the stream, and what stands behind it uncompressed."""

_CANDIDATES = 8
_BODIES = 3
_SMALL = 8192
"""New bytes of a body that are few enough to stop looking for a nearer one."""
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    3, window_log=17, hash_log=14, chain_log=14
)
"""A stream stays open as long as its session: this is what keeps its memory small."""
_PICTURE = "sha256:"
"""An image's URL in a stored message: this and the digest of the picture that it stands for."""
_FLUSH = zstandard.COMPRESSOBJ_FLUSH_BLOCK
_IDS = np.dtype("<i4")
_FLOATS = np.dtype("<f4")
_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


class Picture(msgspec.Struct, frozen=True, tag="picture"):
    """An image's URL, once, before the first call that holds it."""

    digest: str
    """SHA-256 of the URL in hex."""
    url: str


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `start` to the end of a picture's URL stood at `at` of what is left of a body."""

    at: int
    digest: str
    start: int


class CallRecord(msgspec.Struct, frozen=True, tag="call"):
    """A call reduced to what is new. The logprobs' low three bytes each stand uncompressed."""

    call: Call
    """Without the fields that the others here stand for."""
    base: int
    """Number of the call whose ids (prompt, then answer) the prompt starts with; -1 for none."""
    keep: int
    """How many of those ids."""
    sampled: int
    """How many of `ids` are the answer; those before them are the rest of the prompt."""
    ids: bytes
    """Little-endian int32."""
    logprobs: bytes
    """The highest byte of each little-endian float32."""
    said: bytes
    """JSON of `MessageRecord`."""
    same_tools: bool
    """The tools are those of the call before."""
    body_base: int
    """Number of the call whose request body this one's starts and ends like; -1 for none."""
    front: int
    """How many bytes of it come first."""
    back: int
    """How many bytes of it come last."""
    cuts: tuple[Cut, ...]
    """Pictures to put back into `body`, in order."""
    body: bytes
    """What comes between."""


class MessageRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The words of a call."""

    messages: tuple[Message, ...] = ()
    answer: Message | None = None
    tools: tuple[Tool, ...] = ()


Record = Header | CallRecord | Picture | Event | Result
_said_encoder = msgspec.json.Encoder()
_said_decoder = msgspec.json.Decoder(MessageRecord)


# --------------------------------------------------------------------------- writing
class Packer:
    """Makes the records of one section; knows the last calls' ids, bodies and tools."""

    def __init__(self) -> None:
        self.ids: deque[tuple[int, Ids]] = deque(maxlen=_CANDIDATES)
        self.bodies: deque[tuple[int, bytes]] = deque(maxlen=_BODIES)
        self.tools: tuple[Tool, ...] | None = None
        self._pictures: set[str] = set()
        self._stream = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compressobj()

    def pack(self, *records: Record, behind: bytes = b"") -> list[Packed]:
        """Records as they are, and what stands behind the last.

        All are encoded before the stream takes any: one that cannot be leaves nothing in it.
        """
        encoded = [encode(record) for record in records]
        new = [self._stream.compress(one) + self._stream.flush(_FLUSH) for one in encoded]
        return [*((one, b"") for one in new[:-1]), (new[-1], behind)]

    def call(self, call: Call) -> list[Packed]:
        """A call, after the pictures that it is the first to hold."""
        images = [image for message in call.messages for image in message.images]
        names = {image.url: image.digest for image in images}
        pictures = [Picture(name, url) for url, name in names.items() if name not in self._pictures]
        base, keep = self._nearest(call)
        body_base, front, back = self._nearest_body(call.request)
        body, cuts = _without(
            [image.url for image in images], names, call.request[front : len(call.request) - back]
        )
        high, low = split_floats(call.logprobs)
        same_tools = self.tools is not None and self.tools == call.tools
        said = MessageRecord(
            tuple(_named(one, names) for one in call.messages) if images else call.messages,
            call.answer,
            () if same_tools else call.tools,
        )
        ids = np.concatenate((call.prompt_ids[keep:], call.sampled_ids)).astype(_IDS, copy=False)
        record = CallRecord(
            _bare(call), base, keep, len(call.sampled_ids), ids.tobytes(), high,
            _said_encoder.encode(said), same_tools, body_base, front, back, cuts, body,
        )  # fmt: skip
        packed = self.pack(*pictures, record, behind=low)
        self._pictures.update(names.values())
        self._remember(call, record)
        return packed

    def _nearest(self, call: Call) -> tuple[int, int]:
        """The call whose ids begin this prompt, and how many of them; its parent if it can be."""
        base, keep = -1, 0
        latest_first = reversed(self.ids)
        for number, ids in sorted(latest_first, key=lambda pair: pair[0] != call.parent):
            shared = shared_prefix(ids, call.prompt_ids)
            if shared > keep:
                base, keep = number, shared
            if shared == len(ids):
                break
        return base, keep

    def _nearest_body(self, body: bytes) -> tuple[int, int, int]:
        """The body that this one starts and ends like, and how many bytes of each."""
        base, best, best_back = -1, 0, 0
        mine = np.frombuffer(body, np.uint8)
        for number, other in reversed(self.bodies):
            theirs = np.frombuffer(other, np.uint8)
            front = shared_prefix(theirs, mine)
            back = shared_prefix(theirs[front:][::-1], mine[front:][::-1])
            if front + back > best + best_back:
                base, best, best_back = number, front, back
            if len(body) - front - back < _SMALL:
                break
        return base, best, best_back

    def _remember(self, call: Call, record: CallRecord) -> None:
        """What this call holds in full need not be kept beside it: one conversation, one entry."""
        _drop_held(self.ids, record.base, record.keep)
        self.ids.append((call.number, np.concatenate((call.prompt_ids, call.sampled_ids))))
        if call.request:
            _drop_held(self.bodies, record.body_base, record.front + record.back)
            self.bodies.append((call.number, call.request))
        self.tools = call.tools


def _drop_held(known: deque[tuple[int, Any]], number: int, held: int) -> None:
    for entry in known:
        if entry[0] == number and len(entry[1]) == held:
            known.remove(entry)
            return


def _bare(call: Call) -> Call:
    return msgspec.structs.replace(
        call,
        messages=(),
        answer=None,
        tools=(),
        prompt_ids=_NO_IDS,
        sampled_ids=_NO_IDS,
        logprobs=_NO_LOGPROBS,
        request=b"",
    )


def _named(message: Message, names: dict[str, str]) -> Message:
    named = tuple(_with_url(one, _PICTURE + names[one.url]) for one in message.images)
    return msgspec.structs.replace(message, images=named) if named else message


def _with_url(image: Image, url: str) -> Image:
    return msgspec.structs.replace(image, url=url)


def _without(urls: list[str], names: dict[str, str], body: bytes) -> tuple[bytes, tuple[Cut, ...]]:
    """`body` without the data of pictures, and where these stood."""
    cuts: list[Cut] = []
    pieces: list[bytes] = []
    at = left = 0
    for url in urls if body else ():
        start = url.find(",") + 1
        data = url[start:].encode() if url.startswith("data:") else b""
        found = body.find(data, at) if data else -1
        if found >= 0:
            pieces.append(body[at:found])
            left += found - at
            cuts.append(Cut(left, names[url], start))
            at = found + len(data)
    return b"".join((*pieces, body[at:])), tuple(cuts)


# --------------------------------------------------------------------------- reading
@dataclass(slots=True)
class _TokenChain:
    """Ids that grow from call to call, and where others of the same start left them."""

    first: tuple[_TokenChain, int] | None = None
    """The strand it forked from, and how many ids they share."""
    length: int = 0
    pieces: list[Ids] = field(default_factory=list)
    whole: Ids = field(default_factory=lambda: _NO_IDS)

    def add(self, ids: Ids) -> None:
        self.pieces.append(ids)
        self.length += len(ids)

    def join(self) -> None:
        start = [] if self.first is None else [self.first[0].whole[: self.first[1]]]
        self.whole = np.concatenate((*start, *self.pieces)).astype(np.int32, copy=False)
        self.whole.flags.writeable = False


class Unpacker:
    """Gives back what `Packer` packed, section by section."""

    def __init__(self, *, bodies: bool) -> None:
        self.pictures: dict[str, str] = {}
        """URLs by digest."""
        self._want_bodies = bodies
        self._strands: list[_TokenChain] = []
        self._calls: list[tuple[Call, _TokenChain, int]] = []
        self.section()

    def section(self) -> None:
        """A new section begins: nothing in it refers to anything before."""
        self._stream = zstandard.ZstdDecompressor().decompressobj()
        self._places: dict[int, tuple[_TokenChain, int]] = {}
        self._bodies: dict[int, bytes] = {}
        self._tools: tuple[Tool, ...] = ()

    def take(self, new: bytes, behind: bytes) -> Header | Event | Result | None:
        """Read a record; calls and pictures are kept until the end.

        Raises `msgspec.DecodeError`, `zstandard.ZstdError`, `KeyError` or `ValueError` on one that
        this format does not have.
        """
        record: Record = decode(self._stream.decompress(new), Record)  # type: ignore[arg-type]
        if isinstance(record, CallRecord):
            self._call(record, behind)
        elif isinstance(record, Picture):
            self.pictures[record.digest] = record.url
        else:
            return record
        return None

    def calls(self) -> tuple[Call, ...]:
        """All calls so far, whole; their ids are read-only views of what they share."""
        for strand in self._strands:
            strand.join()
        whole = []
        for call, strand, end in self._calls:
            prompt = end - len(call.sampled_ids)
            ids = strand.whole
            whole.append(
                msgspec.structs.replace(call, prompt_ids=ids[:prompt], sampled_ids=ids[prompt:end])
            )
        return tuple(whole)

    def _call(self, record: CallRecord, behind: bytes) -> None:
        said = _said_decoder.decode(record.said)
        self._tools = self._tools if record.same_tools else said.tools
        ids = np.frombuffer(record.ids, _IDS)
        strand = self._strand(record)
        strand.add(ids)
        call = msgspec.structs.replace(
            record.call,
            messages=tuple(map(self._pictured, said.messages)),
            answer=said.answer,
            tools=self._tools,
            sampled_ids=ids[len(ids) - record.sampled :],
            logprobs=join_floats(record.logprobs, behind),
            request=self._body(record) if self._want_bodies else b"",
        )
        self._places[call.number] = strand, strand.length
        self._calls.append((call, strand, strand.length))

    def _strand(self, record: CallRecord) -> _TokenChain:
        """The strand that this call's new ids go on with."""
        before = None
        if record.keep:
            base, end = self._places[record.base]
            if record.keep > end:
                msg = f"a prompt begins with {record.keep} ids of a call that has {end}"
                raise ValueError(msg)
            if record.keep == base.length:
                return base
            before = base, record.keep
        strand = _TokenChain(before, record.keep)
        self._strands.append(strand)
        return strand

    def _body(self, record: CallRecord) -> bytes:
        pieces, at = [], 0
        for cut in record.cuts:
            pieces += [record.body[at : cut.at], self.pictures[cut.digest][cut.start :].encode()]
            at = cut.at
        body = b"".join((*pieces, record.body[at:])) if pieces else record.body
        if record.front or record.back:
            like = self._bodies[record.body_base]
            body = b"".join((like[: record.front], body, like[len(like) - record.back :]))
        self._bodies[record.call.number] = body
        return body

    def _pictured(self, message: Message) -> Message:
        if not message.images:
            return message
        urls = [self.pictures[one.url.removeprefix(_PICTURE)] for one in message.images]
        images = tuple(map(_with_url, message.images, urls))
        return msgspec.structs.replace(message, images=images)


# --------------------------------------------------------------------------- logprobs
def split_floats(values: Logprobs) -> tuple[bytes, bytes]:
    """The highest byte of each float, which compress well, and the three below, which do not."""
    quads = np.ascontiguousarray(values, _FLOATS).view(np.uint8).reshape(-1, 4)
    return quads[:, 3].tobytes(), quads[:, :3].tobytes()


def join_floats(high: bytes, low: bytes) -> Logprobs:
    """What `split_floats` split. Raises `ValueError` where the two do not belong together."""
    quads = np.empty((len(high), 4), np.uint8)
    quads[:, 3] = np.frombuffer(high, np.uint8)
    quads[:, :3] = np.frombuffer(low, np.uint8).reshape(len(high), 3)
    return quads.view(_FLOATS).reshape(-1).astype(np.float32, copy=False)
