# Mount an overlay with the options $1 at $2, then execute the other arguments (bubblewrap.py).
mount -t overlay overlay -o "nosuid,nodev,$1" "$2" 2>/dev/null ||
  mount -t overlay overlay -o "nosuid,nodev,${1%,volatile}" "$2" || exit 71
shift 2
exec "$@"
