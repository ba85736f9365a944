-- Settings of the transaction that migrates PostgreSQL, instead of those of its connection.
SET LOCAL statement_timeout = 0;
SET LOCAL enable_seqscan TO DEFAULT;
SET LOCAL enable_bitmapscan TO DEFAULT;
SET LOCAL enable_hashjoin TO DEFAULT;
SET LOCAL enable_mergejoin TO DEFAULT
