-- From layout 4 to layout 5. A line that begins with the name of a driver is for this driver only.
ALTER TABLE sessions ADD COLUMN note TEXT NOT NULL DEFAULT '';        -- by a person
{sqlite} CREATE VIRTUAL TABLE texts USING fts5 (words, tokenize = "ascii tokenchars '_'",
{sqlite}     detail = none, columnsize = 0, prefix = 3);
{sqlite} CREATE TRIGGER texts_deleted AFTER DELETE ON sessions
{sqlite}     BEGIN DELETE FROM texts WHERE rowid IN (OLD.place, OLD.sample - OLD.place); END;
{postgresql} CREATE TABLE texts (rowid BIGINT PRIMARY KEY, words TEXT NOT NULL);
{postgresql} CREATE INDEX texts_by_word ON texts
{postgresql}     USING gin (array_to_tsvector(string_to_array(words, ' ')));
-- Such an index is only read by a bitmap scan, which the settings of connections disable.
{postgresql} CREATE FUNCTION matching_texts(q TEXT) RETURNS SETOF BIGINT LANGUAGE sql STABLE
{postgresql}     SET enable_bitmapscan = on AS $$ SELECT rowid FROM texts
{postgresql}     WHERE array_to_tsvector(string_to_array(words, ' '))
{postgresql}         @@ CAST(replace(replace(q, '*', ':*'), ' ', ' & ') AS tsquery) $$;
{postgresql} CREATE FUNCTION delete_texts() RETURNS TRIGGER LANGUAGE plpgsql AS $$ BEGIN
{postgresql}     DELETE FROM texts WHERE rowid IN (OLD.place, OLD.sample - OLD.place); RETURN NULL; END $$;
{postgresql} CREATE TRIGGER texts_deleted AFTER DELETE ON sessions
{postgresql}     FOR EACH ROW EXECUTE FUNCTION delete_texts();
