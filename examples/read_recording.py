"""Read a recording without Tugline: zstandard, msgspec and numpy are all it takes (docs/format.md).

    python3 read_recording.py runs/demo/recordings/some-session.0.rec [--json]

Prints a line per call; with --json an object per call, with ids, logprobs and messages.
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
    """Yield each record, and one of the type "section" where a section begins."""
    at = 0
    while at + len(MAGIC) <= len(data):
        if data.startswith(MAGIC, at):
            stream, at = zstandard.ZstdDecompressor().decompressobj(), at + len(MAGIC)
            yield {"type": "section"}
            continue
        if at + HEAD.size > len(data):
            return  # cut off in the middle of a head
        length, crc, own = HEAD.unpack_from(data, at)
        body = at + HEAD.size
        end = body + length
        if end > len(data):
            return  # cut off in the middle of a record
        if zlib.crc32(data[at : body - 4]) != own or zlib.crc32(data[body:end]) != crc:
            sys.exit(f"damaged at offset {at}")
        yield msgspec.msgpack.decode(stream.decompress(data[body:end]))
        at = end


def array(value: bytes) -> np.ndarray:
    """The numbers of a byte string that begins with their type."""
    return np.frombuffer(value, TYPES[value[:1]], offset=1)


def calls(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield every call with the parts that its record shares with earlier ones."""
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


for one in calls(Path(sys.argv[1]).read_bytes()):
    size = f"{len(one['prompt_ids'])} prompt + {len(one['sampled_ids'])} sampled"
    answer = (one["answer"] or {}).get("content")
    line = f"call {one['number']}: {size}, {one['finish']}, {answer!r}"
    print(json.dumps(one) if "--json" in sys.argv else line)
