//! HTTP/1.1, as much as a guest server needs: one request per connection, everything bounded, no surprises.
//!
//! Reads from anything that reads, so the tests need no socket. Knows nothing of what the paths mean.

use std::io::{self, Read, Write};

pub const MAX_HEAD: usize = 16 * 1024;
pub const MAX_HEADERS: usize = 64;
pub const MAX_BODY: usize = 64 * 1024 * 1024;

#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    /// Decoded, without the query.
    pub path: String,
    /// Decoded pairs of the query, in order.
    pub query: Vec<(String, String)>,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    pub fn query(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

/// Why there is no request.
#[derive(Debug)]
pub enum Bad {
    /// The peer went away or was too slow; nobody is there to be answered.
    Gone,
    /// Answer with this status and reason.
    Refuse(u16, String),
}

impl Bad {
    fn refuse(status: u16, why: impl Into<String>) -> Self {
        Self::Refuse(status, why.into())
    }
}

pub struct Response {
    pub status: u16,
    pub content_type: &'static str,
    pub body: Vec<u8>,
}

impl Response {
    pub fn json(status: u16, value: &impl serde::Serialize) -> Self {
        match serde_json::to_vec(value) {
            Ok(body) => Self { status, content_type: "application/json", body },
            Err(e) => Self { status: 500, content_type: "text/plain", body: e.to_string().into_bytes() },
        }
    }

    /// An error as OSWorld's server words it.
    pub fn error(status: u16, message: impl Into<String>) -> Self {
        let message: String = message.into();
        Self::json(status, &serde_json::json!({ "status": "error", "error": message, "message": message }))
    }

    pub fn text(text: &str) -> Self {
        Self { status: 200, content_type: "text/html; charset=utf-8", body: text.as_bytes().to_vec() }
    }

    /// Head and body leave in one write: one segment for a short answer.
    pub fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        let mut bytes = format!(
            "HTTP/1.1 {} {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.status,
            reason(self.status),
            self.content_type,
            self.body.len()
        )
        .into_bytes();
        bytes.extend_from_slice(&self.body);
        out.write_all(&bytes)?;
        out.flush()
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        411 => "Length Required",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        505 => "HTTP Version Not Supported",
        _ => "Internal Server Error",
    }
}

/// Reads one request. `stream` has its own time limits; reaching one is an error of kind `WouldBlock` or `TimedOut`.
pub fn read(stream: &mut (impl Read + Write)) -> Result<Request, Bad> {
    let mut bytes = Vec::with_capacity(1024);
    let head_end = loop {
        if let Some(end) = find(&bytes, b"\r\n\r\n") {
            break end;
        }
        if bytes.len() > MAX_HEAD {
            return Err(Bad::refuse(431, format!("the head is longer than {MAX_HEAD} bytes")));
        }
        let mut chunk = [0; 2048];
        match stream.read(&mut chunk) {
            Ok(0) => return Err(Bad::Gone),
            Ok(n) => bytes.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(slow(&e, "head")),
        }
    };
    if head_end > MAX_HEAD {
        return Err(Bad::refuse(431, format!("the head is longer than {MAX_HEAD} bytes")));
    }
    let body = bytes.split_off(head_end + 4);
    bytes.truncate(head_end);
    let head = String::from_utf8(bytes).map_err(|_| Bad::refuse(400, "the head is not UTF-8"))?;
    let mut request = parse_head(&head)?;
    let length = body_length(&request)?;
    request.body = body;
    if request.body.len() < length && request.header("expect").is_some_and(|e| e.eq_ignore_ascii_case("100-continue")) {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").map_err(|_| Bad::Gone)?;
    }
    let missing = length.saturating_sub(request.body.len());
    match stream.take(missing as u64).read_to_end(&mut request.body) {
        Ok(n) if n == missing => {}
        Ok(_) => return Err(Bad::Gone),
        Err(e) => return Err(slow(&e, "body")),
    }
    request.body.truncate(length);
    Ok(request)
}

