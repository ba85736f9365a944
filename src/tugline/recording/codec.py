"""Encode records as bytes and decode calls: only what is new of each, in one zstd stream.

The prompt of a call is stored as the longest prefix that it shares with an earlier call, plus the
rest; its raw body likewise, which also shares its end (I7). Messages are stored as the JSON text
that the body contains as well, and a section is one zstd stream that is flushed after every
record, so that repeated text costs next to nothing. An image is stored once. The low bytes of
logprobs are noise: they bypass the stream.

Decoding shares memory as the file shares bytes: the ids of calls that continue each other are
views of one buffer, so a conversation of T turns takes O(tokens) of memory, not O(T x tokens).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zstandard

from tugline.recording.records import Header, RecordedEvent, RecordedResult
from tugline.types import Call, Ids, Image, Logprobs, Message, Tool, decode, encode, shared_prefix

Packed = tuple[bytes, bytes]
"""What a record adds to the stream, and the bytes that follow it uncompressed."""

_CANDIDATES = 8
_BODIES = 3
_LACKING = 1024
"""Bytes of a body that a later one may lack and yet take its place."""
_SMALL = 8192
"""New bytes of a body that are few enough to stop the search for a nearer one."""
_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    3, window_log=17, hash_log=14, chain_log=14
)
"""Chosen for little memory, since a stream stays open as long as its session."""
_IMAGE_REF = "sha256:"
"""Prefix of an image's URL in a stored message, before the digest of the real URL."""
_FLUSH = zstandard.COMPRESSOBJ_FLUSH_BLOCK
_IDS = np.dtype("<i4")
_FLOATS = np.dtype("<f4")
_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)


class ImageRecord(msgspec.Struct, frozen=True, tag="image"):
    """An image's URL, once, before the first call that holds it."""

    digest: str
    """SHA-256 of the URL in hex."""
    url: str


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `start` to the end of an image's URL, removed from a body before its byte `at`."""

    at: int
    digest: str
    start: int


class CallRecord(msgspec.Struct, frozen=True, tag="call"):
    """A call reduced to what is new; the low three bytes of logprobs follow uncompressed."""

    call: Call
    """Without the fields that are stored below."""
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
    messages: bytes
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
    """Images to put back into `body`, in order."""
    body: bytes
    """The bytes between them."""


class MessageRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """The messages, the answer and the tools of a call."""

    messages: tuple[Message, ...] = ()
    answer: Message | None = None
    tools: tuple[Tool, ...] = ()


Record = Header | CallRecord | ImageRecord | RecordedEvent | RecordedResult
_message_encoder = msgspec.json.Encoder()
_message_decoder = msgspec.json.Decoder(MessageRecord)


# --------------------------------------------------------------------------- writing
@dataclass(slots=True, eq=False)
class _CallIds:
    """Ids of a call; prompts that are views of one buffer are not compared."""

    prompt: Ids
    sampled: Ids

    def __len__(self) -> int:
        return len(self.prompt) + len(self.sampled)

    def shared_prefix(self, ids: Ids) -> int:
        shared, length = shared_prefix(self.prompt, ids), len(self.prompt)
        return shared if shared < length else length + shared_prefix(self.sampled, ids[length:])


