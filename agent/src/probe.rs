//! The one prober for all arms: is the guest server of a session alive *now*?
//!
//! It owns the client side of the guest's HTTP contract: a readiness probe that counts only when a full answer echoes
//! the caller's nonce (endpoint E3), and small JSON calls. It runs in the caller's thread and network namespace, opens
//! one connection per attempt and knows nothing of arms, cgroups or processes: whether the session is still worth
//! waiting for is the caller's closure.
//!
//! Retries are tight because their spacing is the resolution of what is measured: a refused connection is tried again
//! after half a millisecond in the first second. A SYN may also be swallowed (a guest without its address yet) or be
//! answered late (an emulated guest that has just been resumed), and from here the two look alike. So a connection that
//! is under way is never given up for a new one: while the first ones wait, others are begun beside them, and the first
//! that is there is used. A late answer then counts when it comes, and a swallowed SYN costs one spacing instead of
//! TCP's own retransmission after a second.

use std::{
    collections::VecDeque,
    io,
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::Duration,
};

use drums_common::evidence::Identity;
use nix::{
    errno::Errno,
    libc::linger,
    poll::{PollFd, PollFlags, ppoll},
    sys::{
        socket::{
            AddressFamily, MsgFlags, SockFlag, SockType, SockaddrIn, bind, connect, getsockopt, recv, send, setsockopt,
            socket, sockopt,
        },
        time::TimeSpec,
    },
    time::{ClockId, clock_gettime},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The guest's answers are a few hundred bytes; anything near this is not ours. What it answers may be quoted in a
/// session's outcome, several times over, and must leave that far below what a record may hold.
pub const MAX_RESPONSE: usize = 16 << 10;

const FIRST_RETRY: Duration = Duration::from_micros(500);
const LATER_RETRY: Duration = Duration::from_millis(2);
const TIGHT_FOR_US: u64 = 1_000_000;
/// Another connection is begun beside those under way after this long, then after a fixed part of the time waited:
/// every SYN, also one that is not needed in the end, costs a guest that is still coming up.
const FIRST_BESIDE_US: u64 = 10_000;
const LAST_BESIDE_US: u64 = 50_000;
const BESIDE_PART: u64 = 8;
/// Connections under way at once. The oldest goes when there are more: it has waited for more than two seconds by then.
const MAX_OPEN: usize = 64;
/// A connection that was accepted and then says nothing for so long is dropped and tried afresh.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(1_000);
/// How often `alive` is asked while nothing happens.
const ALIVE_EVERY: Duration = Duration::from_millis(10);

/// Where a session's guest server listens, and how to get there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub address: SocketAddrV4,
    /// Bind to this link: the only way to tell siblings apart that still share their template's address.
    pub device: Option<String>,
    /// Source address, where the routing table would choose a wrong one.
    pub source: Option<Ipv4Addr>,
}

impl Target {
    pub fn new(address: SocketAddrV4) -> Self {
        Self { address, device: None, source: None }
    }

    #[must_use]
    pub fn via(mut self, device: &str, source: Ipv4Addr) -> Self {
        self.device = Some(device.to_owned());
        self.source = Some(source);
        self
    }
}

/// What a guest says of itself goes into the records: a longer text would be the guest's way to end the run.
const MAX_WORD: usize = 1_024;

fn word<'de, D: serde::Deserializer<'de>>(d: D) -> Result<String, D::Error> {
    let text = String::deserialize(d)?;
    if text.len() > MAX_WORD {
        let why = format!("a text of {} bytes where {MAX_WORD} are enough", text.len());
        return Err(serde::de::Error::custom(why));
    }
    Ok(text)
}

/// What `GET /drums/ready` says. Unknown fields are ignored: the guest may say more than this agent reads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GuestReady {
    #[serde(deserialize_with = "word")]
    pub nonce: String,
    pub ready: bool,
    #[serde(deserialize_with = "word")]
    pub hostname: String,
    #[serde(deserialize_with = "word")]
    pub machine_id: String,
    #[serde(deserialize_with = "word")]
    pub address: String,
    /// From the guest's userspace stream, hexadecimal.
    #[serde(deserialize_with = "word")]
    pub random: String,
    /// Saved state; empty in a session that never was a template.
    #[serde(deserialize_with = "word")]
    pub state: String,
    #[serde(deserialize_with = "word")]
    pub guest_sha256: String,
    /// `cold` or `restored`.
    #[serde(deserialize_with = "word")]
    pub boot: String,
}

