-- The earliest deadline of each kind; for stopping sessions, `stop_at` plus a lease.
SELECT
  (SELECT MIN(deadline) FROM nodes WHERE state <> 'gone'),
  (SELECT MIN(deadline) FROM tasks
    WHERE released IS NULL AND deadline IS NOT NULL AND reason = ''),
  (SELECT MIN(stop_at) + :lease_s FROM sessions WHERE stop IS NOT NULL),
  (SELECT MIN(retry_at) FROM sessions WHERE retry_at IS NOT NULL),
  (SELECT MIN(blocked_until) FROM nodes WHERE blocked_until IS NOT NULL)
