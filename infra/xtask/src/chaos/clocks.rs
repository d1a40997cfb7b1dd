//! Other clocks for one process: a time namespace of its own, in which boot time and monotonic time are later than the
//! machine's. The machine's clocks stay as they are. The wall clock has no namespace: a step of it would be the machine's.

use std::{ffi::CString, io, os::unix::process::CommandExt as _, process::Command};

/// Makes the process of this command begin with clocks that are `hours` ahead.
pub fn ahead(command: &mut Command, hours: u32) {
    let seconds = u64::from(hours) * 3_600;
    let offsets = format!("monotonic {seconds} 0\nboottime {seconds} 0\n");
    // Literals without a NUL.
    let (file, space) =
        (CString::from(c"/proc/self/timens_offsets"), CString::from(c"/proc/self/ns/time_for_children"));
    let enter = move || {
        let last = |ok: bool| if ok { Ok(()) } else { Err(io::Error::last_os_error()) };
        // SAFETY: between fork and exec only system calls are made, on strings and descriptors that outlive them.
        unsafe {
            last(libc::unshare(libc::CLONE_NEWTIME) == 0)?;
            let to = libc::open(file.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
            last(to >= 0)?;
            let written = libc::write(to, offsets.as_ptr().cast(), offsets.len());
            last(usize::try_from(written) == Ok(offsets.len()))?;
            // The namespace is for children until one enters it; this process is its first.
            let ours = libc::open(space.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
            last(ours >= 0)?;
            last(libc::setns(ours, libc::CLONE_NEWTIME) == 0)
        }
    };
    // SAFETY: see `enter`.
    unsafe { command.pre_exec(enter) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn up_hours(command: &mut Command) -> f64 {
        let out = command.output().unwrap();
        assert!(out.status.success(), "{out:?}");
        let text = String::from_utf8(out.stdout).unwrap();
        text.split(' ').next().unwrap().parse::<f64>().unwrap() / 3_600.0
    }

    #[test]
    fn live_a_process_has_other_clocks_and_the_machine_has_not() {
        let uptime = || {
            let mut command = Command::new("cat");
            command.arg("/proc/uptime");
            command
        };
        let before = up_hours(&mut uptime());
        let mut stepped = uptime();
        ahead(&mut stepped, 100);
        let there = up_hours(&mut stepped);
        let after = up_hours(&mut uptime());
        assert!((99.9..100.1).contains(&(there - before)), "{before} {there}");
        assert!(after - before < 0.1, "{before} {after}");
    }
}
