//! The ledger's file: one row a line, `CHECKSUM JSON`, appended only. A row that the end of the machine or of the agent
//! cut off is dropped when the file is opened; damage anywhere else is an error, never skipped.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use drums_common::digest::Sha256;

use super::{LedgerError, Row};

/// Disk space taken ahead, so that a full disk does not keep the ledger from noting what was undone.
const RESERVED: i64 = 8 << 20;

#[derive(Debug)]
pub(super) struct Journal {
    file: File,
    path: PathBuf,
    bytes: u64,
}

impl Journal {
    pub(super) fn open(path: &Path) -> Result<(Self, Vec<Row>), LedgerError> {
        let fail = |what| move |source| LedgerError::Io { what, path: path.to_owned(), source };
        let file =
            File::options().create(true).truncate(false).read(true).append(true).open(path).map_err(fail("open"))?;
        let bytes = fs::read(path).map_err(fail("read"))?;
        let (rows, whole) =
            parse(&bytes).map_err(|(at, why)| LedgerError::Damaged { path: path.to_owned(), at, why })?;
        if whole < bytes.len() as u64 {
            file.set_len(whole).map_err(fail("cut the torn end off"))?;
        }
        Ok((Self { file, path: path.to_owned(), bytes: whole }, rows))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// One row; on disk when `sync`. A row that was written in part only is taken back.
    pub(super) fn append(&mut self, row: &Row, sync: bool) -> Result<(), LedgerError> {
        let fail = |what, source| LedgerError::Io { what, path: self.path.clone(), source };
        let line = line(row);
        if let Err(source) = self.file.write_all(line.as_bytes()) {
            let _ = self.file.set_len(self.bytes);
            return Err(fail("append to", source));
        }
        // Also if it is not synced: it is in the file, and what is cut later must not be what follows it.
        self.bytes += line.len() as u64;
        if sync {
            self.file.sync_data().map_err(|source| fail("sync", source))?;
        }
        Ok(())
    }

    /// Replaces the whole file, atomically.
    pub(super) fn rewrite(&mut self, rows: &[Row]) -> Result<(), LedgerError> {
        let path = self.path.clone();
        let fail = |what| {
            let path = path.clone();
            move |source| LedgerError::Io { what, path, source }
        };
        let fresh = path.with_extension("new");
        let text: String = rows.iter().map(line).collect();
        let written = File::create(&fresh).and_then(|mut f| f.write_all(text.as_bytes()).and_then(|()| f.sync_all()));
        if let Err(e) = written {
            let _ = fs::remove_file(&fresh);
            return Err(fail("rewrite")(e));
        }
        fs::rename(&fresh, &path).map_err(fail("replace"))?;
        let folder = path.parent().unwrap_or(Path::new("/"));
        File::open(folder).and_then(|d| d.sync_all()).map_err(fail("sync the folder of"))?;
        self.file = File::options().append(true).open(&path).map_err(fail("open"))?;
        self.bytes = text.len() as u64;
        // A file system without reservation (EOPNOTSUPP) still has a ledger.
        // SAFETY: plain system call on our own open descriptor.
        let r = unsafe { libc::fallocate(self.file.as_raw_fd(), libc::FALLOC_FL_KEEP_SIZE, 0, RESERVED) };
        if r < 0 {
            let e = io::Error::last_os_error();
            if e.raw_os_error() != Some(libc::EOPNOTSUPP) {
                return Err(fail("reserve space for")(e));
            }
        }
        Ok(())
    }
}

fn line(row: &Row) -> String {
    // Rows are enums of strings, numbers and paths made by us from UTF-8: they always serialise.
    let json = serde_json::to_string(row).unwrap_or_default();
    format!("{} {json}\n", checksum(&json))
}

fn checksum(json: &str) -> String {
    Sha256::of(json.as_bytes()).short()
}

/// Rows, and the number of bytes that hold whole ones.
fn parse(bytes: &[u8]) -> Result<(Vec<Row>, u64), (u64, String)> {
    let mut rows = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let Some(end) = rest.iter().position(|&b| b == b'\n') else { break };
        match row(&rest[..end]) {
            Ok(row) => rows.push(row),
            // A complete last line may be torn in its middle: blocks reach the disk in any order.
            Err(_) if at + end + 1 == bytes.len() => break,
            Err(why) => return Err((at as u64, why)),
        }
        at += end + 1;
    }
    Ok((rows, at as u64))
}

fn row(line: &[u8]) -> Result<Row, String> {
    let text = std::str::from_utf8(line).map_err(|_| "not UTF-8".to_owned())?;
    let (sum, json) = text.split_once(' ').ok_or("no checksum")?;
    if sum != checksum(json) {
        return Err("the checksum does not match".to_owned());
    }
    serde_json::from_str(json).map_err(|e| format!("not a row of this version: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row whose sync failed is in the file all the same. Not counted, it would be rows after it that are cut when a later
    /// one is written in part.
    #[test]
    fn a_row_that_was_not_synced_is_counted() {
        // It takes bytes, and cannot be synced.
        let (_reader, writer) = io::pipe().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        let mut journal = Journal { file, path: "pipe".into(), bytes: 0 };
        let numbers = Row::Numbers { below: 1 };
        let failed = journal.append(&numbers, true).unwrap_err();
        assert!(matches!(failed, LedgerError::Io { what: "sync", .. }), "{failed}");
        assert_eq!(journal.bytes(), line(&numbers).len() as u64);
    }

    /// Whatever the file holds: whole rows, or the place of the damage; what was read can be written and read again.
    #[test]
    fn fuzz_the_ledger() {
        let rows =
            [Row::Numbers { below: 17 }, Row::Intent { plan: "s7".into(), boot: "boot".into(), resources: Vec::new() }];
        let good: String = rows.iter().map(line).collect();
        assert_eq!(parse(good.as_bytes()).unwrap().0, rows);
        let seeds = vec![good.into_bytes(), br#"{"numbers":{"below":1}}"#.to_vec()];
        drums_fuzz::decoder!(seeds, |bytes: &[u8]| {
            // As the file, and as a row whose checksum is right.
            let json = String::from_utf8_lossy(bytes).replace('\n', "");
            let sealed = format!("{} {json}\n", checksum(&json));
            for bytes in [bytes, sealed.as_bytes()] {
                match parse(bytes) {
                    Ok((rows, whole)) => {
                        assert!(whole <= bytes.len() as u64);
                        let text: String = rows.iter().map(line).collect();
                        assert_eq!(parse(text.as_bytes()).unwrap().0, rows);
                    }
                    Err((at, _)) => assert!(at < bytes.len() as u64),
                }
            }
        });
    }
}
