//! The process that the doctor's CRIU trial saves and restores: it listens on a loopback port, writes the port down, and
//! answers each connection with the same line. What has made CRIU fail on this kind of machine is an inet socket, so a
//! process without one proves nothing.

use std::{
    io::{self, Write as _},
    net::{Ipv4Addr, TcpListener},
    path::Path,
};

/// The hidden subcommand of `drums-agent` that runs this.
pub const SUBCOMMAND: &str = "selftest-listener";
pub const GREETING: &str = "drums selftest";

/// Serves until it is killed.
pub fn serve(port_file: &Path) -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    // Renamed into place: whoever sees the file sees the whole number.
    let fresh = port_file.with_extension("new");
    std::fs::write(&fresh, port.to_string())?;
    std::fs::rename(&fresh, port_file)?;
    loop {
        let (mut stream, _) = listener.accept()?;
        let _ = stream.write_all(GREETING.as_bytes());
    }
}
