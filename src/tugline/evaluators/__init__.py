"""Evaluators, which score the outcome of a session; a task names one.

`tests`, `swebench` and `harbor` run a script (`script`) on the filtered patch (`filters`) in a
fresh sandbox; `function`, `judge`, `weighted` and `session_completed` use the `SessionOutcome`.
"""