fn slow(e: &io::Error, what: &str) -> Bad {
    match e.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            Bad::refuse(408, format!("the {what} of the request did not arrive in time"))
        }
        _ => Bad::Gone,
    }
}

fn parse_head(head: &str) -> Result<Request, Bad> {
    let mut lines = head.split("\r\n");
    let first = lines.next().unwrap_or_default();
    let mut words = first.split(' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(Bad::refuse(400, "the first line is not METHOD TARGET VERSION"));
    };
    if !matches!(version, "HTTP/1.1" | "HTTP/1.0") {
        return Err(Bad::refuse(505, "only HTTP/1.1 and HTTP/1.0 are spoken here"));
    }
    if !target.starts_with('/') {
        return Err(Bad::refuse(400, "the target is not an absolute path"));
    }
    let mut headers = Vec::new();
    for line in lines {
        let (name, value) = line.split_once(':').ok_or_else(|| Bad::refuse(400, "a header has no colon"))?;
        if name.is_empty() || name.bytes().any(|b| b.is_ascii_whitespace()) {
            return Err(Bad::refuse(400, "a header has a name with spaces, or none"));
        }
        if headers.len() == MAX_HEADERS {
            return Err(Bad::refuse(431, format!("more than {MAX_HEADERS} headers")));
        }
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    Ok(Request {
        method: method.to_owned(),
        path: decode(path, false)?,
        query: parse_form(query)?,
        headers,
        body: Vec::new(),
    })
}

fn body_length(request: &Request) -> Result<usize, Bad> {
    if request.header("transfer-encoding").is_some() {
        return Err(Bad::refuse(411, "send the body with a Content-Length, not chunked"));
    }
    let mut lengths = request.headers.iter().filter(|(n, _)| n == "content-length");
    let Some((_, length)) = lengths.next() else { return Ok(0) };
    if lengths.next().is_some() {
        return Err(Bad::refuse(400, "more than one Content-Length"));
    }
    if length.is_empty() || !length.bytes().all(|b| b.is_ascii_digit()) {
        return Err(Bad::refuse(400, "the Content-Length is not a number"));
    }
    // A number too large for the type is certainly too large for us.
    match length.parse::<usize>() {
        Ok(n) if n <= MAX_BODY => Ok(n),
        _ => Err(Bad::refuse(413, format!("the body is larger than {MAX_BODY} bytes"))),
    }
}

/// `a=1&b=2`, as in a query and in a posted form.
pub fn parse_form(text: &str) -> Result<Vec<(String, String)>, Bad> {
    text.split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((decode(name, true)?, decode(value, true)?))
        })
        .collect()
}

fn decode(text: &str, plus_is_space: bool) -> Result<String, Bad> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(b) = bytes.next() {
        out.push(match b {
            b'%' => {
                let digit = |d: Option<u8>| d.and_then(|d| (d as char).to_digit(16));
                match (digit(bytes.next()), digit(bytes.next())) {
                    (Some(high), Some(low)) => (high * 16 + low) as u8,
                    _ => return Err(Bad::refuse(400, "a percent sign is not followed by two hexadecimal digits")),
                }
            }
            b'+' if plus_is_space => b' ',
            b => b,
        });
    }
    String::from_utf8(out).map_err(|_| Bad::refuse(400, "the target is not UTF-8"))
}

