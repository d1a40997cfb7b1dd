//! SQLite: hosts, their tokens and certificates.

use drums_common::{
    clock::Micros,
    digest::Sha256,
    ids::{Generation, HostId, InstallationId},
    machine::HostFacts,
    wire::latest::Upgrade,
};
use rusqlite::{Connection, OptionalExtension as _, Row, params};

use super::{SqliteStore, audit, instances, sql};
use crate::{
    net::ports::{Redemption, TokenRefusal},
    store::{
        AuditRow, CertificateRow, HelloRow, HostRow, Ownership, StoreError,
        shared::{RawHost, TokenRow, host_row, json, proven, read, token_answer},
    },
};

const HOST: &str = "SELECT name, ownership, kind, added_us, released_us, installation, facts, agent_version, agent_sha256, \
                    welcomed_us, generation, upgrade FROM host";

fn raw_host(row: &Row<'_>) -> rusqlite::Result<RawHost> {
    Ok(RawHost {
        name: row.get(0)?,
        ownership: row.get(1)?,
        kind: row.get(2)?,
        added: row.get(3)?,
        released: row.get(4)?,
        installation: row.get(5)?,
        facts: row.get(6)?,
        version: row.get(7)?,
        sha256: row.get(8)?,
        welcomed: row.get(9)?,
        generation: row.get(10)?,
        upgrade: row.get(11)?,
    })
}

pub(super) fn all(c: &Connection) -> Result<Vec<HostRow>, StoreError> {
    let e = sql("list hosts");
    let mut statement = c.prepare_cached(&format!("{HOST} ORDER BY added_us, name")).map_err(&e)?;
    let rows = statement.query_map([], raw_host).map_err(&e)?;
    rows.map(|r| r.map_err(&e).and_then(host_row)).collect()
}

pub(super) fn one(c: &Connection, host: &HostId) -> Result<Option<HostRow>, StoreError> {
    let mut statement = c.prepare_cached(&format!("{HOST} WHERE name = ?1")).map_err(sql("read a host"))?;
    let raw = statement.query_row([host.as_str()], raw_host).optional().map_err(sql("read a host"))?;
    raw.map(host_row).transpose()
}

pub(super) fn add(
    s: &mut SqliteStore,
    host: &HostId,
    kind: &str,
    ownership: Ownership,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let e = sql("add a host");
    let t = s.write("add a host")?;
    let released: Option<Option<i64>> = t
        .query_row("SELECT released_us FROM host WHERE name = ?1", [host.as_str()], |r| r.get(0))
        .optional()
        .map_err(&e)?;
    match released {
        Some(None) => return Err(StoreError::HostExists(host.clone())),
        // Its generation goes on counting: what it was given before its release stays fenced.
        Some(Some(_)) => t.execute(
            "UPDATE host SET released_us = NULL, installation = NULL, facts = NULL, upgrade = NULL, kind = ?2, ownership = ?3, generation = generation + 1 WHERE name = ?1",
            params![host.as_str(), kind, ownership.as_str()],
        ),
        None => t.execute(
            "INSERT INTO host (name, ownership, kind, added_us) VALUES (?1, ?2, ?3, ?4)",
            params![host.as_str(), ownership.as_str(), kind, audit.at.0],
        ),
    }
    .map_err(&e)?;
    audit::add(&t, audit)?;
    t.commit().map_err(&e)
}

pub(super) fn release(s: &mut SqliteStore, host: &HostId, audit: &AuditRow) -> Result<(), StoreError> {
    let e = sql("release a host");
    let t = s.write("release a host")?;
    let changed = t
        .execute(
            "UPDATE host SET released_us = ?2 WHERE name = ?1 AND released_us IS NULL",
            params![host.as_str(), audit.at.0],
        )
        .map_err(&e)?;
    if changed == 0 {
        return Err(StoreError::Missing { what: "host", id: host.to_string() });
    }
    t.execute(
        "UPDATE certificate SET revoked_us = ?2 WHERE host = ?1 AND revoked_us IS NULL",
        params![host.as_str(), audit.at.0],
    )
    .map_err(&e)?;
    // A token that was not used yet would enrol it again.
    t.execute("UPDATE token SET expires_us = min(expires_us, ?2) WHERE host = ?1", params![host.as_str(), audit.at.0])
        .map_err(&e)?;
    audit::add(&t, audit)?;
    t.commit().map_err(&e)
}

