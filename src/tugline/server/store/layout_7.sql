-- From layout 6 to layout 7.
CREATE TABLE runs (
    name TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    configuration TEXT NOT NULL,              -- JSON
    parent TEXT,
    started_by TEXT NOT NULL DEFAULT '',
    created DOUBLE PRECISION NOT NULL,
    updated DOUBLE PRECISION NOT NULL,        -- last start, end or report
    ended DOUBLE PRECISION
);
CREATE INDEX runs_by_change ON runs (updated);
INSERT INTO runs (name, kind, configuration, created, updated)
    SELECT run, 'train', '{}', MIN(updated), MAX(updated) FROM run_steps GROUP BY run;
ALTER TABLE tasks ADD COLUMN run TEXT;
ALTER TABLE tasks ADD COLUMN judges TEXT;     -- recorded session that it judges
ALTER TABLE sessions ADD COLUMN run TEXT;
ALTER TABLE sessions ADD COLUMN judges TEXT;
ALTER TABLE sessions ADD COLUMN pinned TEXT NOT NULL DEFAULT '';  -- name of the only node for it
ALTER TABLE results ADD COLUMN run TEXT;
ALTER TABLE results ADD COLUMN judges TEXT;
CREATE INDEX tasks_of_run ON tasks (run, place) WHERE run IS NOT NULL;
CREATE INDEX tasks_released_of_run ON tasks (run, released) WHERE run IS NOT NULL;
CREATE INDEX sessions_of_run ON sessions (run, place) WHERE run IS NOT NULL;
CREATE INDEX results_of_run ON results (run, position) WHERE run IS NOT NULL;
-- What consumers get that ask for no task and no run.
CREATE INDEX tasks_delivered ON tasks (released) WHERE released IS NOT NULL AND judges IS NULL;
CREATE INDEX results_delivered ON results (position) WHERE judges IS NULL;
DROP INDEX sessions_queued;
CREATE INDEX sessions_queued ON sessions (tenant, pinned, turn, place) WHERE status = 'queued';
CREATE TABLE verdicts (
    session TEXT NOT NULL REFERENCES sessions (id),
    number INTEGER NOT NULL,                  -- 1: of its evaluation, once another is in force
    at DOUBLE PRECISION NOT NULL,
    judged_by TEXT NOT NULL,
    run TEXT,
    evaluator TEXT NOT NULL,
    digest TEXT NOT NULL,
    round INTEGER NOT NULL,
    reward {blob},                            -- packed
    report {blob} NOT NULL,                   -- packed
    in_force INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (session, number)
);
