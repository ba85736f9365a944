"""Safetensors files of a model folder, read and written tensor by tensor as raw bytes.

The places of all tensors are known before the first one is written, so a model is never in memory
as a whole. This module does not import torch.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
"""Bytes of an element by the name of its type in the format; of the types that can be written."""
_BLOCK = 64 << 20


class StoredTensor(NamedTuple):
    """The place of a tensor in a file."""

    file: str
    """Name of the file in its folder."""
    dtype: str
    """Name of the type in the format, such as ``BF16``."""
    shape: tuple[int, ...]
    begin: int
    """Position of the first byte in the file."""
    size: int
    """Number of bytes."""


def read_places(folder: Path) -> dict[str, StoredTensor]:
    """Return the place of each tensor of a model folder, in the order of its files.

    Raises `OSError` if a file cannot be read, and `ValueError` if it is not a safetensors file.
    """
    files = [WEIGHTS]
    if (folder / INDEX).is_file():
        files = sorted({*json.loads((folder / INDEX).read_bytes())["weight_map"].values()})
    return {name: place for file in files for name, place in read_header(folder / file).items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the place of each tensor of a file; errors are those of `read_places`."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is not a safetensors file")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    places = []
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        place = StoredTensor(path.name, entry["dtype"], (*entry["shape"],), begin, end - begin)
        places.append((name, place))
    return dict(sorted(places, key=lambda item: item[1].begin))


def create_files(folder: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Create the files of `tensors` with their headers, and return the new place of each tensor.

    File, type and shape are those of `tensors`.
    """
    places: dict[str, StoredTensor] = {}
    files: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        files.setdefault(tensor.file, {})[name] = tensor
    for file, own in sorted(files.items()):
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        sizes = {}
        for name, tensor in own.items():
            sizes[name] = math.prod(tensor.shape) * SIZES[tensor.dtype]
            span = [offset, offset + sizes[name]]
            header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": span}
            offset = span[1]
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(len(encoded).to_bytes(8, "little") + encoded)
            begin = stream.tell()
            stream.truncate(begin + offset)
        for name, tensor in own.items():
            places[name] = tensor._replace(begin=begin, size=sizes[name])
            begin += sizes[name]
    return places


def write_index(folder: Path, places: Mapping[str, StoredTensor]) -> None:
    """Write the index of a model that has several files."""
    files = {name: place.file for name, place in places.items()}
    if {*files.values()} != {WEIGHTS}:
        total = sum(place.size for place in places.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_tensor(folder: Path, place: StoredTensor, data: memoryview) -> None:
    """Write the bytes of a tensor to its place."""
    if data.nbytes != place.size:
        raise ValueError(f"a tensor of {place.size} bytes is written with {data.nbytes}")
    with (folder / place.file).open("r+b", buffering=0) as stream:
        done = 0
        while done < place.size:
            done += os.pwrite(stream.fileno(), data[done : done + _BLOCK], place.begin + done)


def copy_tensor(source: Path, stored: StoredTensor, folder: Path, place: StoredTensor) -> None:
    """Copy the bytes of a tensor from its place below `source` to one below `folder`."""
    with (
        (source / stored.file).open("rb", buffering=0) as reader,
        (folder / place.file).open("r+b", buffering=0) as writer,
    ):
        done = 0
        while done < place.size:
            data = os.pread(reader.fileno(), min(_BLOCK, place.size - done), stored.begin + done)
            if not data:
                raise ValueError(f"{source / stored.file} ends within a tensor")
            done += os.pwrite(writer.fileno(), data, place.begin + done)
