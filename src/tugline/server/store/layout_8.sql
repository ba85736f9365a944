-- From layout 7 to layout 8.
-- What runs are compared by. `_fill_sessions` reads it from the tasks and results of layout 7.
ALTER TABLE sessions ADD COLUMN problem TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN held_out INTEGER NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN reward DOUBLE PRECISION;
ALTER TABLE sessions ADD COLUMN seconds DOUBLE PRECISION;             -- of all stages
ALTER TABLE sessions ADD COLUMN queued_s DOUBLE PRECISION NOT NULL DEFAULT 0;  -- of all attempts
-- Sums over results, from which they are read without reading results.
CREATE TABLE time_spent (
    run TEXT NOT NULL,                        -- empty: none
    version BIGINT NOT NULL,                  -- -1: of results of older releases
    minute BIGINT NOT NULL,                   -- of the result: Unix seconds / 60
    sessions BIGINT NOT NULL,
    waiting_s DOUBLE PRECISION NOT NULL,
    sandbox_s DOUBLE PRECISION NOT NULL,
    engine_s DOUBLE PRECISION NOT NULL,
    agent_s DOUBLE PRECISION NOT NULL,
    unsplit_s DOUBLE PRECISION NOT NULL,
    evaluation_s DOUBLE PRECISION NOT NULL,
    other_s DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (run, version, minute)
);
INSERT INTO time_spent SELECT COALESCE(run, ''), -1, 0, COUNT(*), 0, 0, 0, 0, 0, 0, 0
    FROM results WHERE blob <> '' GROUP BY COALESCE(run, '');
-- Load of nodes and engines: means over `width` seconds from `at` on.
CREATE TABLE telemetry (
    node TEXT NOT NULL,                       -- name
    engine TEXT NOT NULL,                     -- URL; empty: of the node
    width INTEGER NOT NULL,
    at BIGINT NOT NULL,                       -- Unix seconds
    cpu DOUBLE PRECISION,
    memory DOUBLE PRECISION,
    sessions DOUBLE PRECISION,
    agents DOUBLE PRECISION,
    running DOUBLE PRECISION,
    waiting DOUBLE PRECISION,
    kv DOUBLE PRECISION,
    prompt_tps DOUBLE PRECISION,
    sampled_tps DOUBLE PRECISION,
    PRIMARY KEY (node, engine, width, at)
);
CREATE INDEX telemetry_by_time ON telemetry (at);
