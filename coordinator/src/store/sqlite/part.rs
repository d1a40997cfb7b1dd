//! A transaction, or a part of the one that several jobs share.

use std::ops::Deref;

use rusqlite::Connection;

/// Taken back unless it is committed. `rusqlite::Savepoint` does the same and parses its statements each time, which is a
/// third of what a small write costs.
pub(super) struct Part<'c> {
    connection: &'c Connection,
    open: bool,
}

impl<'c> Part<'c> {
    pub fn begin(connection: &'c Connection) -> rusqlite::Result<Self> {
        run(connection, "SAVEPOINT part")?;
        Ok(Self { connection, open: true })
    }

    pub fn commit(mut self) -> rusqlite::Result<()> {
        run(self.connection, "RELEASE part")?;
        self.open = false;
        Ok(())
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        if self.open {
            // What cannot be taken back is taken back with the transaction around it, or by the file's next opening.
            let _ = run(self.connection, "ROLLBACK TO part").and_then(|()| run(self.connection, "RELEASE part"));
        }
    }
}

impl Deref for Part<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.connection
    }
}

/// A statement without parameters or rows, parsed once.
pub(super) fn run(connection: &Connection, statement: &str) -> rusqlite::Result<()> {
    connection.prepare_cached(statement)?.execute([]).map(drop)
}
