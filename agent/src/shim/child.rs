//! New processes: clone3, what the child does before its program runs, and how it tells when that fails.
//!
//! The shim has one thread, so the child may do as it likes (allocate, format) until it execs. It reports a failure on
//! a close-on-exec pipe as one JSON text; end of file means that the program runs.

use std::{
    ffi::{CString, OsStr},
    fs::{self, File, OpenOptions},
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::{
            ffi::OsStrExt as _,
            fs::{OpenOptionsExt as _, PermissionsExt as _, symlink},
        },
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    mount::{MntFlags, MsFlags, mount, umount2},
    poll::{PollFd, PollFlags, poll},
    sched::{CloneFlags, CpuSet, sched_setaffinity, setns},
    sys::{
        signal::{SigSet, SigmaskHow, Signal, sigprocmask},
        stat::{Mode, SFlag, makedev, mknod},
    },
    unistd::{Pid, chdir, pipe2, pivot_root, setsid},
};

use super::{namespaces::loopback_up, protocol::Failed};
use crate::{
    steps::Process,
    sys::{LeafOf, PreMount, SessionSpec, StdIo, ToolSpec, cgroup::Layout, procfs, signal, spec::OverlayRoot},
};

pub(super) struct Started {
    pub(super) process: Process,
    pub(super) pidfd: OwnedFd,
}

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A session's pid 1.
pub(super) fn session(spec: &SessionSpec, netns: Option<&OwnedFd>, layout: &Layout) -> Result<Started, Failed> {
    let program = Exec::new(&spec.argv, &spec.env)?;
    let mut flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    if spec.new_netns {
        flags |= libc::CLONE_NEWNET;
    } else if netns.is_none() {
        return Err(Failed::here("find the session's network namespace", Errno::EBADF));
    }
    spawn(flags, spec.leaf.as_ref(), layout, |report| {
        if let Some(netns) = netns {
            setns(netns, CloneFlags::CLONE_NEWNET).map_err(|e| Failed::here("enter its network namespace", e))?;
        }
        setsid().map_err(|e| Failed::here("start a session of its own", e))?;
        private_mounts()?;
        if spec.new_netns {
            loopback_up().map_err(|e| Failed::io("bring lo up", &e))?;
        }
        if !spec.hostname.is_empty() {
            nix::unistd::sethostname(&spec.hostname).map_err(|e| Failed::here("set its hostname", e))?;
        }
        // Opened before the root changes; without it, the standard streams are the new root's own null device, because
        // a file of the host as a standard stream cannot be saved by CRIU.
        let output = spec.output.as_deref().map(append).transpose()?;
        if let Some(root) = &spec.root {
            enter_root(root)?;
        }
        standard_streams(output.as_ref(), output.as_ref())?;
        die_with_parent(report)?;
        if spec.deny_pkeys {
            deny_pkeys()?;
        }
        program.exec()
    })
}

/// A tool of the host.
pub(super) fn tool(spec: &ToolSpec, fds: &[OwnedFd], layout: &Layout) -> Result<Started, Failed> {
    let mut argv = vec![spec.program.to_string_lossy().into_owned()];
    argv.extend(spec.args.iter().cloned());
    let mut env = spec.env.clone();
    if !env.iter().any(|(k, _)| k == "PATH") {
        env.push(("PATH".to_owned(), PATH.to_owned()));
    }
    let program = Exec::new(&argv, &env)?;
    let passed = spec.fds.len();
    if fds.len() < passed + usize::from(spec.enter_netns) {
        return Err(Failed::here("find the descriptors to pass on", Errno::EBADF));
    }
    let flags = if spec.mounts.is_empty() { 0 } else { libc::CLONE_NEWNS };
    spawn(flags, spec.leaf.as_ref(), layout, |report| {
        if spec.enter_netns {
            setns(&fds[passed], CloneFlags::CLONE_NEWNET)
                .map_err(|e| Failed::here("enter the network namespace", e))?;
        }
        setsid().map_err(|e| Failed::here("start a session of its own", e))?;
        if !spec.mounts.is_empty() {
            private_mounts()?;
            for m in &spec.mounts {
                pre_mount(m)?;
            }
        }
        if !spec.cpus.is_empty() {
            pin(&spec.cpus)?;
        }
        if let Some(cwd) = &spec.cwd {
            chdir(cwd).map_err(|e| Failed::here(format!("change to {}", cwd.display()), e))?;
        }
        let (out, err) = (stream(&spec.stdout)?, stream(&spec.stderr)?);
        standard_streams(out.as_ref(), err.as_ref())?;
        // Before descriptors are put in their places, the report's among them.
        die_with_parent(report)?;
        pass(&fds[..passed], &spec.fds)?;
        program.exec()
    })
}

