#!/bin/sh
if python3 -B -c 'import bill, sys; sys.exit(bill.total(2, 3) != 5)'
then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt
fi
