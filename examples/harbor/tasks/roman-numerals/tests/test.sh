#!/bin/bash
# Several rewards, of which `reward` counts.
python3 -I /tests/check.py > /logs/verifier/reward.json
cat /logs/verifier/reward.json