/// clone3, join the group, run `body` in the child. Returns once the program runs or the child has told why not.
fn spawn(
    flags: i32,
    leaf: Option<&LeafOf>,
    layout: &Layout,
    body: impl FnOnce(&OwnedFd) -> Result<std::convert::Infallible, Failed>,
) -> Result<Started, Failed> {
    let join = leaf.map(|l| layout.join_files(l)).unwrap_or_default();
    let into = leaf.map(|l| layout.clone_into(l)).transpose().map_err(|e| Failed::io("open its control group", &e))?;
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC).map_err(|e| Failed::here("make a pipe", e))?;
    let (pid, pidfd) =
        clone3(flags, into.flatten().as_ref().map(|f| f.as_fd())).map_err(|e| Failed::here("clone a process", e))?;
    let Some(pidfd) = pidfd else {
        // The child. It never returns from here.
        drop(reader);
        let Err(mut failed) = prepare(&join).and_then(|()| body(&writer));
        failed.in_child = true;
        let text = serde_json::to_vec(&failed).unwrap_or_default();
        let _ = File::from(writer).write_all(&text);
        // SAFETY: ends this process at once, without running destructors that are the shim's.
        unsafe { libc::_exit(127) }
    };
    drop(writer);
    let mut text = String::new();
    let read = wait_for(&reader).and_then(|()| File::from(reader).read_to_string(&mut text));
    let failed = match read {
        Ok(_) if text.is_empty() => None,
        Ok(_) => Some(serde_json::from_str(&text).unwrap_or_else(|_| Failed::here(text.clone(), Errno::EIO))),
        Err(e) => Some(Failed::io("hear from the new process", &e)),
    };
    if let Some(failed) = failed {
        let _ = signal::send(&pidfd, libc::SIGKILL);
        return Err(failed);
    }
    // It cannot have been reaped yet: only our own loop reaps.
    match procfs::stat(pid) {
        Ok(Some(stat)) => Ok(Started { process: Process { pid, start: stat.start }, pidfd }),
        Ok(None) => Err(Failed::here("find the new process", Errno::ESRCH)),
        Err(e) => Err(Failed::io("look at the new process", &e)),
    }
}

/// What a child does before its program runs takes milliseconds. One that hangs (a mount on a dead server, say) must
/// not take the shim with it.
const START_TIMEOUT_MS: u16 = 30_000;

fn wait_for(reader: &OwnedFd) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::new(reader.as_fd(), PollFlags::POLLIN)], START_TIMEOUT_MS) {
            Ok(0) => return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT)),
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// libc's constant of that name overflows its type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// In the parent: pid and pidfd; in the child: no pidfd.
fn clone3(flags: i32, into: Option<BorrowedFd<'_>>) -> Result<(i32, Option<OwnedFd>), Errno> {
    let mut pidfd: RawFd = -1;
    // SAFETY: clone_args is plain data for which all zeroes is a value.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = u64::from((flags | libc::CLONE_PIDFD).cast_unsigned());
    args.pidfd = &raw mut pidfd as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(into) = into {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = into.as_raw_fd() as u64;
    }
    // SAFETY: no CLONE_VM, so the child has a copy of this single-threaded process and its own stack: it behaves as
    // after fork. The kernel writes the descriptor to `pidfd`, which outlives the call.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
    match pid {
        -1 => Err(Errno::last()),
        0 => Ok((0, None)),
        #[allow(clippy::cast_possible_truncation)] // pids are ints
        pid => {
            // SAFETY: CLONE_PIDFD has put a new descriptor there, close-on-exec, that nobody else owns.
            Ok((pid as i32, Some(unsafe { OwnedFd::from_raw_fd(pidfd) })))
        }
    }
}

/// First of all the limits: nothing that the child does is outside them.
fn prepare(join: &[PathBuf]) -> Result<(), Failed> {
    for path in join {
        OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|mut f| f.write_all(b"0"))
            .map_err(|e| Failed::io(format!("join {}", path.display()), &e))?;
    }
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)
        .map_err(|e| Failed::here("unblock its signals", e))?;
    nix::sys::stat::umask(Mode::from_bits_truncate(0o022));
    // Ignored signals survive exec, and Rust's runtime ignores SIGPIPE, a shell's background jobs SIGINT and SIGQUIT:
    // whatever the agent's starter did must not reach sessions.
    // By the system call: the C library keeps 32 and 33 for itself and refuses to change them. The kernel's structure on
    // x86_64 is handler, flags, restorer and mask, 8 bytes each; all zero is SIG_DFL.
    let default = [0_u64; 4];
    for signal in 1..=64 {
        let (none, mask_bytes) = (std::ptr::null::<u64>(), size_of::<u64>());
        // SAFETY: `default` outlives the call, which reads 32 bytes of it; no handler is involved. The numbers that cannot
        // be changed (KILL, STOP) are refused, which is fine.
        unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), none, mask_bytes) };
    }
    Ok(())
}

