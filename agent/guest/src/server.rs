//! Accepts connections and routes requests. One thread per connection, few at a time, so that a command that runs for
//! a minute never delays an answer to the prober; between requests there is exactly one thread.
//!
//! ```text
//! GET  /drums/ready?nonce=HEX   echoes the nonce (endpoint E3), with who the session is and what it carries
//! GET  /drums/digest            SHA-256 of the running binary; apart, so that no arm pays for it while it is timed
//! POST /drums/state             the mark that a template sets before it is saved
//! POST /drums/personalise       the post-restore call; a new address is taken once the caller has closed
//! POST /drums/dirty   GET ..    plants, and looks for, what a reset has to remove
//! GET  /platform   POST /execute   GET /screenshot   POST /setup/upload   POST /file      as OSWorld's server
//! ```

use std::{
    io::{self, Read, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{
    children::Children,
    dirty, execute, files,
    http::{self, Bad, Request, Response},
    session::{self, Session, Switch},
};

const MAX_CONNECTIONS: usize = 16;
/// From accept to the end of the request. Long enough for an upload, short enough that idle peers never fill the places.
const REQUEST_LIMIT: Duration = Duration::from_secs(30);
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// How long a peer may keep its side open after an answer that is followed by a new address.
const LINGER_LIMIT: Duration = Duration::from_millis(500);

pub struct Server {
    pub session: Session,
    pub children: Children,
    open: AtomicUsize,
}

impl Server {
    pub fn new(session: Session) -> Self {
        Self { session, children: Children::default(), open: AtomicUsize::new(0) }
    }

    /// Takes one waiting connection and serves it in a thread of its own.
    pub fn accept(self: &Arc<Self>, listener: &TcpListener) {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // The peer may be gone already, or descriptors are short for a moment: the next poll tells.
            Err(_) => return,
        };
        let place = Place::take(self);
        let Some(place) = place else { return refuse(stream) };
        let server = Arc::clone(self);
        let spawned = std::thread::Builder::new().stack_size(256 * 1024).spawn(move || {
            let _place = place;
            server.serve(stream);
        });
        if let Err(e) = spawned {
            eprintln!("drums-guest: cannot start a thread for a connection: {e}");
        }
    }

    fn serve(&self, stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        let _ = stream.set_write_timeout(Some(ANSWER_LIMIT));
        let mut timed = Timed { stream: &stream, deadline: Instant::now() + REQUEST_LIMIT };
        let (response, switch) = match http::read(&mut timed) {
            Ok(request) => self.route(&request),
            Err(Bad::Gone) => return,
            Err(Bad::Refuse(status, why)) => (Response::error(status, why), None),
        };
        // If nobody heard us, an announced switch still has to happen, or the peer would look at the wrong address.
        let _ = response.write_to(&mut &stream).and_then(|()| stream.shutdown(Shutdown::Write));
        drain(&stream, if switch.is_some() { LINGER_LIMIT } else { Duration::from_millis(50) });
        if let Some(Err(e)) = switch.as_ref().map(Switch::apply) {
            eprintln!("drums-guest: {e}");
        }
    }

    fn route(&self, request: &Request) -> (Response, Option<Switch>) {
        let response = match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/drums/ready") => self.session.ready(request),
            ("GET", "/drums/digest") => session::digest(),
            ("POST", "/drums/state") => self.session.set_state(request),
            ("POST", "/drums/personalise") => return self.session.personalise(request),
            ("GET", "/drums/dirty") => dirty_answer(dirty::look()),
            ("POST", "/drums/dirty") => dirty_answer(dirty::plant(&self.children)),
            ("GET", "/platform") => Response::text("Linux"),
            ("POST", "/execute" | "/setup/execute") => execute::execute(&request.body, &self.children),
            ("GET", "/screenshot") => screenshot(),
            ("POST", "/setup/upload") => files::upload(request),
            ("POST", "/file") => files::download(request),
            (_, path) if known(path) => Response::error(405, format!("{path} does not take {}", request.method)),
            (_, path) => Response::error(404, format!("there is no {path} here")),
        };
        (response, None)
    }
}

fn known(path: &str) -> bool {
    matches!(
        path,
        "/drums/ready"
            | "/drums/digest"
            | "/drums/state"
            | "/drums/personalise"
            | "/drums/dirty"
            | "/platform"
            | "/execute"
            | "/setup/execute"
            | "/screenshot"
            | "/setup/upload"
            | "/file"
    )
}

fn dirty_answer(found: io::Result<dirty::Dirty>) -> Response {
    match found {
        Ok(found) => Response::json(200, &found),
        Err(e) => Response::error(500, format!("cannot plant or look for the marks: {e}")),
    }
}

/// A picture where there is a display and a program that takes one.
fn screenshot() -> Response {
    const SCROT: &str = "/usr/bin/scrot";
    if std::env::var_os("DISPLAY").is_none() || !Path::new(SCROT).exists() {
        return Response::error(501, "this session has no display");
    }
    let file = format!("/tmp/drums-screenshot-{}.png", std::process::id());
    let shot = Command::new(SCROT).args(["-p", "-o", &file]).stdin(Stdio::null()).stdout(Stdio::null()).status();
    let result = shot.and_then(|_| std::fs::read(&file));
    let _ = std::fs::remove_file(&file);
    match result {
        Ok(body) => Response { status: 200, content_type: "image/png", body },
        Err(e) => Response::error(500, format!("cannot take a picture with {SCROT}: {e}")),
    }
}

/// One of the few places for connections.
struct Place(Arc<Server>);

impl Place {
    fn take(server: &Arc<Server>) -> Option<Self> {
        let place = Self(Arc::clone(server));
        // Dropping the place gives it back, also when there was none left.
        if server.open.fetch_add(1, Ordering::SeqCst) < MAX_CONNECTIONS { Some(place) } else { None }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

fn refuse(mut stream: TcpStream) {
    let _ = stream.set_nonblocking(true);
    let mut answer = Vec::new();
    if Response::error(503, "too many connections; try again").write_to(&mut answer).is_ok() {
        let _ = stream.write_all(&answer);
    }
}

/// Reads what the peer still sends, until it closes: closing over unread bytes would reset the connection and take the
/// answer with it.
fn drain(stream: &TcpStream, limit: Duration) {
    let mut timed = Timed { stream, deadline: Instant::now() + limit };
    let mut sink = [0; 4096];
    let mut budget = 256;
    while budget > 0 && matches!(timed.read(&mut sink), Ok(n) if n > 0) {
        budget -= 1;
    }
}

/// A stream whose reads all end at one deadline, however slowly the bytes drip.
struct Timed<'a> {
    stream: &'a TcpStream,
    deadline: Instant,
}

impl Read for Timed<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        (&mut &*self.stream).read(out)
    }
}

impl io::Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&mut &*self.stream).write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
