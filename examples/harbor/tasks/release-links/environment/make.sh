#!/bin/sh
# Three releases, and traces of a failed one.
set -e
for version in 1.9.0 1.10.0 1.2.3; do
  mkdir -p "releases/$version/bin"
  printf '#!/bin/sh\necho "serving %s"\n' "$version" > "releases/$version/bin/serve"
  chmod 644 "releases/$version/bin/serve"
done
chmod 755 releases/1.9.0/bin/serve
ln -s releases/1.9.0 current
ln -s 1.11.0 releases/broken
