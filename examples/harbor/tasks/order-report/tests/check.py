"""The report must be this one, in this order."""

import json
import os
import subprocess
import sys

WANTED = {
    "Finland": {"orders": 3, "total": 15.25},
    "Norway": {"orders": 2, "total": 19.25},
    "Peru": {"orders": 2, "total": 0.3},
}

try:
    argv = ["cat", "/app/report.json"]
    if "JUDGED" in os.environ:  # the work lies in another sandbox
        argv.insert(0, os.environ["JUDGED"])
    report = json.loads(subprocess.run(argv, stdout=subprocess.PIPE, check=False).stdout)
except ValueError as error:
    sys.exit(f"report.json: {error}")
if list(report) != list(WANTED):
    sys.exit(f"countries are {list(report)}")
for country, wanted in WANTED.items():
    row = report[country]
    if row.get("orders") != wanted["orders"]:
        sys.exit(f"{country}: {row}")
    if abs(row.get("total", 0) - wanted["total"]) > 0.0051:
        sys.exit(f"{country}: {row}")
