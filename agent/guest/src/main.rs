//! A session's init and small guest server, the same binary and the same role in every arm.
//!
//! `drums-guest init` is pid 1: it brings up what a bare kernel leaves undone, reaps, and answers HTTP. It knows nothing
//! of arms: what differs (a virtual machine has to load modules and configure its own link, a namespace arrives ready)
//! is a matter of the configuration that it finds. Everything here has to survive a checkpoint by CRIU at any moment,
//! so: plain blocking sockets, threads only while a connection lasts, no inotify, no timers.

mod chacha;
mod children;
mod config;
mod dirty;
mod execute;
mod files;
mod http;
mod init;
mod link;
mod server;
mod session;

use std::process::ExitCode;

const USAGE: &str = "drums-guest: a session's init and guest server

Usage: drums-guest init      be pid 1: mount what is missing, configure, serve, reap
       drums-guest serve     only serve (any pid; nothing is mounted or named)
       drums-guest --version

Settings come from DRUMS_* in the environment or, when there is none of these, from drums.* on the kernel's command
line: hostname, machine_id, port (5000), boot (vm: this kernel is ours), address, gateway, gateway_mac.
";

fn main() -> ExitCode {
    let first = std::env::args().nth(1);
    match first.as_deref() {
        Some("init") => init::run(true),
        Some("serve") => init::run(false),
        Some(dirty::CHILD) => dirty::child(),
        Some("--version") => {
            println!("drums-guest {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        // A kernel that starts us as its init need not be told so.
        None if std::process::id() == 1 => init::run(true),
        _ => {
            eprint!("{USAGE}");
            ExitCode::from(2)
        }
    }
}
