-- Certificates of people. One that was revoked stays, and stays revoked.

CREATE TABLE person (
  number      INTEGER PRIMARY KEY AUTOINCREMENT,
  certificate TEXT NOT NULL UNIQUE,
  name        TEXT NOT NULL,
  role        TEXT NOT NULL CHECK (role IN ('operator', 'viewer')),
  issued_us   INTEGER NOT NULL,
  expires_us  INTEGER NOT NULL,
  revoked_us  INTEGER
) STRICT;
CREATE INDEX person_name ON person (name);
