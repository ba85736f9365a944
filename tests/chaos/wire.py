"""A client of the server's API with the standard library only, independent of Tugline's own."""

from __future__ import annotations

import http.client
import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


class Api:
    """A client of `url`; failed requests are repeated for `within_s` seconds."""

    def __init__(self, url: str, token: str = "", *, within_s: float = 60.0) -> None:
        self._address, self._token, self._within_s = urlsplit(url).netloc, token, within_s

    def get(self, path: str) -> Any:
        """Decoded JSON of a GET request."""
        return json.loads(self.bytes("GET", path))

    def post(self, path: str, body: object) -> Any:
        """Decoded JSON of the response to a POST request."""
        return json.loads(self.bytes("POST", path, json.dumps(body).encode()))

    def bytes(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Body of the response. Raises `RuntimeError` for a 4xx, `TimeoutError` without one."""
        until = time.monotonic() + self._within_s
        while True:
            try:
                status, text = self.once(method, path, body)
                if status < 400:
                    return text
                if status < 500 and status != 429:
                    msg = f"{method} {path} was refused: {status}, {text[:400]!r}"
                    raise RuntimeError(msg)
                trouble = f"{status}: {text[:200]!r}"
            except (OSError, http.client.HTTPException) as error:
                trouble = repr(error)
            if time.monotonic() > until:
                msg = f"{method} {path}: no good answer within {self._within_s} s, last {trouble}"
                raise TimeoutError(msg)
            time.sleep(0.05)

    def once(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float = 30.0
    ) -> tuple[int, bytes]:
        """Status and body of a single request."""
        connection = http.client.HTTPConnection(self._address, timeout=timeout_s)
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class JsonLog:
    """Lines of JSON that are on the disk when `write` returns; a torn last line is dropped."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def write(self, *lines: dict[str, Any]) -> None:
        """Append a line and sync the file."""
        self._file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        os.fsync(self._file)

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """Complete lines of a file, which may be open elsewhere."""
        whole = path.read_bytes() if path.exists() else b""
        return [json.loads(line) for line in whole[: whole.rfind(b"\n") + 1].splitlines()]
