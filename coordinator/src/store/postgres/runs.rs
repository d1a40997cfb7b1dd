//! PostgreSQL: runs, their events, evidence.

use std::collections::BTreeMap;

use drums_common::{
    clock::Micros,
    ids::{ExperimentId, Generation, HostId, RunId},
};
use tokio_postgres::Row;

use super::{PostgresStore, Tx, audit};
use crate::{
    core::run::{Note, RunState},
    store::{
        AuditRow, EventRow, EvidenceRow, RunRow, StoreError,
        audit::plain,
        evidence::{Stored, Written, fresh, repeated},
        shared::{generation, json, read, read_json},
    },
};

pub(super) fn create(
    s: &mut PostgresStore,
    state: &RunState,
    notes: &[Note],
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let text = json("run", state)?;
    let mut t = s.write("create a run")?;
    t.execute(
        "INSERT INTO run (id, registration, number, created_us, phase, verdict, state, generation) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, 1)",
        &[
            &state.id.to_string(),
            &state.registration.to_string(),
            &i64::from(state.number),
            &state.created.0,
            &state.phase.as_str(),
            &state.verdict().map(|v| v.as_str()),
            &text,
        ],
    )?;
    audit::add(&mut t, audit)?;
    add_events(&mut t, state.id, notes, audit.at)?;
    t.commit()
}

pub(super) fn save(
    s: &mut PostgresStore,
    state: &RunState,
    expected: u32,
    notes: &[Note],
    now: Micros,
    audit: Option<&AuditRow>,
) -> Result<(), StoreError> {
    let (id, text) = (state.id.to_string(), json("run", state)?);
    let mut t = s.write("save a run")?;
    let rows = t.query("SELECT generation FROM run WHERE id = $1 FOR UPDATE", &[&id])?;
    let row = rows.first().ok_or_else(|| StoreError::Missing { what: "run", id: id.clone() })?;
    let held = generation(row.get(0))?.0;
    if held != expected {
        return Err(StoreError::Conflict { run: state.id, held, expected });
    }
    t.execute(
        "UPDATE run SET phase = $2, verdict = $3, state = $4, generation = generation + 1 WHERE id = $1",
        &[&id, &state.phase.as_str(), &state.verdict().map(|v| v.as_str()), &text],
    )?;
    if let Some(row) = audit {
        audit::add(&mut t, row)?;
    }
    add_events(&mut t, state.id, notes, now)?;
    t.commit()
}

fn add_events(t: &mut Tx<'_>, run: RunId, notes: &[Note], now: Micros) -> Result<(), StoreError> {
    for n in notes {
        t.execute(
            "INSERT INTO run_event (run, number, at_us, kind, host, text) \
             VALUES ($1, (SELECT coalesce(max(number), 0) + 1 FROM run_event WHERE run = $1), $2, $3, $4, $5)",
            &[&run.to_string(), &now.0, &n.kind, &n.host.as_ref().map(|h| h.as_str()), &plain(&n.text)],
        )?;
        audit::add(t, &AuditRow::of_note(now, run, n))?;
    }
    Ok(())
}

pub(super) fn all(
    s: &mut PostgresStore,
    run: Option<RunId>,
    experiment: Option<ExperimentId>,
) -> Result<Vec<RunRow>, StoreError> {
    let sql = "SELECT run.state, run.generation, registration.experiment FROM run \
               JOIN registration ON registration.sha256 = run.registration \
               WHERE ($1::text IS NULL OR run.id = $1) AND ($2::text IS NULL OR registration.experiment = $2) \
               ORDER BY run.created_us, run.id";
    let rows = s.read("list runs", sql, &[&run.map(|r| r.to_string()), &experiment.map(|x| x.to_string())])?;
    let row = |r: &Row| {
        Ok(RunRow {
            state: read_json("run", r.get(0))?,
            generation: generation(r.get(1))?.0,
            experiment: read("experiment id", r.get(2))?,
        })
    };
    rows.iter().map(row).collect()
}

