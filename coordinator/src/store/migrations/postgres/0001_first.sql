-- Times are microseconds since 1970, UTC. Digests are lower-case hexadecimal. Names compare by their bytes.

CREATE TABLE meta (
  key   TEXT COLLATE "C" PRIMARY KEY,
  value TEXT NOT NULL
);

CREATE TABLE host (
  name          TEXT COLLATE "C" PRIMARY KEY,
  ownership     TEXT NOT NULL CHECK (ownership IN ('adopted', 'owned')),
  kind          TEXT NOT NULL,
  added_us      BIGINT NOT NULL,
  released_us   BIGINT,
  installation  TEXT,
  facts         TEXT,
  agent_version TEXT,
  agent_sha256  TEXT,
  welcomed_us   BIGINT,
  generation    BIGINT NOT NULL DEFAULT 1
);

CREATE TABLE token (
  secret_sha256 TEXT COLLATE "C" PRIMARY KEY,
  host          TEXT COLLATE "C" NOT NULL REFERENCES host (name),
  issued_us     BIGINT NOT NULL,
  expires_us    BIGINT NOT NULL,
  used_us       BIGINT,
  key_sha256    TEXT,
  installation  TEXT
);

CREATE TABLE certificate (
  sha256       TEXT COLLATE "C" PRIMARY KEY,
  host         TEXT COLLATE "C" NOT NULL REFERENCES host (name),
  installation TEXT NOT NULL,
  issued_us    BIGINT NOT NULL,
  expires_us   BIGINT NOT NULL,
  revoked_us   BIGINT
);

CREATE TABLE workload (
  number   BIGINT GENERATED ALWAYS AS IDENTITY,
  sha256   TEXT COLLATE "C" PRIMARY KEY,
  name     TEXT NOT NULL,
  bytes    BIGINT NOT NULL,
  files    BIGINT NOT NULL,
  added_us BIGINT NOT NULL
);

CREATE TABLE registration (
  number        BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  sha256        TEXT COLLATE "C" NOT NULL UNIQUE,
  experiment    TEXT COLLATE "C" NOT NULL,
  canonical     TEXT NOT NULL,
  spec          TEXT NOT NULL,
  registered_us BIGINT NOT NULL
);
CREATE INDEX registration_experiment ON registration (experiment, number);

CREATE TABLE run (
  id           TEXT COLLATE "C" PRIMARY KEY,
  registration TEXT COLLATE "C" NOT NULL REFERENCES registration (sha256),
  number       BIGINT NOT NULL,
  created_us   BIGINT NOT NULL,
  phase        TEXT NOT NULL,
  verdict      TEXT,
  state        TEXT NOT NULL,
  generation   BIGINT NOT NULL,
  UNIQUE (registration, number)
);

CREATE TABLE run_event (
  run    TEXT COLLATE "C" NOT NULL REFERENCES run (id),
  number BIGINT NOT NULL,
  at_us  BIGINT NOT NULL,
  kind   TEXT NOT NULL,
  host   TEXT,
  text   TEXT NOT NULL,
  PRIMARY KEY (run, number)
);

CREATE TABLE evidence (
  run         TEXT COLLATE "C" NOT NULL REFERENCES run (id),
  host        TEXT COLLATE "C" NOT NULL REFERENCES host (name),
  seq         BIGINT NOT NULL CHECK (seq > 0),
  received_us BIGINT NOT NULL,
  late        BOOLEAN NOT NULL,
  record      TEXT NOT NULL,
  PRIMARY KEY (run, host, seq)
);

CREATE TABLE audit (
  number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  at_us  BIGINT NOT NULL,
  actor  TEXT NOT NULL,
  peer   TEXT NOT NULL,
  action TEXT NOT NULL,
  run    TEXT COLLATE "C",
  host   TEXT COLLATE "C",
  detail TEXT NOT NULL
);
CREATE INDEX audit_run  ON audit (run, number)  WHERE run IS NOT NULL;
CREATE INDEX audit_host ON audit (host, number) WHERE host IS NOT NULL;

-- Nothing is ever deleted, and what was observed or registered is never changed.
CREATE FUNCTION stays() RETURNS trigger LANGUAGE plpgsql AS
  $$ BEGIN RAISE EXCEPTION 'rows of % are never % here', TG_TABLE_NAME, lower(TG_OP) || 'd'; END $$;
CREATE TRIGGER host_stays         BEFORE DELETE OR TRUNCATE ON host         EXECUTE FUNCTION stays();
CREATE TRIGGER token_stays        BEFORE DELETE OR TRUNCATE ON token        EXECUTE FUNCTION stays();
CREATE TRIGGER certificate_stays  BEFORE DELETE OR TRUNCATE ON certificate  EXECUTE FUNCTION stays();
CREATE TRIGGER run_stays          BEFORE DELETE OR TRUNCATE ON run          EXECUTE FUNCTION stays();
CREATE TRIGGER workload_fixed     BEFORE DELETE OR TRUNCATE OR UPDATE ON workload     EXECUTE FUNCTION stays();
CREATE TRIGGER registration_fixed BEFORE DELETE OR TRUNCATE OR UPDATE ON registration EXECUTE FUNCTION stays();
CREATE TRIGGER run_event_fixed    BEFORE DELETE OR TRUNCATE OR UPDATE ON run_event    EXECUTE FUNCTION stays();
CREATE TRIGGER evidence_fixed     BEFORE DELETE OR TRUNCATE OR UPDATE ON evidence     EXECUTE FUNCTION stays();
CREATE TRIGGER audit_fixed        BEFORE DELETE OR TRUNCATE OR UPDATE ON audit        EXECUTE FUNCTION stays();
