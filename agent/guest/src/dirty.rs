//! Marks that a reset has to remove: a planted file, a planted process, a mark in this server's own memory.

use std::{
    fs, io,
    process::{Command, ExitCode, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use serde::Serialize;

use crate::children::Children;

/// First argument of the planted process; also how it is recognised.
pub const CHILD: &str = "dirty-child";
const FILE: &str = "/tmp/drums-dirty";
/// A process that cannot be seen by then was not planted, which the answer says.
const PLANTED_WITHIN: Duration = Duration::from_secs(2);

static MEMORY: AtomicBool = AtomicBool::new(false);

#[derive(Serialize)]
pub struct Dirty {
    pub file: bool,
    pub process: bool,
    pub memory: bool,
}

pub fn plant(children: &Children) -> io::Result<Dirty> {
    fs::write(FILE, b"planted\n")?;
    if !process_present()? {
        let mut command = Command::new("/proc/self/exe");
        command.arg(CHILD).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        children.start_detached(&mut command)?;
        // Its start is known before the kernel has given it its command line, by which it is recognised: a moment, for
        // which there is no event.
        let deadline = Instant::now() + PLANTED_WITHIN;
        while !process_present()? && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }
    MEMORY.store(true, Ordering::SeqCst);
    look()
}

/// What is there now, as the file system and the process table show it.
pub fn look() -> io::Result<Dirty> {
    Ok(Dirty { file: fs::exists(FILE)?, process: process_present()?, memory: MEMORY.load(Ordering::SeqCst) })
}

fn process_present() -> io::Result<bool> {
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        // A process may end between the listing and the reading.
        let Ok(line) = fs::read(entry.path().join("cmdline")) else { continue };
        if line.split(|b| *b == 0).nth(1) == Some(CHILD.as_bytes()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The planted process: there until it is killed.
pub fn child() -> ExitCode {
    loop {
        // SAFETY: pause has no arguments and touches no memory.
        unsafe { libc::pause() };
    }
}
