# Kill process 1 of a sandbox, $0, when stdin ends, unless its number is another's by now (runner.py).
exec 2>/dev/null
trap "" HUP INT TERM
cd "/proc/$0" || exit
read -r _
[ -e root/run/tugline/runner ] && kill -9 "$0"
