"""A receiver of callbacks: ``receiver.py PORT FILE``. What it answers 204 to is on its disk."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from wire import Book

BOOK = Book(Path(sys.argv[2]))
LOCK = threading.Lock()


class Receiver(BaseHTTPRequestHandler):
    """Takes every POST."""

    def do_POST(self) -> None:
        """Keep its id and what it tells of, then answer."""
        body = self.rfile.read(int(self.headers["content-length"]))
        with LOCK:
            BOOK.write({"id": self.headers["webhook-id"], "body": json.loads(body)})
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Say nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
