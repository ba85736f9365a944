#!/bin/bash
# The reward is 1 if every check passes, else 0.
set -u
reward=1
expect() {
  if ! "$@"; then
    echo "not so: $*"
    reward=0
  fi
}
cd /app
expect test "$(readlink current)" = releases/1.10.0
expect test "$(readlink previous)" = releases/1.9.0
expect test -x releases/1.10.0/bin/serve
expect test ! -x releases/1.9.0/bin/serve
expect test ! -x releases/1.2.3/bin/serve
expect test ! -L releases/broken
expect test ! -e releases/broken
for version in 1.9.0 1.10.0 1.2.3; do
  expect test "$(sh "releases/$version/bin/serve")" = "serving $version"
done
expect test "$(current/bin/serve)" = "serving 1.10.0"
echo "$reward" > /logs/verifier/reward.txt
