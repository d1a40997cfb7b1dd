//! SQLite: runs, their events, evidence.

use std::collections::BTreeMap;

use drums_common::{
    clock::Micros,
    ids::{ExperimentId, Generation, HostId, RunId},
};
use rusqlite::{Connection, OptionalExtension as _, params};

use super::{SqliteStore, audit, sql};
use crate::{
    core::run::{Note, RunState},
    store::{
        AuditRow, EventRow, EvidenceRow, RunRow, StoreError,
        audit::plain,
        evidence::{Stored, Written, fresh, repeated},
        shared::{json, read, read_json},
    },
};

pub(super) fn create(
    s: &mut SqliteStore,
    state: &RunState,
    notes: &[Note],
    audit: &AuditRow,
) -> Result<(), StoreError> {
    let e = sql("create a run");
    let text = json("run", state)?;
    let t = s.write("create a run")?;
    t.execute(
        "INSERT INTO run (id, registration, number, created_us, phase, verdict, state, generation) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, 1)",
        params![
            state.id.to_string(),
            state.registration.to_string(),
            state.number,
            state.created.0,
            state.phase.as_str(),
            state.verdict().map(|v| v.as_str()),
            text
        ],
    )
    .map_err(&e)?;
    audit::add(&t, audit)?;
    add_events(&t, state.id, notes, audit.at)?;
    t.commit().map_err(&e)
}

pub(super) fn save(
    s: &mut SqliteStore,
    state: &RunState,
    expected: u32,
    notes: &[Note],
    now: Micros,
    audit: Option<&AuditRow>,
) -> Result<(), StoreError> {
    let e = sql("save a run");
    let text = json("run", state)?;
    let t = s.write("save a run")?;
    let held: Option<u32> = t
        .query_row("SELECT generation FROM run WHERE id = ?1", [state.id.to_string()], |r| r.get(0))
        .optional()
        .map_err(&e)?;
    match held {
        None => return Err(StoreError::Missing { what: "run", id: state.id.to_string() }),
        Some(held) if held != expected => return Err(StoreError::Conflict { run: state.id, held, expected }),
        Some(_) => {}
    }
    t.execute(
        "UPDATE run SET phase = ?2, verdict = ?3, state = ?4, generation = generation + 1 WHERE id = ?1",
        params![state.id.to_string(), state.phase.as_str(), state.verdict().map(|v| v.as_str()), text],
    )
    .map_err(&e)?;
    if let Some(row) = audit {
        audit::add(&t, row)?;
    }
    add_events(&t, state.id, notes, now)?;
    t.commit().map_err(&e)
}

fn add_events(t: &Connection, run: RunId, notes: &[Note], now: Micros) -> Result<(), StoreError> {
    let mut statement = t
        .prepare_cached(
            "INSERT INTO run_event (run, number, at_us, kind, host, text) \
             VALUES (?1, (SELECT coalesce(max(number), 0) + 1 FROM run_event WHERE run = ?1), ?2, ?3, ?4, ?5)",
        )
        .map_err(sql("write a run's events"))?;
    for n in notes {
        statement
            .execute(params![run.to_string(), now.0, n.kind, n.host.as_ref().map(|h| h.as_str()), plain(&n.text)])
            .map_err(sql("write a run's events"))?;
        audit::add(t, &AuditRow::of_note(now, run, n))?;
    }
    Ok(())
}

pub(super) fn all(
    c: &Connection,
    run: Option<RunId>,
    experiment: Option<ExperimentId>,
) -> Result<Vec<RunRow>, StoreError> {
    let e = sql("list runs");
    let mut statement = c
        .prepare_cached(
            "SELECT run.state, run.generation, registration.experiment FROM run JOIN registration ON registration.sha256 = run.registration \
             WHERE (?1 IS NULL OR run.id = ?1) AND (?2 IS NULL OR registration.experiment = ?2) ORDER BY run.created_us, run.id",
        )
        .map_err(&e)?;
    let rows = statement
        .query_map(params![run.map(|r| r.to_string()), experiment.map(|x| x.to_string())], |r| {
            Ok((r.get::<_, String>(0)?, r.get::<_, u32>(1)?, r.get::<_, String>(2)?))
        })
        .map_err(&e)?;
    rows.map(|r| {
        let (state, generation, experiment) = r.map_err(&e)?;
        Ok(RunRow { state: read_json("run", &state)?, generation, experiment: read("experiment id", &experiment)? })
    })
    .collect()
}

