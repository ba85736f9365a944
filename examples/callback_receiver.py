"""Receive callbacks of a Tugline server with nothing but the standard library (docs/callbacks.md).

    TUGLINE_CALLBACK_SECRET=whsec_... python3 callback_receiver.py 9000

Prints a line for each callback, once, and answers 401 to whatever is not signed by the server.
"""

import base64
import hashlib
import hmac
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

KEY = base64.b64decode(os.environ["TUGLINE_CALLBACK_SECRET"].removeprefix("whsec_"))
SEEN: set[str] = set()  # of a real receiver, in a database: a callback may come twice


class Receiver(BaseHTTPRequestHandler):
    """Answers one callback."""

    def do_POST(self) -> None:
        """Verify, note it, answer."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name, at = self.headers.get("webhook-id", ""), self.headers.get("webhook-timestamp", "")
        digest = hmac.digest(KEY, f"{name}.{at}.".encode() + body, hashlib.sha256)
        right = "v1," + base64.b64encode(digest).decode()
        signatures = self.headers.get("webhook-signature", "").split()
        genuine = any(hmac.compare_digest(right, one) for one in signatures)
        recent = at.isdigit() and abs(time.time() - int(at)) < 300
        if genuine and recent and name not in SEEN:
            told = json.loads(body)
            print(told["kind"], told["task"], told.get("result", {}).get("reward"), flush=True)
            SEEN.add(name)
        self.send_response(204 if genuine and recent else 401)  # what is answered is safe
        self.end_headers()


server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
