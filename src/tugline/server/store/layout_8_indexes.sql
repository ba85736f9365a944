-- Indexes of layout 8 on columns that `_fill_sessions` has written.
CREATE INDEX sessions_by_problem ON sessions (run, held_out, version, problem, reward, place)
    WHERE run IS NOT NULL AND status IN ('completed', 'failed', 'timed_out');
CREATE INDEX sessions_by_reward ON sessions (reward, place) WHERE reward IS NOT NULL;
CREATE INDEX sessions_by_seconds ON sessions (seconds, place) WHERE seconds IS NOT NULL;
CREATE INDEX sessions_of_run_by_reward ON sessions (run, reward, place) WHERE reward IS NOT NULL;
CREATE INDEX sessions_of_run_by_seconds ON sessions (run, seconds, place) WHERE seconds IS NOT NULL;
CREATE INDEX sessions_of_run_by_change ON sessions (run, updated) WHERE status <> 'queued';
