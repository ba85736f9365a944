# Kill process 1 of a sandbox, $0, at the end of stdin, unless its pid was reused (runner.py).
exec 2>/dev/null
trap "" HUP INT TERM
cd "/proc/$0" || exit
read -r _
[ -e root/run/tugline/runner ] && kill -9 "$0"