pub(super) fn welcomed(
    s: &mut SqliteStore,
    host: &HostId,
    hello: &HelloRow,
    audit: &AuditRow,
) -> Result<Generation, StoreError> {
    let e = sql("record that a host connected");
    let facts = json("host's facts", &hello.facts)?;
    let t = s.write("record that a host connected")?;
    let generation = t
        .prepare_cached(
            "UPDATE host SET installation = ?2, facts = ?3, agent_version = ?4, agent_sha256 = ?5, welcomed_us = ?6 \
             WHERE name = ?1 RETURNING generation",
        )
        .map_err(&e)?
        .query_row(
            params![
                host.as_str(),
                hello.installation.to_string(),
                facts,
                hello.agent_version,
                hello.agent_sha256.to_string(),
                audit.at.0
            ],
            |r| r.get(0),
        )
        .map_err(&e)?;
    t.prepare_cached(
        "UPDATE certificate SET revoked_us = ?3 WHERE host = ?1 AND revoked_us IS NULL \
         AND issued_us < (SELECT issued_us FROM certificate WHERE sha256 = ?2)",
    )
    .map_err(&e)?
    .execute(params![host.as_str(), hello.certificate.to_string(), audit.at.0])
    .map_err(&e)?;
    audit::add(&t, audit)?;
    t.commit().map_err(&e)?;
    Ok(Generation(generation))
}

pub(super) fn set_upgrade(
    s: &mut SqliteStore,
    host: &HostId,
    upgrade: Option<&Upgrade>,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let e = sql("order a build for a host");
    let upgrade = upgrade.map(|u| json("host's upgrade", u)).transpose()?;
    let t = s.write("order a build for a host")?;
    let changed = t
        .execute(
            "UPDATE host SET upgrade = ?2 WHERE name = ?1 AND released_us IS NULL",
            params![host.as_str(), upgrade],
        )
        .map_err(&e)?;
    if changed == 0 {
        return Err(StoreError::Missing { what: "host", id: host.to_string() });
    }
    audit::add(&t, audit)?;
    t.commit().map_err(&e)
}

pub(super) fn set_facts(
    s: &mut SqliteStore,
    host: &HostId,
    installation: InstallationId,
    facts: &HostFacts,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let e = sql("store a host's facts");
    let facts = json("host's facts", facts)?;
    let t = s.write("store a host's facts")?;
    let changed = t
        .execute(
            "UPDATE host SET facts = ?3 WHERE name = ?1 AND installation = ?2",
            params![host.as_str(), installation.to_string(), facts],
        )
        .map_err(&e)?;
    if changed == 1 {
        audit::add(&t, audit)?;
    }
    t.commit().map_err(&e)
}

pub(super) fn next_generation(s: &mut SqliteStore, host: &HostId, audit: &AuditRow) -> Result<Generation, StoreError> {
    let e = sql("count a host's generation");
    let t = s.write("count a host's generation")?;
    let generation = t
        .query_row(
            "UPDATE host SET generation = generation + 1 WHERE name = ?1 RETURNING generation",
            [host.as_str()],
            |r| r.get(0),
        )
        .map_err(&e)?;
    audit::add(&t, audit)?;
    t.commit().map_err(&e)?;
    Ok(Generation(generation))
}

pub(super) fn add_token(
    s: &mut SqliteStore,
    secret: Sha256,
    host: &HostId,
    expires: Micros,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let e = sql("store a token");
    let t = s.write("store a token")?;
    t.execute(
        "INSERT INTO token (secret_sha256, host, issued_us, expires_us) VALUES (?1, ?2, ?3, ?4)",
        params![secret.to_string(), host.as_str(), audit.at.0, expires.0],
    )
    .map_err(&e)?;
    audit::add(&t, audit)?;
    t.commit().map_err(&e)
}

