"""Receive callbacks of a Tugline server, with the standard library only (docs/callbacks.md).

    TUGLINE_CALLBACK_SECRET=whsec_... python3 callback_receiver.py 9000

Prints a line for each new callback, and answers 401 to requests that the server did not sign.
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
SEEN: set[str] = set()  # a real receiver needs a database: a callback may be sent twice


class Receiver(BaseHTTPRequestHandler):
    """Handles callbacks."""

    def do_POST(self) -> None:
        """Verify the signature, process the callback, and answer."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name, at = self.headers.get("webhook-id", ""), self.headers.get("webhook-timestamp", "")
        digest = hmac.digest(KEY, f"{name}.{at}.".encode() + body, hashlib.sha256)
        expected = "v1," + base64.b64encode(digest).decode()
        signatures = self.headers.get("webhook-signature", "").split()
        genuine = any(hmac.compare_digest(expected, each) for each in signatures)
        recent = at.isdigit() and abs(time.time() - int(at)) < 300
        if genuine and recent and name not in SEEN:
            event = json.loads(body)
            print(event["kind"], event["task"], event.get("result", {}).get("reward"), flush=True)
            SEEN.add(name)
        self.send_response(204 if genuine and recent else 401)  # only after it is processed
        self.end_headers()


server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver)
print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