pub(super) fn events(c: &Connection, run: RunId, after: u64, limit: u32) -> Result<Vec<EventRow>, StoreError> {
    let e = sql("read a run's events");
    let mut statement = c
        .prepare_cached(
            "SELECT number, at_us, kind, host, text FROM run_event WHERE run = ?1 AND number > ?2 ORDER BY number LIMIT ?3",
        )
        .map_err(&e)?;
    let rows = statement
        .query_map(params![run.to_string(), after.cast_signed(), limit], |r| {
            Ok((
                r.get::<_, i64>(0)?,
                r.get::<_, i64>(1)?,
                r.get::<_, String>(2)?,
                r.get::<_, Option<String>>(3)?,
                r.get::<_, String>(4)?,
            ))
        })
        .map_err(&e)?;
    rows.map(|r| {
        let (number, at, kind, host, text) = r.map_err(&e)?;
        let host = host.map(|h| read("host name", &h)).transpose()?;
        Ok(EventRow { number: number.cast_unsigned(), at: Micros(at), note: Note { kind, host, text } })
    })
    .collect()
}

pub(super) fn commit_evidence(
    s: &mut SqliteStore,
    run: RunId,
    host: &HostId,
    current: Generation,
    records: &[Written],
    now: Micros,
) -> Result<Stored, StoreError> {
    let e = sql("commit evidence");
    let t = s.write("commit evidence")?;
    let before = acked(&t, run, host)?;
    let stored = match repeated(records, before) {
        Some(range) => stored(&t, run, host, range)?,
        None => BTreeMap::new(),
    };
    let new = fresh(host, current, records, before, &stored)?;
    {
        let mut insert = t
            .prepare_cached(
                "INSERT INTO evidence (run, host, seq, received_us, late, record) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )
            .map_err(&e)?;
        for n in &new {
            insert
                .execute(params![run.to_string(), host.as_str(), n.seq.cast_signed(), now.0, n.late, n.text])
                .map_err(&e)?;
        }
    }
    t.commit().map_err(&e)?;
    Ok(Stored { before, through: new.last().map_or(before, |n| n.seq) })
}

fn stored(
    c: &Connection,
    run: RunId,
    host: &HostId,
    (first, last): (u64, u64),
) -> Result<BTreeMap<u64, String>, StoreError> {
    let e = sql("compare a repeated batch");
    let mut statement = c
        .prepare_cached("SELECT seq, record FROM evidence WHERE run = ?1 AND host = ?2 AND seq BETWEEN ?3 AND ?4")
        .map_err(&e)?;
    let range = params![run.to_string(), host.as_str(), first.cast_signed(), last.cast_signed()];
    let rows = statement.query_map(range, |r| Ok((r.get::<_, i64>(0)?.cast_unsigned(), r.get(1)?))).map_err(&e)?;
    rows.collect::<Result<_, _>>().map_err(&e)
}

pub(super) fn acked(c: &Connection, run: RunId, host: &HostId) -> Result<u64, StoreError> {
    // Numbers have no gaps, so the highest is the last of all that are stored.
    let e = sql("read how far the evidence goes");
    let mut statement =
        c.prepare_cached("SELECT coalesce(max(seq), 0) FROM evidence WHERE run = ?1 AND host = ?2").map_err(&e)?;
    let seq: i64 = statement.query_row(params![run.to_string(), host.as_str()], |r| r.get(0)).map_err(&e)?;
    Ok(seq.cast_unsigned())
}

pub(super) fn evidence(
    c: &Connection,
    run: RunId,
    host: &HostId,
    after: u64,
    limit: u32,
) -> Result<Vec<EvidenceRow>, StoreError> {
    let e = sql("read evidence");
    let mut statement = c
        .prepare_cached(
            "SELECT record, received_us, late FROM evidence WHERE run = ?1 AND host = ?2 AND seq > ?3 ORDER BY seq LIMIT ?4",
        )
        .map_err(&e)?;
    let rows = statement
        .query_map(params![run.to_string(), host.as_str(), after.cast_signed(), limit], |r| {
            Ok((r.get::<_, String>(0)?, r.get::<_, i64>(1)?, r.get::<_, bool>(2)?))
        })
        .map_err(&e)?;
    rows.map(|r| {
        let (record, received, late) = r.map_err(&e)?;
        Ok(EvidenceRow { record: read_json("record", &record)?, received: Micros(received), late })
    })
    .collect()
}
