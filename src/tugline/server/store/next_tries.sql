-- The next try for each host with a pending delivery, with one index lookup per host.
WITH RECURSIVE waiting (host) AS (
  SELECT MIN(host) FROM outbox WHERE state = 'pending'
  UNION ALL
  SELECT (SELECT MIN(host) FROM outbox WHERE state = 'pending' AND host > waiting.host)
  FROM waiting WHERE waiting.host IS NOT NULL
)
SELECT host, (SELECT MIN(next_try) FROM outbox WHERE state = 'pending' AND host = waiting.host)
FROM waiting WHERE host IS NOT NULL
