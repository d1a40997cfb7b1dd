//! PostgreSQL: hosts, their tokens and certificates.

use drums_common::{
    clock::Micros,
    digest::Sha256,
    ids::{Generation, HostId, InstallationId},
    machine::HostFacts,
    wire::latest::Upgrade,
};
use tokio_postgres::Row;

use super::{PostgresStore, audit, instances};
use crate::{
    net::ports::{Redemption, TokenRefusal},
    store::{
        AuditRow, CertificateRow, HelloRow, HostRow, Ownership, StoreError,
        shared::{RawHost, TokenRow, generation, host_row, json, proven, read, token_answer},
    },
};

macro_rules! host {
    ($rest:literal) => {
        concat!(
            "SELECT name, ownership, kind, added_us, released_us, installation, facts, agent_version, agent_sha256, ",
            "welcomed_us, generation, upgrade FROM host ",
            $rest
        )
    };
}

fn raw(r: &Row) -> Result<HostRow, StoreError> {
    host_row(RawHost {
        name: r.get(0),
        ownership: r.get(1),
        kind: r.get(2),
        added: r.get(3),
        released: r.get(4),
        installation: r.get(5),
        facts: r.get(6),
        version: r.get(7),
        sha256: r.get(8),
        welcomed: r.get(9),
        generation: r.get(10),
        upgrade: r.get(11),
    })
}

pub(super) fn all(s: &mut PostgresStore) -> Result<Vec<HostRow>, StoreError> {
    s.read("list hosts", host!("ORDER BY added_us, name"), &[])?.iter().map(raw).collect()
}

pub(super) fn one(s: &mut PostgresStore, host: &HostId) -> Result<Option<HostRow>, StoreError> {
    s.read("read a host", host!("WHERE name = $1"), &[&host.as_str()])?.first().map(raw).transpose()
}

pub(super) fn add(
    s: &mut PostgresStore,
    host: &HostId,
    kind: &str,
    ownership: Ownership,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let mut t = s.write("add a host")?;
    let there = t.query("SELECT released_us FROM host WHERE name = $1", &[&host.as_str()])?;
    match there.first().map(|r| r.get::<_, Option<i64>>(0)) {
        Some(None) => return Err(StoreError::HostExists(host.clone())),
        // Its generation goes on counting: what it was given before its release stays fenced.
        Some(Some(_)) => t.execute(
            "UPDATE host SET released_us = NULL, installation = NULL, facts = NULL, upgrade = NULL, kind = $2, ownership = $3, \
             generation = generation + 1 WHERE name = $1",
            &[&host.as_str(), &kind, &ownership.as_str()],
        )?,
        None => t.execute(
            "INSERT INTO host (name, ownership, kind, added_us) VALUES ($1, $2, $3, $4)",
            &[&host.as_str(), &ownership.as_str(), &kind, &audit.at.0],
        )?,
    };
    audit::add(&mut t, audit)?;
    t.commit()
}

pub(super) fn release(s: &mut PostgresStore, host: &HostId, audit: &AuditRow) -> Result<(), StoreError> {
    let (name, now) = (host.as_str(), audit.at.0);
    let mut t = s.write("release a host")?;
    let sql = "UPDATE host SET released_us = $2 WHERE name = $1 AND released_us IS NULL";
    if t.execute(sql, &[&name, &now])? == 0 {
        return Err(StoreError::Missing { what: "host", id: host.to_string() });
    }
    t.execute("UPDATE certificate SET revoked_us = $2 WHERE host = $1 AND revoked_us IS NULL", &[&name, &now])?;
    // A token that was not used yet would enrol it again.
    t.execute("UPDATE token SET expires_us = least(expires_us, $2) WHERE host = $1", &[&name, &now])?;
    audit::add(&mut t, audit)?;
    t.commit()
}

pub(super) fn welcomed(
    s: &mut PostgresStore,
    host: &HostId,
    hello: &HelloRow,
    audit: &AuditRow,
) -> Result<Generation, StoreError> {
    let facts = json("host's facts", &hello.facts)?;
    let mut t = s.write("record that a host connected")?;
    let rows = t.query(
        "UPDATE host SET installation = $2, facts = $3, agent_version = $4, agent_sha256 = $5, welcomed_us = $6 \
         WHERE name = $1 RETURNING generation",
        &[
            &host.as_str(),
            &hello.installation.to_string(),
            &facts,
            &hello.agent_version,
            &hello.agent_sha256.to_string(),
            &audit.at.0,
        ],
    )?;
    let row = rows.first().ok_or_else(|| StoreError::Missing { what: "host", id: host.to_string() })?;
    let generation = generation(row.get(0))?;
    t.execute(
        "UPDATE certificate SET revoked_us = $3 WHERE host = $1 AND revoked_us IS NULL \
         AND issued_us < (SELECT issued_us FROM certificate WHERE sha256 = $2)",
        &[&host.as_str(), &hello.certificate.to_string(), &audit.at.0],
    )?;
    audit::add(&mut t, audit)?;
    t.commit()?;
    Ok(generation)
}

