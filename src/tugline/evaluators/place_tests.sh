# Puts the tests of the folder $0 in place, over anything that is there, and removes the folder.
# shellcheck disable=SC2115 # it is one of two
for d in /tests /logs/verifier; do rm -rf "$d"/* "$d"/.[!.]* "$d"/..?*; done
cp -R "$0"/. /tests/ && rm -rf "$0"
