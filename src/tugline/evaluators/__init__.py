"""How the outcome of a session is judged.

Evaluators, each a name that a task can say: `tests` (by `pytest_run` or `command_run`), `swebench`,
`harbor`, `function`, `judge` (with `transcript` and `judge_model`), `weighted`,
`session_completed`. What they share: `filters` (which changes are laid over a fresh copy), `fresh`
and `diff` (what was there before, and what changed), `formats` (what test runners say), `scoring`
(from that to a reward), `together` (several at once).
"""
