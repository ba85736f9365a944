#!/bin/bash
set -e
cat > /app/topwords <<'PY'
#!/usr/bin/env python3
import argparse
import collections
import re
import sys


def positive(text):
    value = int(text)
    if value < 1:
        raise ValueError
    return value


parser = argparse.ArgumentParser(prog="topwords")
parser.add_argument("-n", type=positive, default=10, metavar="COUNT")
parser.add_argument("files", nargs="*", metavar="FILE")
told = parser.parse_args()
texts = []
for name in told.files:
    try:
        with open(name, errors="replace") as file:
            texts.append(file.read())
    except OSError as error:
        sys.exit(f"topwords: {name}: {error.strerror}")
if not told.files:
    texts.append(sys.stdin.read())
runs = re.findall(r"[A-Za-z']+", "\n".join(texts))
words = collections.Counter(word for run in runs if (word := run.strip("'").lower()))
for word, count in sorted(words.items(), key=lambda pair: (-pair[1], pair[0]))[: told.n]:
    print(f"{count}\t{word}")
PY
chmod +x /app/topwords
