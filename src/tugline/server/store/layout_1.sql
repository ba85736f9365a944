-- From an empty store to layout 1. {blob} is the driver's column type of bytes.
CREATE TABLE positions (name TEXT PRIMARY KEY, at BIGINT NOT NULL);
INSERT INTO positions VALUES
    ('events', 0), ('places', 0),
    ('tasks', 0), ('released', 0), ('sessions', 0),                       -- ever created
    ('completed', 0), ('failed', 0), ('timed_out', 0), ('cancelled', 0);  -- by final status
CREATE TABLE control (
    id INTEGER PRIMARY KEY, generation BIGINT NOT NULL, paused TEXT, version BIGINT NOT NULL
);
INSERT INTO control VALUES (1, 0, NULL, 0);
CREATE TABLE tenants (
    name TEXT PRIMARY KEY,
    weight DOUBLE PRECISION NOT NULL,         -- no longer read: it is a setting
    pass DOUBLE PRECISION NOT NULL            -- sessions leased so far, divided by the weight
);
CREATE TABLE tasks (
    id TEXT PRIMARY KEY,
    place BIGINT NOT NULL UNIQUE,             -- order of submission
    tenant TEXT NOT NULL,
    priority INTEGER NOT NULL,
    body {blob} NOT NULL,                     -- the Task, packed
    digest TEXT NOT NULL,
    samples INTEGER NOT NULL,
    min_usable INTEGER,
    deadline DOUBLE PRECISION,                -- Unix seconds
    attempts INTEGER NOT NULL,
    max_staleness INTEGER,
    on_stale TEXT NOT NULL,
    callback TEXT,                            -- its URL
    usable INTEGER NOT NULL DEFAULT 0,
    ended INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '',
    released BIGINT,                          -- position
    home TEXT,                                -- preferred node of its samples
    tags TEXT NOT NULL,                       -- JSON
    created DOUBLE PRECISION NOT NULL
);
CREATE INDEX tasks_released ON tasks (released) WHERE released IS NOT NULL;
CREATE INDEX tasks_open ON tasks (place) WHERE released IS NULL;
CREATE INDEX tasks_of_tenant ON tasks (tenant, place);
CREATE INDEX tasks_due ON tasks (deadline)
    WHERE released IS NULL AND deadline IS NOT NULL AND reason = '';
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    place BIGINT NOT NULL UNIQUE,
    task TEXT NOT NULL REFERENCES tasks (id),
    tenant TEXT NOT NULL,
    sample INTEGER NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0,
    faults INTEGER NOT NULL DEFAULT 0,        -- failures of the harness so far
    epoch INTEGER NOT NULL DEFAULT 0,
    status TEXT NOT NULL,
    turn DOUBLE PRECISION NOT NULL,           -- place in its tenant's queue, Unix seconds
    node TEXT,                                -- holder of the lease
    version BIGINT NOT NULL DEFAULT 0,        -- weights when it was leased
    stop TEXT,                                -- reason of a requested stop, while it runs
    stop_by TEXT NOT NULL DEFAULT '',
    stop_at DOUBLE PRECISION,                 -- time of the request to stop
    usable INTEGER NOT NULL DEFAULT 0,        -- 1 once it has a reward
    avoid TEXT,                               -- node where the last attempt failed
    created DOUBLE PRECISION NOT NULL,
    updated DOUBLE PRECISION NOT NULL
);
CREATE INDEX sessions_queued ON sessions (tenant, turn, place) WHERE status = 'queued';
CREATE INDEX sessions_of_task ON sessions (task, sample);
CREATE INDEX sessions_of_node ON sessions (node) WHERE node IS NOT NULL;
CREATE INDEX sessions_stopping ON sessions (stop_at) WHERE stop IS NOT NULL;
CREATE INDEX sessions_by_status ON sessions (status, place);
CREATE TABLE nodes (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    token TEXT NOT NULL,                      -- SHA-256 of it, hex
    registration {blob} NOT NULL,
    state TEXT NOT NULL,
    registered DOUBLE PRECISION NOT NULL,
    deadline DOUBLE PRECISION NOT NULL,       -- when its lease ends
    applied BIGINT NOT NULL DEFAULT 0
);
CREATE INDEX nodes_alive ON nodes (deadline) WHERE state <> 'gone';
CREATE TABLE results (
    position BIGINT PRIMARY KEY,
    session TEXT NOT NULL UNIQUE REFERENCES sessions (id),
    task TEXT NOT NULL,
    digest TEXT NOT NULL,
    blob TEXT NOT NULL,                       -- name of the blob; empty: it never ran
    view {blob} NOT NULL                      -- the ResultView, packed
);
CREATE INDEX results_of_task ON results (task, position);
CREATE TABLE events (
    position BIGINT PRIMARY KEY,
    kind TEXT NOT NULL,
    task TEXT,
    session TEXT,
    node TEXT,
    detail TEXT NOT NULL,                     -- JSON
    created DOUBLE PRECISION NOT NULL
);
CREATE INDEX events_of_task ON events (task, position) WHERE task IS NOT NULL;
CREATE TABLE consumers (
    name TEXT PRIMARY KEY, acked BIGINT NOT NULL, updated DOUBLE PRECISION NOT NULL
);
CREATE TABLE outbox (
    id BIGINT PRIMARY KEY,                    -- position of its event
    task TEXT NOT NULL,
    kind TEXT NOT NULL,
    url TEXT NOT NULL,
    host TEXT NOT NULL,                       -- of the URL, with its port
    state TEXT NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,
    next_try DOUBLE PRECISION NOT NULL,
    error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX outbox_due ON outbox (host, next_try) WHERE state = 'pending';
CREATE INDEX outbox_dead ON outbox (id) WHERE state = 'dead';
