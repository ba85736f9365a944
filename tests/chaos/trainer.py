"""A trainer that only reads results: ``trainer.py URL TOKEN FILE``.

Results are written to disk before they are acknowledged.
"""

import sys
from pathlib import Path

from wire import Api, JsonLog


def main() -> None:
    """Read, write down and acknowledge results until killed."""
    url, token, file = sys.argv[1:]
    api, log = Api(url, token, within_s=3600), JsonLog(Path(file))
    log.write({"began": True})
    while True:
        page = api.get("/v1/results?consumer=trainer&limit=16&wait_s=5")
        if not page["items"]:
            continue
        log.write(*({"result": item} for item in page["items"]))
        api.post("/v1/results/ack?consumer=trainer", {"cursor": page["cursor"]})
        log.write({"acked": page["cursor"]})


if __name__ == "__main__":
    main()
