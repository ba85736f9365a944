# Process 1 of a sandbox: runs one program after another and reports how each ended (runner.py).
# A pipe that is opened for one direction waits for who opens the other; opened for both before, it
# does not, so that a shell whose host has died meanwhile reads the end at once.
# A program's orphans are children of process 1: each `wait` reaps the dead ones, so that they do
# not count against the limit of processes. If no process can be made for it the shell ends, and all
# with it; the exit code has been reported by then.
# A program of root's can open these pipes in /proc: it is dead before a word with the key is said,
# and the code is said again once nobody is left who could have taken the first word away. A word
# begins on a new line, whatever was written before it.
[ $$ = 1 ] || exit 70
c=${0%/*}
exec 5<>"$c/requests" 6<>"$c/replies" </dev/null >/dev/null 2>&1
exec 3<"$c/requests" 4>"$c/replies" 5<&- 6<&-
read -r key <&3 || exit 71
echo "ready 0 0 $key" >&4
while read -r given n <&3; do
  [ "$given" = "$key" ] || continue
  ( . "$c/$n.sh" ) >"$c/$n.out" 2>&1 3<&- 4>&-
  code=$?
  kill -9 -1
  printf '\nended %s %s %s\n' "$n" "$code" "$key" >&4
  while set -- /proc/[0-9]*; [ $# -gt 1 ]; do (:) & wait; kill -9 -1; done
  printf '\nclean %s %s %s\n' "$n" "$code" "$key" >&4
done
