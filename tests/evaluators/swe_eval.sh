#!/bin/bash
# As rows have it; `run.py` prints what pytest would, in a tenth of its time.
set -uxo pipefail
mkdir -p tests
cat > tests/test_calc.py <<'EOF'
from calc import add, sub

def test_add():
    assert add(2, 1) == 3

def test_add_again():
    assert add(2, 2) == 4

def test_sub():
    assert sub(2, 1) == 1

EOF
cat > "$HOME/run.py" <<'EOF'
import sys
sys.path[:0] = [".", "tests"]
import test_calc
failed = 0
for name, test in vars(test_calc).items():
    if name.startswith("test_"):
        try:
            test()
            print(f"PASSED tests/test_calc.py::{name}")
        except AssertionError:
            failed = 1
            print(f"FAILED tests/test_calc.py::{name} - AssertionError")
sys.exit(failed)

EOF
: '>>>>> Start Test Output'
python3 -B "$HOME/run.py"
: '>>>>> End Test Output'