fn private_mounts() -> Result<(), Failed> {
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        .map_err(|e| Failed::here("make its mounts private", e))
}

fn mount_overlay(o: &OverlayRoot) -> Result<(), Failed> {
    let lower: Vec<String> = o.lower.iter().map(|p| p.display().to_string()).collect();
    // index and nfs_export: or CRIU walks the whole overlay for every watch.
    let options = format!(
        "lowerdir={},upperdir={},workdir={},index=on,nfs_export=on",
        lower.join(":"),
        o.upper.display(),
        o.work.display()
    );
    mount(Some("overlay"), &o.target, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
        .map_err(|e| Failed::here(format!("mount an overlay on {} with {options}", o.target.display()), e))
}

fn pre_mount(m: &PreMount) -> Result<(), Failed> {
    match m {
        PreMount::Overlay(o) => mount_overlay(o),
        PreMount::Bind { source, target, read_only } => {
            let fail = |e| Failed::here(format!("bind {} to {}", source.display(), target.display()), e);
            mount(Some(source), target, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
                .map_err(fail)?;
            if *read_only {
                let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
                mount(None::<&str>, target, None::<&str>, flags, None::<&str>).map_err(fail)?;
            }
            Ok(())
        }
        PreMount::Tmpfs { target, options } => {
            mount(Some("tmpfs"), target, Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some(options.as_str()))
                .map_err(|e| Failed::here(format!("mount a tmpfs on {}", target.display()), e))
        }
    }
}

/// Overlay, kernel file systems and devices, then `/` is it and the host's root is gone.
fn enter_root(root: &OverlayRoot) -> Result<(), Failed> {
    mount_overlay(root)?;
    let at = |e: Errno, what: &str| Failed::here(format!("{what} in the new root"), e);
    chdir(&root.target).map_err(|e| at(e, "stand"))?;
    for name in ["proc", "sys", "dev", "tmp", "run"] {
        folder(name, if name == "tmp" { 0o1777 } else { 0o755 })?;
    }
    let kernel = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "proc", Some("proc"), kernel, None::<&str>).map_err(|e| at(e, "mount /proc"))?;
    mount(Some("sysfs"), "sys", Some("sysfs"), kernel | MsFlags::MS_RDONLY, None::<&str>)
        .map_err(|e| at(e, "mount /sys"))?;
    devices()?;
    pivot_root(".", ".").map_err(|e| at(e, "pivot"))?;
    umount2(".", MntFlags::MNT_DETACH).map_err(|e| at(e, "let go of the old root"))?;
    chdir("/").map_err(|e| at(e, "stand at /"))
}

/// Devices live in the overlay's upper layer, itself a tmpfs: every tmpfs of its own would be another archive that
/// CRIU unpacks with tar on each restore.
fn devices() -> Result<(), Failed> {
    const NODES: [(&str, u64, u64); 6] =
        [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];
    for (name, major, minor) in NODES {
        let path = Path::new("dev").join(name);
        let fail = |e: Errno| Failed::here(format!("make the device /{}", path.display()), e);
        match mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(major, minor)) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(e) => return Err(fail(e)),
        }
        // mknod's mode goes through the umask.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666))
            .map_err(|e| Failed::io(format!("open the device /{} to all", path.display()), &e))?;
    }
    folder("dev/pts", 0o755)?;
    folder("dev/shm", 0o1777)?;
    mount(
        Some("devpts"),
        "dev/pts",
        Some("devpts"),
        MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC,
        Some("newinstance,ptmxmode=0666,mode=620"),
    )
    .map_err(|e| Failed::here("mount /dev/pts in the new root", e))?;
    let links = [
        ("pts/ptmx", "ptmx"),
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
    ];
    for (to, name) in links {
        match symlink(to, Path::new("dev").join(name)) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(Failed::io(format!("make the link /dev/{name}"), &e));
            }
            _ => {}
        }
    }
    Ok(())
}

fn folder(path: &str, mode: u32) -> Result<(), Failed> {
    match fs::create_dir(path) {
        Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(mode)),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
    }
    .map_err(|e| Failed::io(format!("make the folder /{path} in the new root"), &e))
}

fn append(path: &Path) -> Result<File, Failed> {
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(libc::O_CLOEXEC)
        .open(path)
        .map_err(|e| Failed::io(format!("open {}", path.display()), &e))
}

fn stream(to: &StdIo) -> Result<Option<File>, Failed> {
    match to {
        StdIo::Null => Ok(None),
        StdIo::File(path) => append(path).map(Some),
    }
}

