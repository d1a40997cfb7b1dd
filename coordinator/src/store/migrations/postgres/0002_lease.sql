-- Which coordinator may write: one row. Its epoch is its key, so that a writer's KEY SHARE lock holds a take-over back
-- until its transaction ends, and does not hold back a renewal, which changes no key. Times are the server's.
CREATE TABLE lease (
  epoch      BIGINT PRIMARY KEY,
  node       TEXT NOT NULL,
  name       TEXT NOT NULL,
  taken_us   BIGINT NOT NULL,
  expires_us BIGINT NOT NULL,
  only_one   BOOLEAN NOT NULL DEFAULT true UNIQUE CHECK (only_one)
);
INSERT INTO lease (epoch, node, name, taken_us, expires_us) VALUES (0, '', '', 0, 0);
CREATE TRIGGER lease_stays BEFORE DELETE OR TRUNCATE ON lease EXECUTE FUNCTION stays();

CREATE FUNCTION now_us() RETURNS bigint LANGUAGE sql VOLATILE AS
  $$ SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint $$;
