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
there() {  # where the work is, if that is another sandbox
  ${JUDGED:-} "$@"
}
cd /app
expect test "$(there readlink current)" = releases/1.10.0
expect test "$(there readlink previous)" = releases/1.9.0
expect there test -x releases/1.10.0/bin/serve
expect there test ! -x releases/1.9.0/bin/serve
expect there test ! -x releases/1.2.3/bin/serve
expect there test ! -L releases/broken
expect there test ! -e releases/broken
for version in 1.9.0 1.10.0 1.2.3; do
  expect test "$(there sh "releases/$version/bin/serve")" = "serving $version"
done
expect test "$(there current/bin/serve)" = "serving 1.10.0"
echo "$reward" > /logs/verifier/reward.txt
