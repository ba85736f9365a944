-- From layout 5 to layout 6.
CREATE INDEX sessions_by_change ON sessions (updated) WHERE status <> 'queued';
-- An index for each kind of text: a search reads one kind. Every search reads the list of pending
-- texts of an index, so its size is limited. "+ 0" keeps the planner from the primary key, by which
-- it would read every text.
{postgresql} DROP INDEX texts_by_word;
{postgresql} CREATE INDEX texts_of_tasks ON texts
{postgresql}     USING gin (array_to_tsvector(string_to_array(words, ' ')))
{postgresql}     WITH (gin_pending_list_limit = 256) WHERE rowid + 0 < 0;
{postgresql} CREATE INDEX texts_of_sessions ON texts
{postgresql}     USING gin (array_to_tsvector(string_to_array(words, ' ')))
{postgresql}     WITH (gin_pending_list_limit = 256) WHERE rowid + 0 > 0;
{postgresql} DROP FUNCTION matching_texts(TEXT);
{postgresql} CREATE FUNCTION matching_texts(q TEXT, of_tasks BOOLEAN) RETURNS SETOF BIGINT
{postgresql}     LANGUAGE sql STABLE SET enable_bitmapscan = on AS $$
{postgresql}     SELECT rowid FROM texts WHERE of_tasks AND rowid + 0 < 0
{postgresql}         AND array_to_tsvector(string_to_array(words, ' '))
{postgresql}         @@ CAST(replace(replace(q, '*', ':*'), ' ', ' & ') AS tsquery)
{postgresql}     UNION ALL SELECT rowid FROM texts WHERE NOT of_tasks AND rowid + 0 > 0
{postgresql}         AND array_to_tsvector(string_to_array(words, ' '))
{postgresql}         @@ CAST(replace(replace(q, '*', ':*'), ' ', ' & ') AS tsquery) $$;