impl GuestReady {
    pub fn identity(&self) -> Identity {
        Identity {
            hostname: self.hostname.clone(),
            machine_id: self.machine_id.clone(),
            address: self.address.clone(),
            random: self.random.clone(),
        }
    }
}

/// A full answer that echoed the nonce, and when its last byte was here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyAnswer {
    /// CLOCK_MONOTONIC_RAW, microseconds.
    pub ready_us: u64,
    /// Connections tried, the successful one included.
    pub attempts: u32,
    pub guest: GuestReady,
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("{target} gave no full answer within {waited_ms} ms ({attempts} attempts); the last one: {last}")]
    NotReady { target: SocketAddrV4, waited_ms: u64, attempts: u32, last: String },
    #[error("the session behind {target} ended while it was probed ({attempts} attempts); the last one: {last}")]
    Ended { target: SocketAddrV4, attempts: u32, last: String },
    #[error(
        "{target} answered for nonce {got:?} instead of {expected:?}: something else than this session's guest server \
         listens there"
    )]
    WrongNonce { target: SocketAddrV4, expected: String, got: String },
    #[error("open a socket towards {target}{}", .device.as_deref().map(|d| format!(" bound to {d}")).unwrap_or_default())]
    Socket { target: SocketAddrV4, device: Option<String>, source: io::Error },
    #[error("{method} {path} at {target}")]
    Call { target: SocketAddrV4, method: &'static str, path: String, source: CallError },
}

/// Why one exchange failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    #[error("open a socket")]
    Socket(#[source] io::Error),
    #[error("connect: {0}")]
    Connect(Errno),
    #[error("connect: no answer to {0} connections")]
    ConnectTimeout(u32),
    #[error("exchange: {0}")]
    Exchange(Errno),
    #[error("no full answer within {0:?}")]
    AnswerTimeout(Duration),
    #[error("the connection closed after {0} bytes of an incomplete answer")]
    Cut(usize),
    #[error("the answer is larger than {MAX_RESPONSE} bytes")]
    TooLarge,
    #[error("not an HTTP answer: {0}")]
    NotHttp(String),
    #[error("status {status}: {body}")]
    Status { status: u16, body: String },
    #[error("the answer's JSON is not as agreed: {0}")]
    Json(String),
    #[error("the session ended")]
    Ended,
}

/// Now on CLOCK_MONOTONIC_RAW, microseconds.
pub fn raw_us() -> u64 {
    // CLOCK_MONOTONIC_RAW exists on every Linux since 2.6.28 and the pointer is ours, so the call cannot fail.
    let t = clock_gettime(ClockId::CLOCK_MONOTONIC_RAW).unwrap_or(TimeSpec::new(0, 0));
    t.tv_sec() as u64 * 1_000_000 + t.tv_nsec() as u64 / 1_000
}

/// Probes `target` until a full answer echoes `nonce`, `deadline_us` (CLOCK_MONOTONIC_RAW) passes, or `alive` says that
/// waiting is pointless.
pub fn wait_ready(
    target: &Target,
    nonce: &str,
    deadline_us: u64,
    alive: &mut dyn FnMut() -> bool,
) -> Result<ReadyAnswer, ProbeError> {
    let mut begin = || begin(target);
    let mut dial = Dial::new(&mut begin);
    let request = request(target, "GET", &format!("/drums/ready?nonce={nonce}"), None);
    let mut last = "none was made".to_owned();
    loop {
        let now = raw_us();
        if now >= deadline_us {
            let waited_ms = now.saturating_sub(dial.started_us) / 1_000;
            return Err(ProbeError::NotReady { target: target.address, waited_ms, attempts: dial.attempts, last });
        }
        let answer = dial.connected(deadline_us, alive).and_then(|fd| {
            let patience = ANSWER_TIMEOUT.min(Duration::from_micros(deadline_us.saturating_sub(raw_us())));
            let body = exchange(&fd, &request, patience, alive)?;
            let at = raw_us();
            json::<GuestReady>(&body).map(|guest| (at, guest))
        });
        let attempts = dial.attempts;
        match answer {
            Ok((_, guest)) if guest.nonce != nonce => {
                let (expected, got) = (nonce.to_owned(), guest.nonce);
                return Err(ProbeError::WrongNonce { target: target.address, expected, got });
            }
            Ok((ready_us, guest)) if guest.ready => return Ok(ReadyAnswer { ready_us, attempts, guest }),
            Ok(_) => last = "the guest server says that it is not ready".to_owned(),
            Err(CallError::Socket(source)) => {
                return Err(ProbeError::Socket { target: target.address, device: target.device.clone(), source });
            }
            Err(CallError::Ended) => return Err(ProbeError::Ended { target: target.address, attempts, last }),
            Err(e) => last = e.to_string(),
        }
        if !alive() {
            return Err(ProbeError::Ended { target: target.address, attempts, last });
        }
        dial.pause();
    }
}

