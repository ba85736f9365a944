"""Read a recording without Tugline: zstandard, msgspec and numpy are all it takes (docs/format.md).

    python3 read_recording.py runs/demo/recordings/some-session.0.rec [--json]

Prints a line per call; with --json an object per call, with ids, logprobs, messages and request.
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

MAGIC = b"TUGREC\x00\x03"
HEAD = struct.Struct("<IIII")


def records(data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield each record and the bytes behind it; an empty one where a section begins."""
    at = 0
    while at + len(MAGIC) <= len(data):
        if data.startswith(MAGIC, at):
            stream, at = zstandard.ZstdDecompressor().decompressobj(), at + len(MAGIC)
            yield {"type": "section"}, b""
            continue
        if at + HEAD.size > len(data):
            return  # cut off in the middle of a head
        packed, plain, crc, own = HEAD.unpack_from(data, at)
        body = at + HEAD.size
        end = body + packed + plain
        if end > len(data):
            return  # cut off in the middle of a record
        if zlib.crc32(data[at : body - 4]) != own or zlib.crc32(data[body:end]) != crc:
            sys.exit(f"damaged at offset {at}")
        record = msgspec.msgpack.decode(stream.decompress(data[body : body + packed]))
        yield record, data[body + packed : end]
        at = end


def calls(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield every call with the parts that its record shares with earlier ones."""
    images: dict[str, str] = {}
    for record, behind in records(data):
        if record["type"] == "section":
            ids, bodies, tools = {}, {}, []
        elif record["type"] == "image":
            images[record["digest"]] = record["url"]
        elif record["type"] == "call":
            call, stored = record["call"], json.loads(record["messages"])
            new = np.frombuffer(record["ids"], "<i4")
            if record["keep"]:
                new = np.concatenate((ids[record["base"]][: record["keep"]], new))
            ids[call["number"]] = new
            prompt = len(new) - record["sampled"]
            logprobs = np.empty((len(record["logprobs"]), 4), np.uint8)
            logprobs[:, 3] = np.frombuffer(record["logprobs"], np.uint8)
            logprobs[:, :3] = np.frombuffer(behind, np.uint8).reshape(-1, 3)
            body, at = b"", 0
            for place, digest, start in record["cuts"]:
                body += record["body"][at:place] + images[digest][start:].encode()
                at = place
            body += record["body"][at:]
            if record["front"] or record["back"]:
                like = bodies[record["body_base"]]
                body = like[: record["front"]] + body + like[len(like) - record["back"] :]
            bodies[call["number"]] = body
            tools = tools if record["same_tools"] else stored.get("tools", [])
            for message in stored.get("messages", []):
                for image in message.get("images", []):
                    image["url"] = images[image["url"].removeprefix("sha256:")]
            full = {"messages": stored.get("messages", []), "answer": stored.get("answer")}
            full |= {"tools": tools, "request": body.decode(errors="replace"), "response": ""}
            full |= {"prompt_ids": new[:prompt].tolist(), "sampled_ids": new[prompt:].tolist()}
            yield {**call, **full, "logprobs": logprobs.view("<f4").ravel().tolist()}


for one in calls(Path(sys.argv[1]).read_bytes()):
    size = f"{len(one['prompt_ids'])} prompt + {len(one['sampled_ids'])} sampled"
    answer = (one["answer"] or {}).get("content")
    line = f"call {one['number']}: {size}, {one['finish']}, {answer!r}"
    print(json.dumps(one) if "--json" in sys.argv else line)
