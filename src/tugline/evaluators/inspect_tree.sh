# Lists the existing paths among those in the file $0, all Python files, and the output of the
# program $1 in each interpreter.
exec 2>/dev/null
# shellcheck disable=SC2016 # the inner shell expands it
xargs -0 sh -c 'for f; do if [ -e "$f" ] || [ -h "$f" ]
then printf "%s\0" "$f" || exit; fi; done' sh < "$0" || exit
find . -name .git -prune -o -name "*.py" -exec printf "%s\0" {} + ||
[ $? -eq 1 ] || exit # 1: a folder cannot be read, so nothing is imported from it
IFS=:
for d in $PATH /opt/*/bin /opt/*/envs/*/bin ./*/bin ./.*/bin
do if [ -x "$d/python3" ]; then "$d/python3" -B -c "$1"
elif [ -x "$d/python" ]; then "$d/python" -B -c "$1"; fi
done
exit 0 # an interpreter that cannot start runs no tests
