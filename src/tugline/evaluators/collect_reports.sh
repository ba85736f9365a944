mkfifo "$0.pipe" || exit 126
cat "$0.pipe" > "$0" &
exec 3> "$0.pipe"
"$@" 3>&-
code=$?
exec 3>&-
wait
exit $code
