"""A receiver of callbacks: ``receiver.py PORT FILE``, which stores each before it answers 204."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from wire import JsonLog

LOG = JsonLog(Path(sys.argv[2]))
LOCK = threading.Lock()


class Receiver(BaseHTTPRequestHandler):
    """Accept every POST."""

    def do_POST(self) -> None:
        """Write the callback's id and body to the file, then answer."""
        body = self.rfile.read(int(self.headers["content-length"]))
        with LOCK:
            LOG.write({"id": self.headers["webhook-id"], "body": json.loads(body)})
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Log nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
