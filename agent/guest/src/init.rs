//! Pid 1: brings up what is missing, then waits for connections, dead children and the word to stop.
//!
//! Nothing but configuration tells the arms apart here. A namespace arrives with /proc, devices and a configured link; a
//! kernel of our own arrives with none of these, so the same steps find more to do.

use std::{
    fs, io,
    net::{Ipv4Addr, TcpListener},
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    mount::{MsFlags, mount},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};

use crate::{
    children::end_all,
    config::Config,
    link,
    server::Server,
    session::{self, Session},
};

/// Names of the kernel modules, in the order in which they load.
const MODULE_LIST: &str = "/lib/modules/drums.list";
/// How long the link may take to appear after its driver was loaded.
const LINK_LIMIT: Duration = Duration::from_secs(10);
/// How long other processes get between the word to stop and the end.
const PATIENCE: Duration = Duration::from_millis(500);

/// Runs until told to stop. `duties` is false for a plain server, which is no init even if it happens to be pid 1.
pub fn run(duties: bool) -> ExitCode {
    let pid1 = duties && std::process::id() == 1;
    if pid1 {
        mount_missing();
    }
    let command_line = if pid1 { fs::read_to_string("/proc/cmdline").unwrap_or_default() } else { String::new() };
    let config = match Config::read(std::env::vars(), &command_line) {
        Ok(config) => config,
        Err(why) => return fail(pid1, &format!("cannot use the configuration: {why}")),
    };
    match serve(&config, duties, pid1) {
        Ok(()) if pid1 && config.own_kernel => power_off(),
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => fail(pid1 && config.own_kernel, &e.to_string()),
    }
}

fn serve(config: &Config, duties: bool, pid1: bool) -> io::Result<()> {
    // Blocked before the first thread exists, so that every thread inherits it and only the descriptor delivers.
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGPWR] {
        signals.add(signal);
    }
    signals.thread_block()?;
    let signal_fd = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;

    if duties {
        if let Some(name) = &config.hostname {
            session::set_hostname(name).map_err(|e| during(&format!("set the hostname {name}"), &e))?;
        }
        if let Some(id) = &config.machine_id {
            session::set_machine_id(id).map_err(|e| during("write /etc/machine-id", &e))?;
        }
        if config.own_kernel {
            load_modules()?;
            link::loopback()?;
            if let Some(address) = config.address {
                wait_for_link()?;
                link::configure(address, config.gateway, config.gateway_mac)?;
            }
        }
    }

    let mut seed = [0; 32];
    random(&mut seed)?;
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, config.port))
        .map_err(|e| during(&format!("listen on port {}", config.port), &e))?;
    // Poll says that a connection waits, but it may be gone by the time it is accepted.
    listener.set_nonblocking(true)?;
    let server = Arc::new(Server::new(Session::new(config, &seed)));
    // The line that a serial console shows when all is well.
    eprintln!("drums-guest: ready on {} port {}", link::current(), listener.local_addr()?.port());

    loop {
        let mut fds =
            [PollFd::new(listener.as_fd(), PollFlags::POLLIN), PollFd::new(signal_fd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
        let [connection, signal] = fds.map(|fd| fd.any().unwrap_or(true));
        if connection {
            server.accept(&listener);
        }
        if signal {
            while let Ok(Some(info)) = signal_fd.read_signal() {
                if info.ssi_signo != libc::SIGCHLD as u32 {
                    drop(listener);
                    if pid1 {
                        end_all(&server.children, PATIENCE);
                    }
                    return Ok(());
                }
            }
            server.children.reap();
        }
    }
}

/// What a bare kernel leaves undone. A place that is already mounted is left as it is.
fn mount_missing() {
    let plain = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    for (kind, target, sign, flags) in [
        ("proc", "/proc", "/proc/self", plain),
        ("sysfs", "/sys", "/sys/kernel", plain),
        ("devtmpfs", "/dev", "/dev/null", MsFlags::MS_NOSUID),
    ] {
        if Path::new(sign).exists() {
            continue;
        }
        let _ = fs::create_dir_all(target);
        if let Err(e) = mount(Some(kind), target, Some(kind), flags, None::<&str>) {
            eprintln!("drums-guest: cannot mount {kind} on {target}: {e}");
        }
    }
}

/// Loads the modules of the second archive, in its order. Without a list there is nothing to load.
fn load_modules() -> io::Result<()> {
    let list = match fs::read_to_string(MODULE_LIST) {
        Ok(list) => list,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(during(&format!("read {MODULE_LIST}"), &e)),
    };
    let folder = Path::new("/lib/modules");
    for name in list.lines().map(str::trim).filter(|l| !l.is_empty()) {
        let path = folder.join(name);
        let file = fs::File::open(&path).map_err(|e| during(&format!("open {}", path.display()), &e))?;
        // SAFETY: the descriptor is open for the call and the parameters are an empty C string.
        let result = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
        let error = io::Error::last_os_error();
        if result != 0 && error.kind() != io::ErrorKind::AlreadyExists {
            return Err(during(&format!("load {}", path.display()), &error));
        }
    }
    Ok(())
}

/// Drivers probe their devices while they load, so the link is normally there at the first look.
fn wait_for_link() -> io::Result<()> {
    let path = Path::new("/sys/class/net").join(link::LINK);
    let deadline = Instant::now() + LINK_LIMIT;
    while !path.exists() {
        if Instant::now() >= deadline {
            return Err(io::Error::other(format!("{} did not appear within {LINK_LIMIT:?}", link::LINK)));
        }
        // There is no descriptor to wait on without netlink; a millisecond is far below what is measured.
        let _ = poll(&mut [], 1u8);
    }
    Ok(())
}

fn random(out: &mut [u8; 32]) -> io::Result<()> {
    // SAFETY: the buffer is valid for its length. Up to 256 bytes arrive whole once the generator is seeded.
    let n = unsafe { libc::getrandom(out.as_mut_ptr().cast(), out.len(), 0) };
    if n == out.len() as isize { Ok(()) } else { Err(during("draw random bytes", &io::Error::last_os_error())) }
}

fn during(what: &str, e: &io::Error) -> io::Error {
    io::Error::new(e.kind(), format!("cannot {what}: {e}"))
}

/// An init that returns makes the kernel panic; where the kernel is ours, the machine is switched off instead.
fn fail(own_kernel: bool, why: &str) -> ExitCode {
    eprintln!("drums-guest: {why}");
    if own_kernel { power_off() } else { ExitCode::FAILURE }
}

fn power_off() -> ExitCode {
    match nix::sys::reboot::reboot(nix::sys::reboot::RebootMode::RB_POWER_OFF) {
        Ok(never) => match never {},
        Err(e) => {
            eprintln!("drums-guest: cannot switch off: {e}");
            ExitCode::FAILURE
        }
    }
}