/// `GET path`, answer as JSON, within `timeout` and while `alive` says that waiting makes sense.
pub fn get_json<R: DeserializeOwned>(
    target: &Target,
    path: &str,
    timeout: Duration,
    alive: &mut dyn FnMut() -> bool,
) -> Result<R, ProbeError> {
    call(target, "GET", path, None, timeout, alive)
}

/// `POST path` with a JSON body, answer as JSON; `timeout` and `alive` as of `get_json`.
pub fn post_json<B: Serialize, R: DeserializeOwned>(
    target: &Target,
    path: &str,
    body: &B,
    timeout: Duration,
    alive: &mut dyn FnMut() -> bool,
) -> Result<R, ProbeError> {
    let body = serde_json::to_vec(body).map_err(|e| ProbeError::Call {
        target: target.address,
        method: "POST",
        path: path.to_owned(),
        source: CallError::Json(e.to_string()),
    })?;
    call(target, "POST", path, Some(&body), timeout, alive)
}

/// One call within `timeout`. Connecting is retried, also where the server had no place for the connection: nothing has
/// changed in the guest by that. A request that was read is not sent again.
fn call<R: DeserializeOwned>(
    target: &Target,
    method: &'static str,
    path: &str,
    body: Option<&[u8]>,
    timeout: Duration,
    alive: &mut dyn FnMut() -> bool,
) -> Result<R, ProbeError> {
    let deadline = raw_us().saturating_add(u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX));
    let mut begin = || begin(target);
    let mut dial = Dial::new(&mut begin);
    let request = request(target, method, path, body);
    let result = loop {
        let answer = dial.connected(deadline, alive).and_then(|fd| {
            let left = Duration::from_micros(deadline.saturating_sub(raw_us()));
            exchange(&fd, &request, left, alive)
        });
        match answer {
            Err(CallError::Status { status: 503, .. }) if raw_us() < deadline && alive() => dial.pause(),
            other => break other,
        }
    };
    result.and_then(|b| json(&b)).map_err(|source| ProbeError::Call {
        target: target.address,
        method,
        path: path.to_owned(),
        source,
    })
}

/// Connections towards one target, the oldest first. Those that were not needed are closed when it goes: after the
/// answer's time was taken.
struct Dial<'a> {
    /// Begins a connection without waiting for it.
    begin: &'a mut dyn FnMut() -> Result<OwnedFd, CallError>,
    started_us: u64,
    next_us: u64,
    /// Connections begun.
    attempts: u32,
    under_way: VecDeque<OwnedFd>,
}

impl<'a> Dial<'a> {
    fn new(begin: &'a mut dyn FnMut() -> Result<OwnedFd, CallError>) -> Self {
        let now = raw_us();
        Self { begin, started_us: now, next_us: now, attempts: 0, under_way: VecDeque::new() }
    }

    /// The first connection that is there, until `deadline_us`. Those under way beside it stay, for the next call.
    fn connected(&mut self, deadline_us: u64, alive: &mut dyn FnMut() -> bool) -> Result<OwnedFd, CallError> {
        let mut refused = None;
        let mut asked_us = raw_us();
        loop {
            let now = raw_us();
            if now >= self.next_us
                && now < deadline_us
                && let Some(e) = self.one_more(now)?
            {
                refused = Some(e);
            }
            let until = self.next_us.min(deadline_us).min(asked_us + ALIVE_EVERY.as_micros() as u64);
            match self.look(until)? {
                Some(Ok(fd)) => return Ok(fd),
                Some(Err(e)) => refused = Some(e),
                None => {}
            }
            let now = raw_us();
            if now >= deadline_us {
                return Err(refused.map_or(CallError::ConnectTimeout(self.attempts), CallError::Connect));
            }
            if now.saturating_sub(asked_us) >= ALIVE_EVERY.as_micros() as u64 {
                if !alive() {
                    return Err(CallError::Ended);
                }
                asked_us = now;
            }
        }
    }

