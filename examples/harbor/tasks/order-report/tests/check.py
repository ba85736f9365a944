"""Check the report, including the order of its keys."""

import json
import os
import subprocess
import sys

EXPECTED = {
    "Finland": {"orders": 3, "total": 15.25},
    "Norway": {"orders": 2, "total": 19.25},
    "Peru": {"orders": 2, "total": 0.3},
}

try:
    argv = ["cat", "/app/report.json"]
    if "JUDGED" in os.environ:  # the work is in another sandbox
        argv.insert(0, os.environ["JUDGED"])
    report = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=False).stdout)
except ValueError as error:
    sys.exit(f"report.json: {error}")
if list(report) != list(EXPECTED):
    sys.exit(f"countries are {list(report)}")
for country, expected in EXPECTED.items():
    row = report[country]
    if row.get("orders") != expected["orders"]:
        sys.exit(f"{country}: {row}")
    if abs(row.get("total", 0) - expected["total"]) > 0.0051:
        sys.exit(f"{country}: {row}")
