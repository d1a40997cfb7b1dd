-- Times are microseconds since 1970, UTC. Digests are lower-case hexadecimal.

CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT;

CREATE TABLE host (
  name          TEXT PRIMARY KEY,
  ownership     TEXT NOT NULL CHECK (ownership IN ('adopted', 'owned')),
  kind          TEXT NOT NULL,
  added_us      INTEGER NOT NULL,
  released_us   INTEGER,
  installation  TEXT,
  facts         TEXT,
  agent_version TEXT,
  agent_sha256  TEXT,
  welcomed_us   INTEGER,
  generation    INTEGER NOT NULL DEFAULT 1
) STRICT;

CREATE TABLE token (
  secret_sha256 TEXT PRIMARY KEY,
  host          TEXT NOT NULL REFERENCES host (name),
  issued_us     INTEGER NOT NULL,
  expires_us    INTEGER NOT NULL,
  used_us       INTEGER,
  key_sha256    TEXT,
  installation  TEXT
) STRICT;

CREATE TABLE certificate (
  sha256       TEXT PRIMARY KEY,
  host         TEXT NOT NULL REFERENCES host (name),
  installation TEXT NOT NULL,
  issued_us    INTEGER NOT NULL,
  expires_us   INTEGER NOT NULL,
  revoked_us   INTEGER
) STRICT;

CREATE TABLE workload (
  sha256   TEXT PRIMARY KEY,
  name     TEXT NOT NULL,
  bytes    INTEGER NOT NULL,
  files    INTEGER NOT NULL,
  added_us INTEGER NOT NULL
) STRICT;

CREATE TABLE registration (
  number        INTEGER PRIMARY KEY AUTOINCREMENT,
  sha256        TEXT NOT NULL UNIQUE,
  experiment    TEXT NOT NULL,
  canonical     TEXT NOT NULL,
  spec          TEXT NOT NULL,
  registered_us INTEGER NOT NULL
) STRICT;
CREATE INDEX registration_experiment ON registration (experiment, number);

CREATE TABLE run (
  id           TEXT PRIMARY KEY,
  registration TEXT NOT NULL REFERENCES registration (sha256),
  number       INTEGER NOT NULL,
  created_us   INTEGER NOT NULL,
  phase        TEXT NOT NULL,
  verdict      TEXT,
  state        TEXT NOT NULL,
  generation   INTEGER NOT NULL,
  UNIQUE (registration, number)
) STRICT;

CREATE TABLE run_event (
  run    TEXT NOT NULL REFERENCES run (id),
  number INTEGER NOT NULL,
  at_us  INTEGER NOT NULL,
  kind   TEXT NOT NULL,
  host   TEXT,
  text   TEXT NOT NULL,
  PRIMARY KEY (run, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE evidence (
  run         TEXT NOT NULL REFERENCES run (id),
  host        TEXT NOT NULL REFERENCES host (name),
  seq         INTEGER NOT NULL CHECK (seq > 0),
  received_us INTEGER NOT NULL,
  late        INTEGER NOT NULL CHECK (late IN (0, 1)),
  record      TEXT NOT NULL,
  PRIMARY KEY (run, host, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE audit (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  at_us  INTEGER NOT NULL,
  actor  TEXT NOT NULL,
  action TEXT NOT NULL,
  detail TEXT NOT NULL
) STRICT;

-- Nothing is ever deleted, and what was observed or registered is never changed.
CREATE TRIGGER host_stays         BEFORE DELETE ON host         BEGIN SELECT RAISE(ABORT, 'hosts are never deleted'); END;
CREATE TRIGGER token_stays        BEFORE DELETE ON token        BEGIN SELECT RAISE(ABORT, 'tokens are never deleted'); END;
CREATE TRIGGER certificate_stays  BEFORE DELETE ON certificate  BEGIN SELECT RAISE(ABORT, 'certificates are never deleted'); END;
CREATE TRIGGER workload_stays     BEFORE DELETE ON workload     BEGIN SELECT RAISE(ABORT, 'workloads are never deleted'); END;
CREATE TRIGGER registration_stays BEFORE DELETE ON registration BEGIN SELECT RAISE(ABORT, 'registrations are never deleted'); END;
CREATE TRIGGER run_stays          BEFORE DELETE ON run          BEGIN SELECT RAISE(ABORT, 'runs are never deleted'); END;
CREATE TRIGGER run_event_stays    BEFORE DELETE ON run_event    BEGIN SELECT RAISE(ABORT, 'events are never deleted'); END;
CREATE TRIGGER evidence_stays     BEFORE DELETE ON evidence     BEGIN SELECT RAISE(ABORT, 'evidence is never deleted'); END;
CREATE TRIGGER audit_stays        BEFORE DELETE ON audit        BEGIN SELECT RAISE(ABORT, 'audit entries are never deleted'); END;
CREATE TRIGGER workload_fixed     BEFORE UPDATE ON workload     BEGIN SELECT RAISE(ABORT, 'workloads are never changed'); END;
CREATE TRIGGER registration_fixed BEFORE UPDATE ON registration BEGIN SELECT RAISE(ABORT, 'registrations are never changed'); END;
CREATE TRIGGER run_event_fixed    BEFORE UPDATE ON run_event    BEGIN SELECT RAISE(ABORT, 'events are never changed'); END;
CREATE TRIGGER evidence_fixed     BEFORE UPDATE ON evidence     BEGIN SELECT RAISE(ABORT, 'evidence is never changed'); END;
CREATE TRIGGER audit_fixed        BEFORE UPDATE ON audit        BEGIN SELECT RAISE(ABORT, 'audit entries are never changed'); END;