fn standard_streams(out: Option<&File>, err: Option<&File>) -> Result<(), Failed> {
    let null =
        OpenOptions::new().read(true).write(true).open("/dev/null").map_err(|e| Failed::io("open /dev/null", &e))?;
    for (number, file) in [(0, &null), (1, out.unwrap_or(&null)), (2, err.unwrap_or(&null))] {
        dup2(file.as_raw_fd(), number)?;
    }
    Ok(())
}

fn dup2(from: RawFd, to: RawFd) -> Result<(), Failed> {
    // SAFETY: plain system call; the target is a standard stream or a number that the agent asked for, and nothing in
    // this process owns it any more.
    if unsafe { libc::dup2(from, to) } < 0 {
        return Err(Failed::here(format!("set descriptor {to}"), Errno::last()));
    }
    Ok(())
}

/// Out of each other's way first, then to their places.
fn pass(fds: &[OwnedFd], numbers: &[i32]) -> Result<(), Failed> {
    const APART: i32 = 512;
    let mut apart = Vec::new();
    for fd in fds {
        apart.push(
            fcntl(fd.as_fd(), FcntlArg::F_DUPFD_CLOEXEC(APART))
                .map_err(|e| Failed::here("set a descriptor aside", e))?,
        );
    }
    for (&from, &to) in apart.iter().zip(numbers) {
        dup2(from, to)?;
        // SAFETY: `to` was opened by the line above and stays open until exec.
        let target = unsafe { BorrowedFd::borrow_raw(to) };
        fcntl(target, FcntlArg::F_SETFD(FdFlag::empty())).map_err(|e| Failed::here("pass a descriptor", e))?;
    }
    Ok(())
}

fn pin(cpus: &[u32]) -> Result<(), Failed> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        set.set(cpu as usize).map_err(|e| Failed::here(format!("name CPU {cpu}"), e))?;
    }
    sched_setaffinity(Pid::from_raw(0), &set).map_err(|e| Failed::here("keep to its CPUs", e))
}

/// PDEATHSIG follows the parent thread: the shim's only one. It says nothing of a parent that was gone before, and in a
/// pid namespace of its own a child cannot ask who its parent is; but only the shim reads its report.
fn die_with_parent(report: &OwnedFd) -> Result<(), Failed> {
    nix::sys::prctl::set_pdeathsig(Some(Signal::SIGKILL)).map_err(|e| Failed::here("ask to die with the shim", e))?;
    let mut fds = [PollFd::new(report.as_fd(), PollFlags::empty())];
    match poll(&mut fds, 0u8) {
        Ok(0) => Ok(()),
        Ok(_) => Err(Failed::here("find the shim alive", Errno::EPIPE)),
        Err(e) => Err(Failed::here("look for the shim", e)),
    }
}

/// CRIU restores no protection keys: a program that got one would fail at its next mprotect after a restore. ENOSPC is
/// what a machine without free keys answers, so programs carry on without.
fn deny_pkeys() -> Result<(), Failed> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    // AUDIT_ARCH_X86_64; numbers of other architectures (the 32-bit entry) mean other calls and pass.
    const ARCH: u32 = 0xc000_003e;
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // system call and error numbers are small
    let (call, refusal) = (libc::SYS_pkey_alloc as u32, libc::SECCOMP_RET_ERRNO | libc::ENOSPC as u32);
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        step(LOAD, 0, 0, 4),
        step(EQUAL, 0, 3, ARCH),
        step(LOAD, 0, 0, 0),
        step(EQUAL, 0, 1, call),
        step(RETURN, 0, 0, refusal),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: 6, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter live through the call; the kernel copies them.
    let r = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    if r < 0 {
        return Err(Failed::here("install its system call filter", Errno::last()));
    }
    Ok(())
}

/// A program with everything that exec needs, made before the clone.
struct Exec {
    path: CString,
    argv: Vec<CString>,
    env: Vec<CString>,
}

impl Exec {
    fn new(argv: &[String], env: &[(String, String)]) -> Result<Self, Failed> {
        let c = |s: &OsStr| CString::new(s.as_bytes()).map_err(|_| Failed::here("write its arguments", Errno::EINVAL));
        let argv = argv.iter().map(|a| c(OsStr::new(a))).collect::<Result<Vec<_>, _>>()?;
        let env = env.iter().map(|(k, v)| c(OsStr::new(&format!("{k}={v}")))).collect::<Result<Vec<_>, _>>()?;
        let path = argv.first().cloned().ok_or_else(|| Failed::here("find its program", Errno::EINVAL))?;
        Ok(Self { path, argv, env })
    }

    fn exec(&self) -> Result<std::convert::Infallible, Failed> {
        nix::unistd::execve(&self.path, &self.argv, &self.env)
            .map_err(|e| Failed::here(format!("run {}", self.path.to_string_lossy()), e))
    }
}