    /// Begins one more connection; answers with why it was refused at once, if it was.
    fn one_more(&mut self, now: u64) -> Result<Option<Errno>, CallError> {
        self.attempts += 1;
        match (self.begin)() {
            Ok(fd) => {
                if self.under_way.len() == MAX_OPEN {
                    self.under_way.pop_front();
                }
                self.under_way.push_back(fd);
                let waited = now.saturating_sub(self.started_us);
                self.next_us = now + (waited / BESIDE_PART).clamp(FIRST_BESIDE_US, LAST_BESIDE_US);
                Ok(None)
            }
            Err(CallError::Connect(e)) => {
                self.pause();
                Ok(Some(e))
            }
            Err(e) => Err(e),
        }
    }

    /// Waits until one of those under way has an end, at most until `until_us`; the oldest first.
    fn look(&mut self, until_us: u64) -> Result<Option<Result<OwnedFd, Errno>>, CallError> {
        let left = Duration::from_micros(until_us.saturating_sub(raw_us()));
        let mut fds: Vec<PollFd<'_>> =
            self.under_way.iter().map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLOUT)).collect();
        match ppoll(&mut fds, Some(left.into()), None) {
            Ok(0) | Err(Errno::EINTR) => return Ok(None),
            Ok(_) => {}
            Err(e) => return Err(CallError::Exchange(e)),
        }
        let ended = fds.iter().position(|fd| fd.revents().is_some_and(|r| !r.is_empty()));
        let Some(fd) = ended.and_then(|i| self.under_way.remove(i)) else { return Ok(None) };
        let error = getsockopt(&fd, sockopt::SocketError).map_err(CallError::Connect)?;
        if error == 0 {
            return Ok(Some(Ok(fd)));
        }
        self.pause();
        Ok(Some(Err(Errno::from_raw(error))))
    }

    /// The next connection is begun after a short while, whatever is under way: something answers there.
    fn pause(&mut self) {
        let now = raw_us();
        let pause = if now.saturating_sub(self.started_us) < TIGHT_FOR_US { FIRST_RETRY } else { LATER_RETRY };
        self.next_us = now + pause.as_micros() as u64;
    }
}

fn json<R: DeserializeOwned>(body: &[u8]) -> Result<R, CallError> {
    serde_json::from_slice(body)
        .map_err(|e| CallError::Json(format!("{e} in {:?}", String::from_utf8_lossy(&body[..body.len().min(200)]))))
}

impl Drop for Dial<'_> {
    /// Reset, not closed in order: nobody may still talk about them when the guest takes another address.
    fn drop(&mut self) {
        for fd in &self.under_way {
            let _ = setsockopt(fd, sockopt::Linger, &linger { l_onoff: 1, l_linger: 0 });
        }
    }
}

fn request(target: &Target, method: &str, path: &str, body: Option<&[u8]>) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", target.address);
    if let Some(b) = body {
        head.push_str(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n", b.len()));
    }
    head.push_str("\r\n");
    let mut request = head.into_bytes();
    request.extend_from_slice(body.unwrap_or_default());
    request
}

/// One request on a connection, one full answer: the body of a 2xx.
fn exchange(
    fd: &OwnedFd,
    request: &[u8],
    patience: Duration,
    alive: &mut dyn FnMut() -> bool,
) -> Result<Vec<u8>, CallError> {
    let deadline = raw_us().saturating_add(patience.as_micros() as u64);
    let mut sent = 0;
    while sent < request.len() {
        match send(fd.as_raw_fd(), &request[sent..], MsgFlags::MSG_NOSIGNAL) {
            Ok(n) => sent += n,
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                if !wait(fd, PollFlags::POLLOUT, deadline, alive)? {
                    return Err(CallError::AnswerTimeout(patience));
                }
            }
            Err(e) => return Err(CallError::Exchange(e)),
        }
    }
    let mut answer = Vec::with_capacity(1024);
    let mut chunk = [0; 4096];
    loop {
        match recv(fd.as_raw_fd(), &mut chunk, MsgFlags::empty()) {
            Ok(0) => {
                return match Answer::parse(&answer)? {
                    Some(a) => a.finish(&answer, true),
                    None => Err(CallError::Cut(answer.len())),
                };
            }
            Ok(n) => {
                answer.extend_from_slice(&chunk[..n]);
                if answer.len() > MAX_RESPONSE {
                    return Err(CallError::TooLarge);
                }
                if let Some(a) = Answer::parse(&answer)?
                    && a.complete(&answer)
                {
                    return a.finish(&answer, false);
                }
            }
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                if !wait(fd, PollFlags::POLLIN, deadline, alive)? {
                    return Err(CallError::AnswerTimeout(patience));
                }
            }
            Err(e) => return Err(CallError::Exchange(e)),
        }
    }
}

