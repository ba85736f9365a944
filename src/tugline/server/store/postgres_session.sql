-- Settings of each connection to PostgreSQL.
-- A server that stops within a transaction must not block the others.
SET idle_in_transaction_session_timeout = '10s';
SET statement_timeout = '60s';
-- Every query uses an index; without statistics, as after the first 100,000 tasks, the planner
-- would read and sort whole tables instead.
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SET enable_hashjoin = off;
SET enable_mergejoin = off
