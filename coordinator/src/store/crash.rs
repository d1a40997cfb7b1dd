//! A process that works on a store is killed with SIGKILL between any two statements: whole transactions are there, and
//! no part of one.
//!
//! The process is this test binary again, which runs only [`the_process`]. With SQLite it kills itself as a statement
//! begins, by a hook of the library, so that the tested code knows nothing of it. With PostgreSQL a relay between it and
//! the server kills it at one of its messages.

use std::{
    os::unix::process::ExitStatusExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use super::{
    script::{STEPS, content},
    *,
};

const PLACE: &str = "DRUMS_TEST_CRASH_PLACE";
const AT: &str = "DRUMS_TEST_CRASH_AT";

/// Starts the process on a store; it dies at statement `at`, if that is given and comes.
fn process(place: &str, at: Option<u32>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "store::crash::the_process", "--nocapture"]);
    command.env(PLACE, place).env(AT, at.unwrap_or(u32::MAX).to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// How it ended; anything but success and the kill is a failure of the test.
fn killed(child: Child) -> bool {
    let output = child.wait_with_output().unwrap();
    let killed = output.status.signal() == Some(9);
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(killed || output.status.success(), "{}: {words}", ExitStatus::from_raw(output.status.into_raw()));
    killed
}

#[test]
fn the_process() {
    let (Ok(place), Ok(at)) = (std::env::var(PLACE), std::env::var(AT)) else { return };
    let mut store: Box<dyn Store> = if place.starts_with("postgres:") {
        #[cfg(feature = "postgres")]
        {
            Box::new(server::leading(&place))
        }
        #[cfg(not(feature = "postgres"))]
        unreachable!("nobody asks for it")
    } else {
        die_at_statement(at.parse().unwrap());
        Box::new(SqliteStore::open(Path::new(&place)).unwrap())
    };
    for step in STEPS {
        step(store.as_mut()).unwrap();
    }
}

static LEFT: AtomicU32 = AtomicU32::new(u32::MAX);

/// From here on, this process dies as the `n`th statement of SQLite begins.
fn die_at_statement(n: u32) {
    use rusqlite::ffi;

    unsafe extern "C" fn count(
        _: std::ffi::c_uint,
        _: *mut std::ffi::c_void,
        _: *mut std::ffi::c_void,
        _: *mut std::ffi::c_void,
    ) -> i32 {
        if LEFT.fetch_sub(1, Ordering::Relaxed) == 1 {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
        }
        0
    }

    unsafe extern "C" fn attach(
        db: *mut ffi::sqlite3,
        _: *mut *mut std::ffi::c_char,
        _: *const ffi::sqlite3_api_routines,
    ) -> i32 {
        // SAFETY: the library calls this with a connection that it has just opened.
        unsafe { ffi::sqlite3_trace_v2(db, ffi::SQLITE_TRACE_STMT as _, Some(count), std::ptr::null_mut()) }
    }

    LEFT.store(n, Ordering::Relaxed);
    // SAFETY: the function stays for the life of the process, and has the signature that the library documents.
    let code = unsafe { ffi::sqlite3_auto_extension(Some(attach)) };
    assert_eq!(code, ffi::SQLITE_OK);
}

/// What a store holds after each number of steps, none included.
fn contents(store: &mut dyn Store) -> Vec<String> {
    let mut all = vec![content(store)];
    for step in STEPS {
        step(store).unwrap();
        all.push(content(store));
    }
    all.iter().zip(&all[1..]).for_each(|(a, b)| assert_ne!(a, b, "each step is seen"));
    all
}

/// How many steps were done whole.
fn steps_done(all: &[String], store: &mut dyn Store) -> usize {
    let now = content(store);
    all.iter().position(|c| *c == now).unwrap_or_else(|| panic!("half a transaction: {now}"))
}

#[test]
fn a_kill_between_any_two_statements_leaves_whole_transactions_in_sqlite() {
    let dir = tempfile::tempdir().unwrap();
    let all = contents(&mut SqliteStore::open(&dir.path().join("reference")).unwrap());
    let mut seen = 0;
    let mut at = 0;
    loop {
        at += 1;
        let path: PathBuf = dir.path().join(format!("store-{at}"));
        let killed = killed(process(path.to_str().unwrap(), Some(at)));
        // Also a store whose making was interrupted is opened and completed.
        let done = steps_done(&all, &mut SqliteStore::open(&path).unwrap());
        assert!(done >= seen, "statement {at}: {done} steps, {seen} before");
        seen = done;
        if !killed {
            break;
        }
    }
    assert_eq!(seen, STEPS.len());
    assert!(at > 40, "{at} statements");
}

#[test]
fn a_migration_that_is_killed_leaves_the_old_form_or_the_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let old = include_str!("fixtures/sqlite/0001_first.sql");
    let (mut olds, mut news) = (0, 0);
    for at in 1.. {
        let path = dir.path().join(format!("store-{at}"));
        rusqlite::Connection::open(&path).unwrap().execute_batch(&format!("BEGIN; {old} COMMIT;")).unwrap();
        let killed = killed(process(path.to_str().unwrap(), Some(at)));
        let c = rusqlite::Connection::open(&path).unwrap();
        let count = |sql: &str| c.query_row(sql, [], |r| r.get::<_, u32>(0)).unwrap();
        let entered = count("SELECT count(*) FROM migration WHERE name = '0003_events'");
        let columns = count("SELECT count(*) FROM pragma_table_info('audit') WHERE name IN ('peer', 'run', 'host')");
        let indexes = count("SELECT count(*) FROM sqlite_master WHERE name IN ('audit_run', 'audit_host')");
        match (entered, columns, indexes) {
            (0, 0, 0) => olds += 1,
            (1, 3, 2) => news += 1,
            other => panic!("statement {at}: {other:?}"),
        }
        drop(c);
        SqliteStore::open(&path).unwrap();
        // The first step after it finds what the old store had: the process ends by itself or by the kill.
        if news > 2 || !killed {
            break;
        }
    }
    assert!(olds > 5 && news > 0, "{olds} old, {news} new");
}

