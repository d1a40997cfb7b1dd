//! A writer of `newc` cpio archives, the form of an initramfs. Deterministic: the caller gives the order, owners are
//! root, times are zero, inodes count up.

use std::io::{self, Write};

/// File type bits of the mode.
const DIR: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

pub struct Writer<W> {
    out: W,
    written: u64,
    inode: u32,
}

impl<W: Write> Writer<W> {
    pub fn new(out: W) -> Self {
        Self { out, written: 0, inode: 0 }
    }

    pub fn dir(&mut self, name: &str, mode: u32) -> io::Result<()> {
        self.entry(name, DIR | mode, &[])
    }

    pub fn file(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.entry(name, FILE | mode, content)
    }

    pub fn symlink(&mut self, name: &str, target: &str) -> io::Result<()> {
        self.entry(name, SYMLINK | 0o777, target.as_bytes())
    }

    /// Writes the trailer; another archive may follow directly.
    pub fn finish(mut self) -> io::Result<W> {
        self.inode = 0;
        self.header("TRAILER!!!", 0, 0, 0)?;
        self.pad(512)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        self.inode += 1;
        let size =
            u32::try_from(content.len()).map_err(|_| io::Error::other(format!("{name} is larger than 4 GiB")))?;
        self.header(name, self.inode, mode, size)?;
        self.put(content)?;
        self.pad(4)
    }

    fn header(&mut self, name: &str, inode: u32, mode: u32, size: u32) -> io::Result<()> {
        let links = if mode & DIR == DIR && mode & FILE == 0 { 2 } else { 1 };
        // magic, inode, mode, uid, gid, links, mtime, size, device (4), name's length, checksum
        let mut head = String::from("070701");
        for field in [inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name.len() as u32 + 1, 0] {
            head.push_str(&format!("{field:08x}"));
        }
        self.put(head.as_bytes())?;
        self.put(name.as_bytes())?;
        self.put(&[0])?;
        self.pad(4)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    fn pad(&mut self, to: u64) -> io::Result<()> {
        let missing = (to - self.written % to) % to;
        self.put(&vec![0; missing as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_the_form_that_the_kernel_reads() {
        let mut w = Writer::new(Vec::new());
        w.dir("a", 0o755).unwrap();
        w.file("a/b", 0o644, b"hello").unwrap();
        w.symlink("init", "a/b").unwrap();
        let bytes = w.finish().unwrap();
        assert_eq!(bytes.len() % 512, 0);
        // Walk it as a reader would.
        let mut at = 0;
        let mut seen = Vec::new();
        loop {
            let field = |i: usize| {
                u32::from_str_radix(std::str::from_utf8(&bytes[at + 6 + 8 * i..][..8]).unwrap(), 16).unwrap()
            };
            assert_eq!(&bytes[at..at + 6], b"070701");
            let (mode, size, name_len) = (field(1), field(6) as usize, field(11) as usize);
            let name = String::from_utf8(bytes[at + 110..at + 110 + name_len - 1].to_vec()).unwrap();
            let content = (at + 110 + name_len).next_multiple_of(4);
            if name == "TRAILER!!!" {
                break;
            }
            seen.push((name, mode, bytes[content..content + size].to_vec()));
            at = (content + size).next_multiple_of(4);
        }
        assert_eq!(
            seen,
            [
                ("a".to_owned(), 0o040_755, vec![]),
                ("a/b".to_owned(), 0o100_644, b"hello".to_vec()),
                ("init".to_owned(), 0o120_777, b"a/b".to_vec()),
            ]
        );
    }
}
