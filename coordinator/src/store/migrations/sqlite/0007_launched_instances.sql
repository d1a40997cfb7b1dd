-- What a launch is to have made, before there is anything; and, once it was made and read back, which instance it is. Its
-- row is written with the token that goes into its user data.
CREATE TABLE launched_instance (
  launch          TEXT PRIMARY KEY,
  account         TEXT NOT NULL,
  region          TEXT NOT NULL,
  image           TEXT NOT NULL,
  kind            TEXT NOT NULL,
  -- EC2's id and launch time, as they were read back.
  instance        TEXT,
  started_us      INTEGER,
  -- Who proved to be it, and the document that was shown.
  host            TEXT REFERENCES host (name),
  document_sha256 TEXT,
  CHECK ((instance IS NULL) = (started_us IS NULL)),
  CHECK ((host IS NULL) = (document_sha256 IS NULL)),
  CHECK (host IS NULL OR instance IS NOT NULL),
  UNIQUE (account, region, instance)
) STRICT;
CREATE INDEX launched_instance_document ON launched_instance (document_sha256);
ALTER TABLE token ADD COLUMN launch TEXT REFERENCES launched_instance (launch);
CREATE TRIGGER launched_instance_stays BEFORE DELETE ON launched_instance BEGIN SELECT RAISE(ABORT, 'launched instances are never deleted'); END;
-- Nobody makes a token of a launch one that anybody may use, nor a launch one of another instance.
CREATE TRIGGER token_bound BEFORE UPDATE ON token WHEN NEW.launch IS NOT OLD.launch
  BEGIN SELECT RAISE(ABORT, 'what a token is bound to is never changed'); END;
CREATE TRIGGER launched_instance_fixed BEFORE UPDATE ON launched_instance
  WHEN NEW.launch != OLD.launch OR NEW.account != OLD.account OR NEW.region != OLD.region OR NEW.image != OLD.image
    OR NEW.kind != OLD.kind OR (OLD.instance NOT NULL AND NEW.instance IS NOT OLD.instance)
    OR (OLD.host NOT NULL AND NEW.host IS NOT OLD.host)
  BEGIN SELECT RAISE(ABORT, 'what was launched is never changed'); END;