pub(super) fn redeem(
    s: &mut SqliteStore,
    r: &Redemption,
    audit: &AuditRow,
) -> Result<Result<(), TokenRefusal>, StoreError> {
    let e = sql("use a token");
    let t = s.write("use a token")?;
    let found = t
        .query_row(
            "SELECT token.host, expires_us, key_sha256, released_us, token.launch FROM token JOIN host ON host.name = token.host WHERE secret_sha256 = ?1",
            [r.secret_sha256.to_string()],
            |row| {
                let token = TokenRow { host: row.get(0)?, expires: row.get(1)?, key: row.get(2)?, released: row.get(3)?, launched: None };
                Ok((token, row.get::<_, Option<String>>(4)?))
            },
        )
        .optional()
        .map_err(&e)?;
    let found = match found {
        Some((token, Some(launch))) => Some(TokenRow { launched: instances::one(&t, &launch)?, ..token }),
        Some((token, None)) => Some(token),
        None => None,
    };
    if let Some(answer) = token_answer(found, r)? {
        return Ok(answer);
    }
    t.execute(
        "UPDATE token SET used_us = ?2, key_sha256 = ?3, installation = ?4 WHERE secret_sha256 = ?1",
        params![r.secret_sha256.to_string(), r.now.0, r.key_sha256.to_string(), r.installation.to_string()],
    )
    .map_err(&e)?;
    if let Some(proven) = proven(r) {
        instances::proved(&t, proven, &r.host)?;
    }
    audit::add(&t, audit)?;
    t.commit().map_err(&e)?;
    Ok(Ok(()))
}

pub(super) fn add_certificate(s: &mut SqliteStore, row: &CertificateRow, audit: &AuditRow) -> Result<bool, StoreError> {
    let e = sql("record a certificate");
    let (host, installation) = (row.host.as_str(), row.installation.to_string());
    let t = s.write("record a certificate")?;
    t.execute(
        "INSERT OR IGNORE INTO certificate (sha256, host, installation, issued_us, expires_us) VALUES (?1, ?2, ?3, ?4, ?5)",
        params![row.sha256.to_string(), host, installation, audit.at.0, row.expires.0],
    )
    .map_err(&e)?;
    let moved = t
        .execute(
            "UPDATE host SET facts = NULL, generation = generation + 1 WHERE name = ?1 AND installation != ?2",
            params![host, installation],
        )
        .map_err(&e)?
        > 0;
    if moved {
        t.execute(
            "UPDATE certificate SET revoked_us = ?3 WHERE host = ?1 AND installation != ?2 AND revoked_us IS NULL",
            params![host, installation, audit.at.0],
        )
        .map_err(&e)?;
    }
    t.execute("UPDATE host SET installation = ?2 WHERE name = ?1", params![host, installation]).map_err(&e)?;
    audit::add(&t, audit)?;
    t.commit().map_err(&e)?;
    Ok(moved)
}

pub(super) fn certificate(c: &Connection, sha256: Sha256) -> Result<Option<CertificateRow>, StoreError> {
    let e = sql("read a certificate");
    let mut statement = c
        .prepare_cached("SELECT host, installation, expires_us, revoked_us FROM certificate WHERE sha256 = ?1")
        .map_err(&e)?;
    let raw: Option<(String, String, i64, Option<i64>)> = statement
        .query_row([sha256.to_string()], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))
        .optional()
        .map_err(&e)?;
    let Some((host, installation, expires, revoked)) = raw else { return Ok(None) };
    Ok(Some(CertificateRow {
        sha256,
        host: read("host name", &host)?,
        installation: read("installation id", &installation)?,
        expires: Micros(expires),
        revoked: revoked.map(Micros),
    }))
}
