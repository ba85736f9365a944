-- From layout 1 to layout 2.
ALTER TABLE tasks ADD COLUMN retry_s DOUBLE PRECISION NOT NULL DEFAULT 3600;
ALTER TABLE sessions ADD COLUMN outages INTEGER NOT NULL DEFAULT 0;  -- infrastructure failures
ALTER TABLE sessions ADD COLUMN failing_since DOUBLE PRECISION;      -- the first of them
ALTER TABLE sessions ADD COLUMN retry_at DOUBLE PRECISION;           -- not leased before
CREATE INDEX sessions_waiting ON sessions (retry_at) WHERE retry_at IS NOT NULL;
ALTER TABLE nodes ADD COLUMN faults INTEGER NOT NULL DEFAULT 0;      -- failures in a row
ALTER TABLE nodes ADD COLUMN failed_task TEXT NOT NULL DEFAULT '';   -- of the last of them
ALTER TABLE nodes ADD COLUMN fault TEXT NOT NULL DEFAULT '';         -- reason of its quarantine
ALTER TABLE nodes ADD COLUMN blocked_until DOUBLE PRECISION;
