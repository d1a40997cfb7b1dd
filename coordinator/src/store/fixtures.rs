//! Stores as earlier programs left them. For each migration there are two files: `NAME.sql`, a store that had come so
//! far, and `NAME.txt`, what this program finds in it. A released `.sql` is never changed; `UPDATE_EXPECT=1` writes the
//! newest one and all `.txt`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    script::{STEPS, content},
    *,
};

fn file(backend: &str, name: &str, extension: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("src/store/fixtures/{backend}/{name}.{extension}"))
}

fn refresh() -> bool {
    std::env::var_os("UPDATE_EXPECT").is_some_and(|v| v == "1")
}

fn expect(path: &Path, found: &str) {
    if refresh() {
        fs::write(path, found).unwrap();
    }
    let wanted = fs::read_to_string(path).unwrap_or_default();
    assert!(wanted == found, "{} is not what is found; UPDATE_EXPECT=1 writes it:\n{found}", path.display());
}

/// The names of the files that are there are those of the migrations, so that a new one needs its fixture.
fn complete(backend: &str, migrations: &[migrations::Migration]) {
    for (name, _) in migrations {
        let path = file(backend, name, "sql");
        assert!(path.exists(), "{} is missing; UPDATE_EXPECT=1 writes the newest", path.display());
    }
}

fn run_all(s: &mut dyn Store) {
    for step in STEPS {
        step(s).unwrap();
    }
}

/// Everything in a SQLite file as SQL: tables, rows, then what watches over them.
fn dump(c: &rusqlite::Connection) -> String {
    let column = |sql: &str| -> Vec<String> {
        let mut statement = c.prepare(sql).unwrap();
        let rows = statement.query_map([], |r| r.get(0)).unwrap();
        rows.collect::<Result<_, _>>().unwrap()
    };
    let made = |kind: &str| {
        let sql = format!(
            "SELECT sql || ';' FROM sqlite_master WHERE type {kind} AND sql NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY rowid"
        );
        column(&sql)
    };
    let mut lines = made("= 'table'");
    for table in
        column("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%' ORDER BY rowid")
    {
        let columns = column(&format!("SELECT name FROM pragma_table_info('{table}') ORDER BY cid"));
        let values = columns.iter().map(|c| format!("quote({c})")).collect::<Vec<_>>().join(" || ', ' || ");
        let names = columns.join(", ");
        let rows = column(&format!("SELECT {values} FROM {table} ORDER BY {}", columns[0]));
        lines.extend(rows.into_iter().map(|r| format!("INSERT INTO {table} ({names}) VALUES ({r});")));
    }
    lines.extend(made("!= 'table'"));
    lines.join("\n") + "\n"
}

#[test]
fn every_past_form_of_sqlite_is_brought_forward() {
    let dir = tempfile::tempdir().unwrap();
    if refresh() {
        let (name, path) = (migrations::SQLITE.last().unwrap().0, dir.path().join("now"));
        let mut s = SqliteStore::open(&path).unwrap();
        run_all(&mut s);
        fs::write(file("sqlite", name, "sql"), dump(&rusqlite::Connection::open(&path).unwrap())).unwrap();
    }
    complete("sqlite", migrations::SQLITE);
    for (name, _) in migrations::SQLITE {
        let path = dir.path().join(name);
        let old = fs::read_to_string(file("sqlite", name, "sql")).unwrap();
        // Tables are in the order in which they came, and an older one may refer to a newer one's rows.
        let load = format!("BEGIN; PRAGMA defer_foreign_keys = ON; {old} COMMIT;");
        rusqlite::Connection::open(&path).unwrap().execute_batch(&load).unwrap();
        let mut s = SqliteStore::open(&path).unwrap();
        expect(&file("sqlite", name, "txt"), &content(&mut s));
        // It has the form of a store that is made today, and is guarded as that.
        let form = |path: &Path| {
            let c = rusqlite::Connection::open(path).unwrap();
            let mut statement = c.prepare("SELECT type, name FROM sqlite_master ORDER BY 1, 2").unwrap();
            let rows = statement.query_map([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, String>(1)?))).unwrap();
            rows.collect::<Result<Vec<_>, _>>().unwrap()
        };
        let new = dir.path().join("new");
        drop(SqliteStore::open(&new).unwrap());
        assert_eq!(form(&path), form(&new), "{name}");
        s.add_audit(&AuditRow::new(drums_common::clock::Micros(20), Who::coordinator(), "goes on")).unwrap();
    }
}