pub(super) fn events(s: &mut PostgresStore, run: RunId, after: u64, limit: u32) -> Result<Vec<EventRow>, StoreError> {
    let sql = "SELECT number, at_us, kind, host, text FROM run_event \
               WHERE run = $1 AND number > $2 ORDER BY number LIMIT $3";
    let rows = s.read("read a run's events", sql, &[&run.to_string(), &after.cast_signed(), &i64::from(limit)])?;
    let row = |r: &Row| {
        let host = r.get::<_, Option<&str>>(3).map(|h| read("host name", h)).transpose()?;
        let note = Note { kind: r.get(2), host, text: r.get(4) };
        Ok(EventRow { number: r.get::<_, i64>(0).cast_unsigned(), at: Micros(r.get(1)), note })
    };
    rows.iter().map(row).collect()
}

/// Numbers have no gaps, so the highest is the last of all that are stored.
const ACKED: &str = "SELECT coalesce(max(seq), 0) FROM evidence WHERE run = $1 AND host = $2";

fn through(rows: &[Row]) -> u64 {
    rows.first().map_or(0, |r| r.get::<_, i64>(0).cast_unsigned())
}

pub(super) fn commit_evidence(
    s: &mut PostgresStore,
    run: RunId,
    host: &HostId,
    current: Generation,
    records: &[Written],
    now: Micros,
) -> Result<Stored, StoreError> {
    let (id, name) = (run.to_string(), host.as_str());
    let mut t = s.write("commit evidence")?;
    let before = through(&t.query(ACKED, &[&id, &name])?);
    let mut stored = BTreeMap::new();
    if let Some((first, last)) = repeated(records, before) {
        let sql = "SELECT seq, record FROM evidence WHERE run = $1 AND host = $2 AND seq BETWEEN $3 AND $4";
        let rows = t.query(sql, &[&id, &name, &first.cast_signed(), &last.cast_signed()])?;
        stored.extend(rows.iter().map(|r| (r.get::<_, i64>(0).cast_unsigned(), r.get::<_, String>(1))));
    }
    let new = fresh(host, current, records, before, &stored)?;
    let Some(through) = new.last().map(|n| n.seq) else { return Ok(Stored { before, through: before }) };
    // The batch travels as three columns: one statement however many records.
    let seqs: Vec<i64> = new.iter().map(|n| n.seq.cast_signed()).collect();
    let late: Vec<bool> = new.iter().map(|n| n.late).collect();
    let texts: Vec<&str> = new.iter().map(|n| n.text).collect();
    t.execute(
        "INSERT INTO evidence (run, host, seq, received_us, late, record) \
         SELECT $1, $2, seq, $3, late, record \
         FROM unnest($4::bigint[], $5::boolean[], $6::text[]) AS batch (seq, late, record)",
        &[&id, &name, &now.0, &seqs, &late, &texts],
    )?;
    t.commit()?;
    Ok(Stored { before, through })
}

pub(super) fn acked(s: &mut PostgresStore, run: RunId, host: &HostId) -> Result<u64, StoreError> {
    Ok(through(&s.read("read how far the evidence goes", ACKED, &[&run.to_string(), &host.as_str()])?))
}

pub(super) fn evidence(
    s: &mut PostgresStore,
    run: RunId,
    host: &HostId,
    after: u64,
    limit: u32,
) -> Result<Vec<EvidenceRow>, StoreError> {
    let sql = "SELECT record, received_us, late FROM evidence \
               WHERE run = $1 AND host = $2 AND seq > $3 ORDER BY seq LIMIT $4";
    let rows =
        s.read("read evidence", sql, &[&run.to_string(), &host.as_str(), &after.cast_signed(), &i64::from(limit)])?;
    let row = |r: &Row| {
        Ok(EvidenceRow { record: read_json("record", r.get(0))?, received: Micros(r.get(1)), late: r.get(2) })
    };
    rows.iter().map(row).collect()
}
