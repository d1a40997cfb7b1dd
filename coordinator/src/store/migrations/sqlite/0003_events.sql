-- Who did it from where, and to which run or host: `drumsctl events` asks for these.
ALTER TABLE audit ADD COLUMN peer TEXT NOT NULL DEFAULT '';
ALTER TABLE audit ADD COLUMN run  TEXT;
ALTER TABLE audit ADD COLUMN host TEXT;
CREATE INDEX audit_run  ON audit (run, number)  WHERE run IS NOT NULL;
CREATE INDEX audit_host ON audit (host, number) WHERE host IS NOT NULL;