/// Begins a connection. `Ok` does not say that it is there: polling does.
fn begin(target: &Target) -> Result<OwnedFd, CallError> {
    let fd = open(target).map_err(|e| CallError::Socket(e.into()))?;
    match connect(fd.as_raw_fd(), &SockaddrIn::from(target.address)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(fd),
        Err(e) => Err(CallError::Connect(e)),
    }
}

fn open(target: &Target) -> nix::Result<OwnedFd> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let fd = socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
    setsockopt(&fd, sockopt::TcpNoDelay, &true)?;
    if let Some(device) = &target.device {
        setsockopt(&fd, sockopt::BindToDevice, &device.into())?;
    }
    if let Some(source) = target.source {
        bind(fd.as_raw_fd(), &SockaddrIn::from(SocketAddrV4::new(source, 0)))?;
    }
    Ok(fd)
}

/// Waits for `flags` until `deadline_us`; false when the time is over.
fn wait(fd: &OwnedFd, flags: PollFlags, deadline_us: u64, alive: &mut dyn FnMut() -> bool) -> Result<bool, CallError> {
    loop {
        let left = Duration::from_micros(deadline_us.saturating_sub(raw_us()));
        let mut fds = [PollFd::new(fd.as_fd(), flags)];
        match ppoll(&mut fds, Some(left.min(ALIVE_EVERY).into()), None) {
            Ok(0) | Err(Errno::EINTR) => {
                if raw_us() >= deadline_us {
                    return Ok(false);
                }
                if !alive() {
                    return Err(CallError::Ended);
                }
            }
            Ok(_) => return Ok(true),
            Err(e) => return Err(CallError::Exchange(e)),
        }
    }
}

/// The head of an answer, once it is all there.
struct Answer {
    status: u16,
    body_at: usize,
    length: Option<usize>,
}

impl Answer {
    /// None while the head is incomplete.
    fn parse(bytes: &[u8]) -> Result<Option<Self>, CallError> {
        let not_http = |what: &str| CallError::NotHttp(what.to_owned());
        if !b"HTTP/1.".starts_with(&bytes[..bytes.len().min(7)]) {
            return Err(not_http("the first bytes are not HTTP/1."));
        }
        let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") else {
            return Ok(None);
        };
        let head = std::str::from_utf8(&bytes[..end]).map_err(|_| not_http("the head is not text"))?;
        let mut lines = head.split("\r\n");
        let status = lines
            .next()
            .and_then(|l| l.split(' ').nth(1))
            .and_then(|s| s.parse().ok())
            .ok_or_else(|| not_http("no status"))?;
        let mut length = None;
        for line in lines {
            let Some((name, value)) = line.split_once(':') else { continue };
            if name.eq_ignore_ascii_case("content-length") {
                let n: usize = value.trim().parse().map_err(|_| not_http("Content-Length is not a number"))?;
                if n > MAX_RESPONSE {
                    return Err(CallError::TooLarge);
                }
                length = Some(n);
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                return Err(not_http("a transfer encoding, which the guest server never uses"));
            }
        }
        Ok(Some(Self { status, body_at: end + 4, length }))
    }

    fn complete(&self, bytes: &[u8]) -> bool {
        self.length.is_some_and(|n| bytes.len() >= self.body_at + n)
    }

    fn finish(&self, bytes: &[u8], closed: bool) -> Result<Vec<u8>, CallError> {
        let rest = &bytes[self.body_at..];
        let body = match self.length {
            Some(n) => rest.get(..n).ok_or(CallError::Cut(bytes.len()))?,
            None if closed => rest,
            None => return Err(CallError::Cut(bytes.len())),
        };
        if (200..300).contains(&self.status) {
            Ok(body.to_vec())
        } else {
            let body = String::from_utf8_lossy(&body[..body.len().min(400)]).into_owned();
            Err(CallError::Status { status: self.status, body })
        }
    }
}

#[cfg(test)]
mod tests;
