"""A trainer that only reads: ``trainer.py URL TOKEN FILE``.

Results are on its disk before they are acknowledged, so what it acknowledged it has.
"""

import sys
from pathlib import Path

from wire import Api, Book


def main() -> None:
    """For ever: ask, keep, acknowledge."""
    url, token, file = sys.argv[1:]
    api, book = Api(url, token, within_s=3600), Book(Path(file))
    book.write({"began": True})
    while True:
        told = api.get("/v1/results?consumer=trainer&limit=16&wait_s=5")
        if not told["items"]:
            continue
        book.write(*({"result": item} for item in told["items"]))
        api.post("/v1/results/ack?consumer=trainer", {"cursor": told["cursor"]})
        book.write({"acked": told["cursor"]})


if __name__ == "__main__":
    main()
