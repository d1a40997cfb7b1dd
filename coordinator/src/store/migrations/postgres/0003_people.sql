-- Certificates of people. One that was revoked stays, and stays revoked.
CREATE TABLE person (
  number      BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  certificate TEXT COLLATE "C" NOT NULL UNIQUE,
  name        TEXT COLLATE "C" NOT NULL,
  role        TEXT NOT NULL CHECK (role IN ('operator', 'viewer')),
  issued_us   BIGINT NOT NULL,
  expires_us  BIGINT NOT NULL,
  revoked_us  BIGINT
);
CREATE INDEX person_name ON person (name);
CREATE TRIGGER person_stays BEFORE DELETE OR TRUNCATE ON person EXECUTE FUNCTION stays();
