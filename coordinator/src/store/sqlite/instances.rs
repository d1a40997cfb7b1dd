//! SQLite: what launches made, and the tokens that are bound to it.

use drums_common::{clock::Micros, digest::Sha256, ids::HostId};
use drums_provider::token::ClientToken;
use rusqlite::{Connection, OptionalExtension as _, Row, params};

use super::{SqliteStore, audit, sql};
use crate::{
    net::ports::{Bound, Launched, Proven, Started},
    store::{
        AuditRow, StoreError,
        shared::{RawLaunched, launched, launched_as_answer, read, same_launch},
    },
};

fn raw(row: &Row<'_>) -> rusqlite::Result<RawLaunched> {
    Ok(RawLaunched {
        launch: row.get(0)?,
        account: row.get(1)?,
        region: row.get(2)?,
        image: row.get(3)?,
        kind: row.get(4)?,
        instance: row.get(5)?,
        started: row.get(6)?,
        host: row.get(7)?,
    })
}

pub(super) fn one(c: &Connection, launch: &str) -> Result<Option<RawLaunched>, StoreError> {
    let e = sql("read a launch");
    c.query_row(
        "SELECT launch, account, region, image, kind, instance, started_us, host FROM launched_instance WHERE launch = ?1",
        [launch],
        raw,
    )
    .optional()
    .map_err(&e)
}

pub(super) fn add_token(
    s: &mut SqliteStore,
    secret: Sha256,
    host: &HostId,
    expires: Micros,
    of: &Launched,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let e = sql("store a token of a launch");
    let launch = of.launch.to_string();
    let t = s.write("store a token of a launch")?;
    match one(&t, &launch)? {
        Some(held) => same_launch(&launched(&held)?, of)?,
        None => {
            t.execute(
                "INSERT INTO launched_instance (launch, account, region, image, kind) VALUES (?1, ?2, ?3, ?4, ?5)",
                params![launch, of.account, of.region.as_str(), of.image.as_str(), of.kind.as_str()],
            )
            .map_err(&e)?;
        }
    }
    t.execute(
        "INSERT INTO token (secret_sha256, host, issued_us, expires_us, launch) VALUES (?1, ?2, ?3, ?4, ?5)",
        params![secret.to_string(), host.as_str(), audit.at.0, expires.0, launch],
    )
    .map_err(&e)?;
    audit::add(&t, audit)?;
    t.commit().map_err(&e)
}

pub(super) fn launched_as(
    s: &mut SqliteStore,
    launch: ClientToken,
    started: &Started,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let e = sql("note which instance a launch made");
    let name = launch.to_string();
    let t = s.write("note which instance a launch made")?;
    let held = one(&t, &name)?;
    let other: Option<String> = t
        .query_row(
            "SELECT other.launch FROM launched_instance AS other JOIN launched_instance AS this \
             ON other.account = this.account AND other.region = this.region WHERE this.launch = ?1 AND other.instance = ?2",
            params![name, started.id.as_str()],
            |r| r.get(0),
        )
        .optional()
        .map_err(&e)?;
    if !launched_as_answer(launch, held, other.as_deref(), started)? {
        return Ok(());
    }
    t.execute(
        "UPDATE launched_instance SET instance = ?2, started_us = ?3 WHERE launch = ?1",
        params![name, started.id.as_str(), started.at.0],
    )
    .map_err(&e)?;
    audit::add(&t, audit)?;
    t.commit().map_err(&e)
}

pub(super) fn bound(c: &Connection, secret: Sha256, document: Option<Sha256>) -> Result<Bound, StoreError> {
    let e = sql("read what a token is bound to");
    let text = |sql: &str, key: Sha256| -> Result<Option<String>, StoreError> {
        let found = c.query_row(sql, [key.to_string()], |r| r.get::<_, Option<String>>(0)).optional();
        Ok(found.map_err(&e)?.flatten())
    };
    let launch = text("SELECT launch FROM token WHERE secret_sha256 = ?1", secret)?;
    let to = launch.map(|launch| one(c, &launch)).transpose()?.flatten();
    let shown_by = document.map(|d| text("SELECT host FROM launched_instance WHERE document_sha256 = ?1", d));
    Ok(Bound {
        to: to.as_ref().map(launched).transpose()?,
        shown_by: shown_by.transpose()?.flatten().map(|h| read("host name", &h)).transpose()?,
    })
}

/// Within the transaction that uses the token up.
pub(super) fn proved(c: &Connection, proven: &Proven, host: &HostId) -> Result<(), StoreError> {
    c.execute(
        "UPDATE launched_instance SET host = ?2, document_sha256 = ?3 WHERE launch = ?1",
        params![proven.launch.to_string(), host.as_str(), proven.document_sha256.to_string()],
    )
    .map(drop)
    .map_err(sql("note who proved to be an instance"))
}
