-- From layout 3 to layout 4.
CREATE TABLE run_steps (
    run TEXT NOT NULL,                        -- of a trainer
    step INTEGER NOT NULL,
    figures TEXT NOT NULL,                    -- JSON, name to number
    notes TEXT NOT NULL,                      -- JSON, name to text
    updated DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (run, step)
);
