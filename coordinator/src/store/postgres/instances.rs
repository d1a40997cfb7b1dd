//! PostgreSQL: what launches made, and the tokens that are bound to it.

use drums_common::{clock::Micros, digest::Sha256, ids::HostId};
use drums_provider::token::ClientToken;
use tokio_postgres::Row;

use super::{PostgresStore, Tx, audit};
use crate::{
    net::ports::{Bound, Launched, Proven, Started},
    store::{
        AuditRow, StoreError,
        shared::{RawLaunched, launched, launched_as_answer, read, same_launch},
    },
};

macro_rules! launched {
    ($rest:literal) => {
        concat!(
            "SELECT launch, account, region, image, kind, instance, started_us, host FROM launched_instance ",
            $rest
        )
    };
}

fn raw(r: &Row) -> RawLaunched {
    RawLaunched {
        launch: r.get(0),
        account: r.get(1),
        region: r.get(2),
        image: r.get(3),
        kind: r.get(4),
        instance: r.get(5),
        started: r.get(6),
        host: r.get(7),
    }
}

pub(super) fn one(t: &mut Tx<'_>, launch: &str) -> Result<Option<RawLaunched>, StoreError> {
    Ok(t.query(launched!("WHERE launch = $1"), &[&launch])?.first().map(raw))
}

pub(super) fn add_token(
    s: &mut PostgresStore,
    secret: Sha256,
    host: &HostId,
    expires: Micros,
    of: &Launched,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let launch = of.launch.to_string();
    let mut t = s.write("store a token of a launch")?;
    match one(&mut t, &launch)? {
        Some(held) => same_launch(&launched(&held)?, of)?,
        None => {
            t.execute(
                "INSERT INTO launched_instance (launch, account, region, image, kind) VALUES ($1, $2, $3, $4, $5)",
                &[&launch, &of.account, &of.region.as_str(), &of.image.as_str(), &of.kind.as_str()],
            )?;
        }
    }
    t.execute(
        "INSERT INTO token (secret_sha256, host, issued_us, expires_us, launch) VALUES ($1, $2, $3, $4, $5)",
        &[&secret.to_string(), &host.as_str(), &audit.at.0, &expires.0, &launch],
    )?;
    audit::add(&mut t, audit)?;
    t.commit()
}

pub(super) fn launched_as(
    s: &mut PostgresStore,
    launch: ClientToken,
    started: &Started,
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let name = launch.to_string();
    let mut t = s.write("note which instance a launch made")?;
    let held = one(&mut t, &name)?;
    let other = t.query(
        "SELECT other.launch FROM launched_instance AS other JOIN launched_instance AS this \
         ON other.account = this.account AND other.region = this.region WHERE this.launch = $1 AND other.instance = $2",
        &[&name, &started.id.as_str()],
    )?;
    let other = other.first().map(|r| r.get::<_, &str>(0));
    if !launched_as_answer(launch, held, other, started)? {
        return Ok(());
    }
    t.execute(
        "UPDATE launched_instance SET instance = $2, started_us = $3 WHERE launch = $1",
        &[&name, &started.id.as_str(), &started.at.0],
    )?;
    audit::add(&mut t, audit)?;
    t.commit()
}

pub(super) fn bound(s: &mut PostgresStore, secret: Sha256, document: Option<Sha256>) -> Result<Bound, StoreError> {
    let what = "read what a token is bound to";
    let sql = launched!("WHERE launch = (SELECT launch FROM token WHERE secret_sha256 = $1)");
    let to = s.read(what, sql, &[&secret.to_string()])?.first().map(raw);
    let shown_by: Option<String> = match document {
        None => None,
        Some(document) => {
            let sql = "SELECT host FROM launched_instance WHERE document_sha256 = $1";
            s.read(what, sql, &[&document.to_string()])?.first().and_then(|r| r.get(0))
        }
    };
    Ok(Bound {
        to: to.as_ref().map(launched).transpose()?,
        shown_by: shown_by.map(|h| read("host name", &h)).transpose()?,
    })
}

/// Within the transaction that uses the token up.
pub(super) fn proved(t: &mut Tx<'_>, proven: &Proven, host: &HostId) -> Result<(), StoreError> {
    t.execute(
        "UPDATE launched_instance SET host = $2, document_sha256 = $3 WHERE launch = $1",
        &[&proven.launch.to_string(), &host.as_str(), &proven.document_sha256.to_string()],
    )
    .map(drop)
}
