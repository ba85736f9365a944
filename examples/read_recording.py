"""Read a recording without Tugline, with zstandard, msgspec and numpy (docs/format.md).

    python3 read_recording.py runs/demo/recordings/some-session.0.rec [--json]

Prints a line per call, or with --json an object per call with ids, logprobs and messages.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard

MAGIC = b"TUGREC\x00\x04"
HEAD = struct.Struct("<III")
TYPES = {b"i": "<i4", b"f": "<f4"}


def records(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield all records, and a record of the type "section" at the begin of each section."""
    at = 0
    while at + len(MAGIC) <= len(data):
        if data.startswith(MAGIC, at):
            stream, at = zstandard.ZstdDecompressor().decompressobj(), at + len(MAGIC)
            yield {"type": "section"}
            continue
        if at + HEAD.size > len(data):
            return  # truncated within a head
        length, body_crc, head_crc = HEAD.unpack_from(data, at)
        body = at + HEAD.size
        end = body + length
        if end > len(data):
            return  # truncated within a record
        if zlib.crc32(data[at : body - 4]) != head_crc or zlib.crc32(data[body:end]) != body_crc:
            sys.exit(f"damaged at offset {at}")
        yield msgspec.msgpack.decode(stream.decompress(data[body:end]))
        at = end


def array(value: bytes) -> np.ndarray:
    """Decode an array, whose first byte is its type."""
    return np.frombuffer(value, TYPES[value[:1]], offset=1)


def calls(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield every call, completed with the parts that it shares with earlier calls."""
    images: dict[str, str] = {}
    for record in records(data):
        if record["type"] == "section":
            ids, tools = {}, []
        elif record["type"] == "image":
            images[record["digest"]] = record["url"]
        elif record["type"] == "call":
            call = record["call"]
            tools = tools if record["same_tools"] else call["tools"]
            for message in call["messages"]:
                for image in message.get("images", []):
                    image["url"] = images[image["url"]]
            prompt, sampled = array(call["prompt_ids"]), array(call["sampled_ids"])
            if record["keep"]:
                prompt = np.concatenate((ids[record["base"]][: record["keep"]], prompt))
            ids[call["number"]] = np.concatenate((prompt, sampled))
            numbers = {"prompt_ids": prompt, "sampled_ids": sampled}
            numbers["logprobs"] = array(call["logprobs"])
            yield {**call, "tools": tools, **{name: a.tolist() for name, a in numbers.items()}}


for call in calls(Path(sys.argv[1]).read_bytes()):
    size = f"{len(call['prompt_ids'])} prompt + {len(call['sampled_ids'])} sampled"
    answer = (call["answer"] or {}).get("content")
    line = f"call {call['number']}: {size}, {call['finish']}, {answer!r}"
    print(json.dumps(call) if "--json" in sys.argv else line)