#[cfg(feature = "postgres")]
mod server {
    use std::{
        io::{Read as _, Write as _},
        os::unix::net::{UnixListener, UnixStream},
        time::Duration,
    };

    use drums_infra::postgres::Server;

    use super::*;
    use crate::config::PostgresConfig;

    pub(super) fn leading(url: &str) -> PostgresStore {
        let mut store = PostgresStore::open(&PostgresConfig::new(url)).unwrap();
        assert!(matches!(store.take("node", "test", Duration::from_secs(600)).unwrap(), Taken::Ours { .. }));
        store.migrate().unwrap();
        store
    }

    /// Carries bytes between the process and the server, and kills the process when it has asked `at` times: a question is
    /// a message Sync or Query, which the server does not get to see then.
    fn relay(listener: &UnixListener, server: &Path, child: &Child, at: u32) {
        listener.set_nonblocking(true).unwrap();
        let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
        let gone = || !Path::new(&format!("/proc/{pid}/fd/0")).exists();
        let mut accepted = None;
        let came = drums_infra::fleet::wait_until(Duration::from_secs(30), || {
            accepted = listener.accept().ok();
            accepted.is_some() || gone()
        });
        let Some((client, _)) = accepted.filter(|_| came) else { return };
        client.set_nonblocking(false).unwrap();
        let upstream = UnixStream::connect(server).unwrap();
        let (mut from_server, mut to_client) = (upstream.try_clone().unwrap(), client.try_clone().unwrap());
        let back = std::thread::spawn(move || {
            let _ = std::io::copy(&mut from_server, &mut to_client);
            let _ = to_client.shutdown(std::net::Shutdown::Both);
        });
        let (mut client, mut upstream) = (client, upstream);
        let mut asked = 0;
        // The first message has no type.
        let mut typed = false;
        loop {
            let mut head = vec![0; if typed { 5 } else { 4 }];
            if client.read_exact(&mut head).is_err() {
                break;
            }
            let length = u32::from_be_bytes(head[head.len() - 4..].try_into().unwrap());
            let mut body = vec![0; length as usize - 4];
            if client.read_exact(&mut body).is_err() {
                break;
            }
            asked += u32::from(typed && matches!(head[0], b'S' | b'Q'));
            if asked == at {
                nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
                break;
            }
            typed = true;
            if upstream.write_all(&[head, body].concat()).is_err() {
                break;
            }
        }
        let _ = upstream.shutdown(std::net::Shutdown::Both);
        back.join().unwrap();
    }

    #[test]
    fn a_kill_between_any_two_questions_leaves_whole_transactions_in_postgresql() {
        let server = Server::start().unwrap();
        let all = contents(&mut leading(&server.url()));
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join(".s.PGSQL.5432")).unwrap();
        let through = format!("postgres://drums@/drums?host={}", dir.path().display());
        let socket = server.folder().join(".s.PGSQL.5432");
        // Each takes a store and two processes: a tenth of them a day, by turns.
        let mut at = u32::try_from(jiff::Timestamp::now().as_second() / 86_400 % 10).unwrap() + 1;
        let mut seen = 0;
        loop {
            server.psql("drums", "DROP SCHEMA public CASCADE; CREATE SCHEMA public").unwrap();
            let child = process(&through, None);
            relay(&listener, &socket, &child, at);
            let killed = killed(child);
            // Also a store whose making was interrupted is opened and completed.
            let done = steps_done(&all, &mut leading(&server.url()));
            assert!(done >= seen, "question {at}: {done} steps, {seen} before");
            seen = done;
            if !killed {
                break;
            }
            at += 10;
        }
        assert_eq!(seen, STEPS.len());
        assert!(at > 40, "{at} questions");
    }
}