/// A `drumsctl` of a newer release, which copies a store before an upgrade, say, while its coordinator runs.
#[test]
fn what_only_looks_at_a_store_or_copies_it_leaves_it_in_its_form() {
    let dir = tempfile::tempdir().unwrap();
    for (name, _) in migrations::SQLITE {
        let (path, copy) = (dir.path().join(name), dir.path().join(format!("{name}.copy")));
        let old = fs::read_to_string(file("sqlite", name, "sql")).unwrap();
        let load = format!("BEGIN; PRAGMA defer_foreign_keys = ON; {old} COMMIT;");
        rusqlite::Connection::open(&path).unwrap().execute_batch(&load).unwrap();
        let mut s = SqliteStore::as_it_is(&path).unwrap();
        assert_eq!(s.workloads().unwrap().len(), 1, "{name}");
        s.backup(&copy).unwrap();
        drop(s);
        for path in [path, copy] {
            let c = rusqlite::Connection::open(&path).unwrap();
            let newest: String = c.query_row("SELECT max(name) FROM migration", [], |r| r.get(0)).unwrap();
            assert_eq!(newest, *name, "{}", path.display());
        }
    }
}

/// The most memory that this process has while it does something, beyond what it had before, in MiB.
fn peak_mib<T>(work: impl FnOnce() -> T) -> (u64, T) {
    let kib = |field: &str| -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix(field)).unwrap();
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
    };
    // The peak begins anew: proc(5).
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = kib("VmRSS");
    let done = work();
    (kib("VmHWM").saturating_sub(before) >> 10, done)
}

/// A test has its process to itself: nextest.
#[test]
fn a_large_store_is_brought_forward_and_backed_up_in_little_memory() {
    let (dir, text) = (tempfile::tempdir().unwrap(), "x".repeat(1 << 20));
    let path = dir.path().join("large");
    {
        let c = rusqlite::Connection::open(&path).unwrap();
        let old = fs::read_to_string(file("sqlite", "0005_certificates_of_a_host", "sql")).unwrap();
        c.execute_batch(&format!("BEGIN; {old} COMMIT;")).unwrap();
        for seq in 100..148 {
            c.execute(
                "INSERT INTO evidence VALUES ('run-010101010101', 'h1', ?1, 1, 0, ?2)",
                rusqlite::params![seq, text],
            )
            .unwrap();
        }
    }
    let (migrating_mib, mut s) = peak_mib(|| SqliteStore::open(&path).unwrap());
    let (copying_mib, ()) = peak_mib(|| s.backup(&dir.path().join("copy")).unwrap());
    assert!(migrating_mib < 16 && copying_mib < 16, "{migrating_mib} MiB and {copying_mib} MiB for 48 MiB");
    let spills: i64 = s.connection.query_row("PRAGMA cache_spill", [], |r| r.get(0)).unwrap();
    assert_eq!(spills, 0, "what is gathered for one commit stays in memory");
}

#[cfg(feature = "postgres")]
#[test]
fn every_past_form_of_postgresql_is_brought_forward() {
    let server = drums_infra::postgres::Server::start().unwrap();
    let leading = |url: &str| {
        let mut s = PostgresStore::open(&crate::config::PostgresConfig::new(url)).unwrap();
        assert!(matches!(s.take("node", "test", std::time::Duration::from_secs(600)).unwrap(), Taken::Ours { .. }));
        s.migrate().unwrap();
        s
    };
    let form = |database: &str| {
        server.psql(database, "SELECT relkind, relname FROM pg_class WHERE relnamespace = 'public'::regnamespace UNION ALL SELECT 't', tgname FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1, 2").unwrap()
    };
    run_all(&mut leading(&server.url()));
    if refresh() {
        // The server's version and the dump's own are no part of the store.
        let text = server.dump("drums").unwrap();
        let kept: Vec<&str> =
            text.lines().filter(|l| !l.starts_with("--") && !l.starts_with('\\') && !l.is_empty()).collect();
        let name = migrations::POSTGRES.last().unwrap().0;
        fs::write(file("postgres", name, "sql"), kept.join("\n") + "\n").unwrap();
    }
    complete("postgres", migrations::POSTGRES);
    for (name, _) in migrations::POSTGRES {
        let database = format!("past_{}", &name[..4]);
        let url = server.database(&database).unwrap();
        server.load(&database, &file("postgres", name, "sql")).unwrap();
        let mut s = leading(&url);
        expect(&file("postgres", name, "txt"), &content(&mut s));
        assert_eq!(form(&database), form("drums"), "{name}");
        s.add_audit(&AuditRow::new(drums_common::clock::Micros(20), Who::coordinator(), "goes on")).unwrap();
    }
}
