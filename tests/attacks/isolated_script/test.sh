#!/bin/sh
[ "$(${JUDGED:-} python3 -B -c 'import bill; print(bill.total(2, 3))' < /dev/null)" = 5 ]
echo $((1 - $?)) > /logs/verifier/reward.txt
