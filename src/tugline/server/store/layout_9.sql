-- From layout 8 to layout 9.
ALTER TABLE sessions ADD COLUMN leased_at DOUBLE PRECISION NOT NULL DEFAULT 0;
ALTER TABLE sessions ADD COLUMN other_s DOUBLE PRECISION NOT NULL DEFAULT 0;  -- of earlier attempts