pub(super) fn set_upgrade(
    s: &mut PostgresStore,
    host: &HostId,
    upgrade: Option<&Upgrade>,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let upgrade = upgrade.map(|u| json("host's upgrade", u)).transpose()?;
    let mut t = s.write("order a build for a host")?;
    let sql = "UPDATE host SET upgrade = $2 WHERE name = $1 AND released_us IS NULL";
    if t.execute(sql, &[&host.as_str(), &upgrade])? == 0 {
        return Err(StoreError::Missing { what: "host", id: host.to_string() });
    }
    audit::add(&mut t, audit)?;
    t.commit()
}

pub(super) fn set_facts(
    s: &mut PostgresStore,
    host: &HostId,
    installation: InstallationId,
    facts: &HostFacts,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let facts = json("host's facts", facts)?;
    let mut t = s.write("store a host's facts")?;
    let sql = "UPDATE host SET facts = $3 WHERE name = $1 AND installation = $2";
    if t.execute(sql, &[&host.as_str(), &installation.to_string(), &facts])? == 1 {
        audit::add(&mut t, audit)?;
    }
    t.commit()
}

pub(super) fn next_generation(
    s: &mut PostgresStore,
    host: &HostId,
    audit: &AuditRow,
) -> Result<Generation, StoreError> {
    let mut t = s.write("count a host's generation")?;
    let sql = "UPDATE host SET generation = generation + 1 WHERE name = $1 RETURNING generation";
    let rows = t.query(sql, &[&host.as_str()])?;
    let row = rows.first().ok_or_else(|| StoreError::Missing { what: "host", id: host.to_string() })?;
    let generation = generation(row.get(0))?;
    audit::add(&mut t, audit)?;
    t.commit()?;
    Ok(generation)
}

pub(super) fn add_token(
    s: &mut PostgresStore,
    secret: Sha256,
    host: &HostId,
    expires: Micros,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let mut t = s.write("store a token")?;
    t.execute(
        "INSERT INTO token (secret_sha256, host, issued_us, expires_us) VALUES ($1, $2, $3, $4)",
        &[&secret.to_string(), &host.as_str(), &audit.at.0, &expires.0],
    )?;
    audit::add(&mut t, audit)?;
    t.commit()
}

pub(super) fn redeem(
    s: &mut PostgresStore,
    r: &Redemption,
    audit: &AuditRow,
) -> Result<Result<(), TokenRefusal>, StoreError> {
    let secret = r.secret_sha256.to_string();
    let mut t = s.write("use a token")?;
    let rows = t.query(
        "SELECT token.host, expires_us, key_sha256, released_us, token.launch FROM token \
         JOIN host ON host.name = token.host WHERE secret_sha256 = $1",
        &[&secret],
    )?;
    let found = match rows.first() {
        None => None,
        Some(r) => {
            let launched = match r.get::<_, Option<&str>>(4) {
                Some(launch) => instances::one(&mut t, launch)?,
                None => None,
            };
            Some(TokenRow { host: r.get(0), expires: r.get(1), key: r.get(2), released: r.get(3), launched })
        }
    };
    if let Some(answer) = token_answer(found, r)? {
        return Ok(answer);
    }
    t.execute(
        "UPDATE token SET used_us = $2, key_sha256 = $3, installation = $4 WHERE secret_sha256 = $1",
        &[&secret, &r.now.0, &r.key_sha256.to_string(), &r.installation.to_string()],
    )?;
    if let Some(proven) = proven(r) {
        instances::proved(&mut t, proven, &r.host)?;
    }
    audit::add(&mut t, audit)?;
    t.commit()?;
    Ok(Ok(()))
}

pub(super) fn add_certificate(
    s: &mut PostgresStore,
    row: &CertificateRow,
    audit: &AuditRow,
) -> Result<bool, StoreError> {
    let (host, installation, now) = (row.host.as_str(), row.installation.to_string(), audit.at.0);
    let mut t = s.write("record a certificate")?;
    t.execute(
        "INSERT INTO certificate (sha256, host, installation, issued_us, expires_us) VALUES ($1, $2, $3, $4, $5) \
         ON CONFLICT DO NOTHING",
        &[&row.sha256.to_string(), &host, &installation, &now, &row.expires.0],
    )?;
    let moved = t.execute(
        "UPDATE host SET facts = NULL, generation = generation + 1 WHERE name = $1 AND installation != $2",
        &[&host, &installation],
    )? > 0;
    if moved {
        t.execute(
            "UPDATE certificate SET revoked_us = $3 WHERE host = $1 AND installation != $2 AND revoked_us IS NULL",
            &[&host, &installation, &now],
        )?;
    }
    t.execute("UPDATE host SET installation = $2 WHERE name = $1", &[&host, &installation])?;
    audit::add(&mut t, audit)?;
    t.commit()?;
    Ok(moved)
}

pub(super) fn certificate(s: &mut PostgresStore, sha256: Sha256) -> Result<Option<CertificateRow>, StoreError> {
    let sql = "SELECT host, installation, expires_us, revoked_us FROM certificate WHERE sha256 = $1";
    let rows = s.read("read a certificate", sql, &[&sha256.to_string()])?;
    let row = |r: &Row| {
        Ok(CertificateRow {
            sha256,
            host: read("host name", r.get(0))?,
            installation: read("installation id", r.get(1))?,
            expires: Micros(r.get(2)),
            revoked: r.get::<_, Option<i64>>(3).map(Micros),
        })
    };
    rows.first().map(row).transpose()
}
