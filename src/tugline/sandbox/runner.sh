# Process 1 of a sandbox: runs one program after another and reports the exit codes (runner.py).
# Opening a pipe for reading only or writing only blocks until the other end is opened. So each pipe
# is first opened for both: a shell whose host has died meanwhile then reads end-of-file at once.
# A program's orphans become children of process 1: each `wait` reaps the dead ones, so that they do
# not count against the process limit. If `(:) &` cannot fork, the shell exits, which ends the
# sandbox; the exit code has been reported by then.
# A program that runs as root can open these pipes in /proc. So it is killed before a message with
# the key is written, and the code is reported again ("clean") when no process is left that could
# have read the first message. A message begins on a new line, whatever was written before it.
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