pub fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|w| w == needle)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a peer sends, and what it was sent.
    struct Wire(io::Cursor<Vec<u8>>, Vec<u8>);
    impl Read for Wire {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            // In small pieces, as a network may.
            let n = out.len().min(7);
            self.0.read(&mut out[..n])
        }
    }
    impl Write for Wire {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn send(bytes: impl Into<Vec<u8>>) -> Result<Request, Bad> {
        read(&mut Wire(io::Cursor::new(bytes.into()), Vec::new()))
    }

    /// Whatever arrives in whatever pieces: a request within the bounds, or a refusal with a status.
    #[test]
    fn fuzz_requests() {
        let get = b"GET /probe?nonce=a%20b&x=1 HTTP/1.1\r\nHost: s7\r\n\r\n".to_vec();
        let post = b"POST /execute HTTP/1.1\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n{\"a\":[1]}".to_vec();
        assert!(send(get.clone()).is_ok() && send(post.clone()).is_ok());
        drums_fuzz::decoder!(vec![get, post], |bytes: &[u8]| {
            match send(bytes) {
                Ok(r) => assert!(r.body.len() <= MAX_BODY && r.headers.len() <= MAX_HEADERS),
                Err(Bad::Refuse(status, why)) => assert!(status >= 400 && !why.is_empty()),
                Err(Bad::Gone) => {}
            }
            let _ = parse_form(&String::from_utf8_lossy(bytes));
        });
    }

    fn status(bytes: impl Into<Vec<u8>>) -> u16 {
        match send(bytes) {
            Err(Bad::Refuse(status, _)) => status,
            Err(Bad::Gone) => 0,
            Ok(r) => panic!("{r:?}"),
        }
    }

    #[test]
    fn a_request_is_read_whole() {
        let r = send("POST /file?a=b%20c&d HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello, ignored").unwrap();
        assert_eq!((r.method.as_str(), r.path.as_str(), r.body.as_slice()), ("POST", "/file", b"hello".as_slice()));
        assert_eq!((r.query("a"), r.query("d"), r.header("host")), (Some("b c"), Some(""), Some("x")));
    }

    #[test]
    fn a_peer_that_waits_is_told_to_go_on() {
        let text =
            "POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 30\r\n\r\n012345678901234567890123456789";
        let mut wire = Wire(io::Cursor::new(text.into()), Vec::new());
        assert_eq!(read(&mut wire).unwrap().body.len(), 30);
        assert!(wire.1.starts_with(b"HTTP/1.1 100 "));
    }

    #[test]
    fn garbage_is_refused_with_a_reason() {
        assert_eq!(status("\x16\x03\x01\x02\x00garbage\r\n\r\n"), 400);
        assert_eq!(status(b"GET /\xff HTTP/1.1\r\n\r\n".to_vec()), 400);
        assert_eq!(status("GET / HTTP/3\r\n\r\n"), 505);
        assert_eq!(status("GET http://x/ HTTP/1.1\r\n\r\n"), 400);
        assert_eq!(status("GET / HTTP/1.1\r\nno colon\r\n\r\n"), 400);
        assert_eq!(status("GET /%zz HTTP/1.1\r\n\r\n"), 400);
        assert_eq!(status("GET /%ff HTTP/1.1\r\n\r\n"), 400);
        assert_eq!(status("GET /  HTTP/1.1\r\n\r\n"), 400);
        assert_eq!(status("POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"), 400);
        assert_eq!(status("POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"), 400);
        assert_eq!(status("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"), 411);
    }

    #[test]
    fn oversized_requests_are_refused_before_they_are_stored() {
        assert_eq!(status(vec![b'a'; MAX_HEAD * 2]), 431);
        assert_eq!(status(format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(MAX_HEAD))), 431);
        assert_eq!(status(format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(MAX_HEADERS + 1))), 431);
        assert_eq!(status(format!("POST / HTTP/1.1\r\nContent-Length: {}\r\n\r\n", MAX_BODY + 1)), 413);
        assert_eq!(status(format!("POST / HTTP/1.1\r\nContent-Length: {}\r\n\r\n", "9".repeat(40))), 413);
    }

    #[test]
    fn a_truncated_request_is_nobody_s() {
        for text in ["", "GET / HT", "GET / HTTP/1.1\r\nA: b\r\n", "POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc"] {
            assert_eq!(status(text), 0, "{text:?}");
        }
    }
}
