-- What a launch is to have made, before there is anything; and, once it was made and read back, which instance it is. Its
-- row is written with the token that goes into its user data.
CREATE TABLE launched_instance (
  launch          TEXT COLLATE "C" PRIMARY KEY,
  account         TEXT COLLATE "C" NOT NULL,
  region          TEXT COLLATE "C" NOT NULL,
  image           TEXT COLLATE "C" NOT NULL,
  kind            TEXT COLLATE "C" NOT NULL,
  -- EC2's id and launch time, as they were read back.
  instance        TEXT COLLATE "C",
  started_us      BIGINT,
  -- Who proved to be it, and the document that was shown.
  host            TEXT COLLATE "C" REFERENCES host (name),
  document_sha256 TEXT COLLATE "C",
  CHECK ((instance IS NULL) = (started_us IS NULL)),
  CHECK ((host IS NULL) = (document_sha256 IS NULL)),
  CHECK (host IS NULL OR instance IS NOT NULL),
  UNIQUE (account, region, instance)
);
CREATE INDEX launched_instance_document ON launched_instance (document_sha256);
ALTER TABLE token ADD COLUMN launch TEXT COLLATE "C" REFERENCES launched_instance (launch);
CREATE TRIGGER launched_instance_stays BEFORE DELETE OR TRUNCATE ON launched_instance EXECUTE FUNCTION stays();
-- Nobody makes a token of a launch one that anybody may use, nor a launch one of another instance.
CREATE TRIGGER token_bound BEFORE UPDATE ON token FOR EACH ROW
  WHEN (NEW.launch IS DISTINCT FROM OLD.launch) EXECUTE FUNCTION stays();
CREATE TRIGGER launched_instance_fixed BEFORE UPDATE ON launched_instance FOR EACH ROW
  WHEN (NEW.launch != OLD.launch OR NEW.account != OLD.account OR NEW.region != OLD.region OR NEW.image != OLD.image
    OR NEW.kind != OLD.kind OR (OLD.instance IS NOT NULL AND NEW.instance IS DISTINCT FROM OLD.instance)
    OR (OLD.host IS NOT NULL AND NEW.host IS DISTINCT FROM OLD.host))
  EXECUTE FUNCTION stays();
