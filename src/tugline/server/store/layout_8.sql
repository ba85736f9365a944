-- From layout 7 to layout 8.
-- What runs are compared by. `_fill_sessions` reads it from the tasks and results of layout 7.
ALTER TABLE sessions ADD COLUMN problem TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN held_out INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN reward DOUBLE PRECISION;
ALTER TABLE sessions ADD COLUMN seconds DOUBLE PRECISION;             -- of all stages
CREATE INDEX sessions_by_problem ON sessions (run, held_out, version, problem, reward, place)
    WHERE run IS NOT NULL AND status IN ('completed', 'failed', 'timed_out');
CREATE INDEX sessions_by_reward ON sessions (reward, place) WHERE reward IS NOT NULL;
CREATE INDEX sessions_by_seconds ON sessions (seconds, place) WHERE seconds IS NOT NULL;
CREATE INDEX sessions_of_run_by_reward ON sessions (run, reward, place) WHERE reward IS NOT NULL;
CREATE INDEX sessions_of_run_by_seconds ON sessions (run, seconds, place) WHERE seconds IS NOT NULL;
CREATE INDEX sessions_of_run_by_change ON sessions (run, updated) WHERE status <> 'queued';
