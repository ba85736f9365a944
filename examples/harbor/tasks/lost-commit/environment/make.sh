#!/bin/sh
# The history that the task is about.
set -e
git init -q -b main .
git config user.name "Sled Driver"
git config user.email driver@example.org
commit() {
  git add -A
  git commit -q -m "$1" --author "${2:-Sled Driver <driver@example.org>}"
}
echo "ropes" > packing.txt
commit "Begin the packing list"
echo "harness" >> packing.txt
commit "Add the harness"
echo "a lantern, and oil for ten nights" > lantern.txt
commit "Add the lantern" "Mate <mate@example.org>"
git reset -q --hard HEAD~1
echo "biscuits" >> packing.txt
commit "Add biscuits"
