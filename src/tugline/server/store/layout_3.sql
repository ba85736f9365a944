-- From layout 2 to layout 3.
ALTER TABLE nodes ADD COLUMN spared INTEGER NOT NULL DEFAULT 0;      -- since it last renewed
ALTER TABLE control ADD COLUMN joined_by TEXT NOT NULL DEFAULT '';   -- digest of the join token