def _shared_front(a: bytes, b: bytes) -> int:
    """How many leading bytes two texts have in common; each is compared about once."""
    view, low, high = memoryview(a), 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if b.startswith(view[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


class Packer:
    """Encodes the records of one section; remembers the last calls' ids, bodies and tools."""

    def __init__(self) -> None:
        self.ids: deque[tuple[int, _CallIds]] = deque(maxlen=_CANDIDATES)
        self.bodies: deque[tuple[int, bytes]] = deque(maxlen=_BODIES)
        self.tools: tuple[Tool, ...] | None = None
        self._images: set[str] = set()
        self._stream = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compressobj()

    def pack(self, *records: Record, behind: bytes = b"") -> list[Packed]:
        """Encode records, and the uncompressed bytes behind the last.

        All are encoded before any enters the stream, so that a failure leaves nothing in it.
        """
        encoded = [encode(record) for record in records]
        new = [self._stream.compress(one) + self._stream.flush(_FLUSH) for one in encoded]
        return [*((one, b"") for one in new[:-1]), (new[-1], behind)]

    def pack_call(self, call: Call) -> list[Packed]:
        """Encode a call, after the images that it is the first to hold."""
        images = [image for message in call.messages for image in message.images]
        names = {image.url: image.digest for image in images}
        new = [ImageRecord(name, url) for url, name in names.items() if name not in self._images]
        base, keep = self._find_base(call)
        body_base, front, back = self._find_body_base(call.request)
        body, cuts = _cut_images(
            [image.url for image in images], names, call.request[front : len(call.request) - back]
        )
        high, low = split_floats(call.logprobs)
        same_tools = self.tools is not None and self.tools == call.tools
        messages = MessageRecord(
            tuple(_reference_images(m, names) for m in call.messages) if images else call.messages,
            call.answer,
            () if same_tools else call.tools,
        )
        ids = np.concatenate((call.prompt_ids[keep:], call.sampled_ids)).astype(_IDS, copy=False)
        record = CallRecord(
            _strip(call), base, keep, len(call.sampled_ids), ids.tobytes(), high,
            _message_encoder.encode(messages), same_tools, body_base, front, back, cuts, body,
        )  # fmt: skip
        packed = self.pack(*new, record, behind=low)
        self._images.update(names.values())
        self._remember(call, record)
        return packed

    def _find_base(self, call: Call) -> tuple[int, int]:
        """Return the call whose ids begin this prompt, and how many; preferably its parent."""
        base, keep = -1, 0
        latest_first = reversed(self.ids)
        for number, ids in sorted(latest_first, key=lambda pair: pair[0] != call.parent):
            shared = ids.shared_prefix(call.prompt_ids)
            if shared > keep:
                base, keep = number, shared
            if shared == len(ids):
                break
        return base, keep

    def _find_body_base(self, body: bytes) -> tuple[int, int, int]:
        """Return the call whose body starts and ends like this one, and how many bytes of each."""
        base, best, best_back = -1, 0, 0
        own = np.frombuffer(body, np.uint8)
        for number, other in reversed(self.bodies):
            theirs = np.frombuffer(other, np.uint8)
            front = _shared_front(other, body)
            back = shared_prefix(theirs[front:][::-1], own[front:][::-1])
            if front + back > best + best_back:
                base, best, best_back = number, front, back
            if len(body) - front - back < _SMALL:
                break
        return base, best, best_back

    def _remember(self, call: Call, record: CallRecord) -> None:
        """Keep one entry per conversation: drop one that this call contains entirely."""
        _drop_contained(self.ids, record.base, record.keep)
        self.ids.append((call.number, _CallIds(call.prompt_ids, call.sampled_ids)))
        if call.request:
            _drop_contained(self.bodies, record.body_base, record.front + record.back + _LACKING)
            self.bodies.append((call.number, call.request))
        self.tools = call.tools


def _drop_contained(known: deque[tuple[int, Any]], number: int, length: int) -> None:
    for entry in known:
        if entry[0] == number and len(entry[1]) <= length:
            known.remove(entry)
            return


def _strip(call: Call) -> Call:
    return msgspec.structs.replace(
        call,
        messages=(),
        answer=None,
        tools=(),
        request=b"",
        prompt_ids=_NO_IDS,
        sampled_ids=_NO_IDS,
        logprobs=_NO_LOGPROBS,
    )


def _reference_images(message: Message, names: dict[str, str]) -> Message:
    named = tuple(_with_url(one, _IMAGE_REF + names[one.url]) for one in message.images)
    return msgspec.structs.replace(message, images=named) if named else message


def _with_url(image: Image, url: str) -> Image:
    return msgspec.structs.replace(image, url=url)


def _cut_images(
    urls: list[str], names: dict[str, str], body: bytes
) -> tuple[bytes, tuple[Cut, ...]]:
    """Return `body` without the data of images, and where they were."""
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
    """The ids of calls that continue each other."""

    base: tuple[_TokenChain, int] | None = None
    """The chain that it forks from, and how many ids they share."""
    length: int = 0
    pieces: list[Ids] = field(default_factory=list)
    ids: Ids = field(default_factory=lambda: _NO_IDS)
    """All ids, after `join`."""

    def add(self, ids: Ids) -> None:
        self.pieces.append(ids)
        self.length += len(ids)

    def join(self) -> None:
        start = [] if self.base is None else [self.base[0].ids[: self.base[1]]]
        self.ids = np.concatenate((*start, *self.pieces)).astype(np.int32, copy=False)
        self.ids.flags.writeable = False


class Unpacker:
    """Decodes what `Packer` encoded, section by section."""

    def __init__(self, *, bodies: bool) -> None:
        self.images: dict[str, str] = {}
        """URLs by digest."""
        self._with_bodies = bodies
        self._chains: list[_TokenChain] = []
        self._calls: list[tuple[Call, _TokenChain, int]] = []
        self.begin_section()

    def begin_section(self) -> None:
        """Forget what came before: no record of a section refers to an earlier one."""
        self._stream = zstandard.ZstdDecompressor().decompressobj()
        self._ends: dict[int, tuple[_TokenChain, int]] = {}
        self._bodies: dict[int, bytes] = {}
        self._tools: tuple[Tool, ...] = ()

    def unpack(
        self, packed: bytes, behind: bytes
    ) -> Header | RecordedEvent | RecordedResult | None:
        """Decode a record; calls and images are collected, and None is returned for them.

        Raises `msgspec.DecodeError`, `zstandard.ZstdError`, `KeyError` or `ValueError` on one that
        this format does not have.
        """
        record: Record = decode(self._stream.decompress(packed), Record)  # type: ignore[arg-type]
        if isinstance(record, CallRecord):
            self._add_call(record, behind)
        elif isinstance(record, ImageRecord):
            self.images[record.digest] = record.url
        else:
            return record
        return None

    def calls(self) -> tuple[Call, ...]:
        """Return all calls so far; their ids are read-only views of shared buffers."""
        for chain in self._chains:
            chain.join()
        calls = []
        for call, chain, end in self._calls:
            start = end - len(call.sampled_ids)
            prompt_ids, sampled_ids = chain.ids[:start], chain.ids[start:end]
            calls.append(
                msgspec.structs.replace(call, prompt_ids=prompt_ids, sampled_ids=sampled_ids)
            )
        return tuple(calls)

    def _add_call(self, record: CallRecord, behind: bytes) -> None:
        stored = _message_decoder.decode(record.messages)
        self._tools = self._tools if record.same_tools else stored.tools
        ids = np.frombuffer(record.ids, _IDS)
        chain = self._find_chain(record)
        chain.add(ids)
        call = msgspec.structs.replace(
            record.call,
            messages=tuple(map(self._resolve_images, stored.messages)),
            answer=stored.answer,
            tools=self._tools,
            sampled_ids=ids[len(ids) - record.sampled :],
            logprobs=join_floats(record.logprobs, behind),
            request=self._join_body(record) if self._with_bodies else b"",
        )
        self._ends[call.number] = chain, chain.length
        self._calls.append((call, chain, chain.length))

    def _find_chain(self, record: CallRecord) -> _TokenChain:
        """Return the chain that this call's new ids continue, or a new one."""
        base = None
        if record.keep:
            chain, end = self._ends[record.base]
            if record.keep > end:
                raise ValueError(f"a prompt begins with {record.keep} ids of a call that has {end}")
            if record.keep == chain.length:
                return chain
            base = chain, record.keep
        forked = _TokenChain(base, record.keep)
        self._chains.append(forked)
        return forked

    def _join_body(self, record: CallRecord) -> bytes:
        pieces, at = [], 0
        for cut in record.cuts:
            pieces += [record.body[at : cut.at], self.images[cut.digest][cut.start :].encode()]
            at = cut.at
        body = b"".join((*pieces, record.body[at:])) if pieces else record.body
        if record.front or record.back:
            like = self._bodies[record.body_base]
            body = b"".join((like[: record.front], body, like[len(like) - record.back :]))
        self._bodies[record.call.number] = body
        return body

    def _resolve_images(self, message: Message) -> Message:
        if not message.images:
            return message
        urls = [self.images[one.url.removeprefix(_IMAGE_REF)] for one in message.images]
        images = tuple(map(_with_url, message.images, urls))
        return msgspec.structs.replace(message, images=images)


# --------------------------------------------------------------------------- logprobs
def split_floats(values: Logprobs) -> tuple[bytes, bytes]:
    """Split floats into their highest bytes, which compress well, and the three low ones each."""
    quads = np.ascontiguousarray(values, _FLOATS).view(np.uint8).reshape(-1, 4)
    return quads[:, 3].tobytes(), quads[:, :3].tobytes()


def join_floats(high: bytes, low: bytes) -> Logprobs:
    """Undo `split_floats`. Raises `ValueError` if the lengths do not match."""
    quads = np.empty((len(high), 4), np.uint8)
    quads[:, 3] = np.frombuffer(high, np.uint8)
    quads[:, :3] = np.frombuffer(low, np.uint8).reshape(len(high), 3)
    return quads.view(_FLOATS).reshape(-1).astype(np.float32, copy=False)
