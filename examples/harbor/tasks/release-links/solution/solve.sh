#!/bin/bash
set -e
cd /app
ln -sfn releases/1.10.0 current
ln -sfn releases/1.9.0 previous
chmod 644 releases/*/bin/serve
chmod 755 releases/1.10.0/bin/serve
rm releases/broken
