#!/bin/bash
set -e
python3 - <<'PY'
import csv
import json

with open("/app/customers.csv") as file:
    country = {row["id"]: row["country"] for row in csv.DictReader(file)}
with open("/app/orders.csv") as file:
    orders = {row["id"]: row for row in csv.DictReader(file)}
report = {}
for order in orders.values():
    if order["customer"] not in country:
        continue
    line = report.setdefault(country[order["customer"]], {"orders": 0, "total": 0.0})
    line["orders"] += 1
    line["total"] += float(order["amount"].strip().replace(",", "."))
for line in report.values():
    line["total"] = round(line["total"], 2)
with open("/app/report.json", "w") as file:
    json.dump(dict(sorted(report.items())), file, indent=2)
PY
