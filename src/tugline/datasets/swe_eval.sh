#!/bin/bash
set -uxo pipefail
if [ -f /opt/miniconda3/bin/activate ]; then set +u; source /opt/miniconda3/bin/activate; conda activate testbed; set -u; fi
cd {folder}
git config --global --add safe.directory {folder}
{setup}{restore}
{patch}: '>>>>> Start Test Output'
{command}
: '>>>>> End Test Output'
{restore}
