//! The guest server as a process, over real sockets.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// A server on a port of its own; killed when dropped, which a failed assertion does too.
struct Guest {
    child: Child,
    address: SocketAddr,
}

impl Guest {
    fn start() -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_drums-guest"))
            .arg("serve")
            .env("DRUMS_PORT", "0")
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.trim().rsplit(' ').next().unwrap().parse().expect(&line);
        Self { child, address: ([127, 0, 0, 1], port).into() }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    fn try_raw(&self, bytes: &[u8]) -> std::io::Result<String> {
        let mut stream = self.connect();
        stream.write_all(bytes)?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    fn raw(&self, bytes: &[u8]) -> String {
        self.try_raw(bytes).unwrap()
    }

    fn get(&self, target: &str) -> String {
        self.raw(format!("GET {target} HTTP/1.1\r\nHost: g\r\n\r\n").as_bytes())
    }

    fn post(&self, target: &str, body: &str) -> String {
        self.raw(format!("POST {target} HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len()).as_bytes())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn body(answer: &str) -> serde_json::Value {
    serde_json::from_str(answer.split_once("\r\n\r\n").expect(answer).1).expect(answer)
}

#[test]
fn it_answers_the_start_of_the_desktop_guest_interface() {
    let g = Guest::start();
    assert!(g.get("/platform").ends_with("\r\n\r\nLinux"));
    let v = body(&g.post("/execute", "{\"command\":[\"sh\",\"-c\",\"echo out; echo err >&2; exit 3\"]}"));
    assert_eq!(v["output"], "out\n");
    assert_eq!(v["error"], "err\n");
    assert_eq!((v["returncode"].as_i64(), v["status"].as_str()), (Some(3), Some("success")));
    assert_eq!(body(&g.post("/execute", "{\"command\":\"kill -9 $$\",\"shell\":true}"))["returncode"], -9);
    assert!(g.post("/execute", "{\"command\":[\"/no/such\"]}").starts_with("HTTP/1.1 500"));
    assert!(g.post("/execute", "junk").starts_with("HTTP/1.1 400"));
    assert!(g.get("/screenshot").starts_with("HTTP/1.1 501"));
    assert!(g.get("/drums/nothing").starts_with("HTTP/1.1 404"));
    assert!(g.get("/execute").starts_with("HTTP/1.1 405"));
}

#[test]
fn it_names_its_own_binary_by_digest() {
    use sha2::Digest as _;
    let g = Guest::start();
    let bytes = std::fs::read(env!("CARGO_BIN_EXE_drums-guest")).unwrap();
    let expected: String = sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(body(&g.get("/drums/digest"))["guest_sha256"], expected.as_str());
}

#[test]
fn a_long_command_and_idle_peers_do_not_delay_an_answer() {
    let g = Guest::start();
    let idle: Vec<_> = (0..8).map(|_| g.connect()).collect();
    let mut long = g.connect();
    long.write_all(b"POST /execute HTTP/1.1\r\nContent-Length: 26\r\n\r\n{\"command\":[\"sleep\",\"600\"]}").unwrap();
    let start = Instant::now();
    assert_eq!(body(&g.get("/drums/ready?nonce=aa"))["nonce"], "aa");
    assert!(start.elapsed() < Duration::from_secs(5));
    drop(idle);
}

#[test]
fn more_connections_than_places_are_refused_and_places_come_back() {
    let g = Guest::start();
    let idle: Vec<_> = (0..16).map(|_| g.connect()).collect();
    // A refusal closes over what we still send, so it may reach us as a reset.
    let served = || g.try_raw(b"GET /platform HTTP/1.1\r\n\r\n").is_ok_and(|a| a.starts_with("HTTP/1.1 200"));
    assert!(!served());
    drop(idle);
    let deadline = Instant::now() + Duration::from_secs(10);
    while !served() {
        assert!(Instant::now() < deadline, "no place came back");
        std::thread::yield_now();
    }
}

#[test]
fn garbage_ends_the_connection_and_nothing_else() {
    let g = Guest::start();
    let noise: Vec<u8> = (0..4096u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for bytes in [&b"\x16\x03\x01\r\n\r\n"[..], &noise, &b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"[..]]
    {
        let mut stream = g.connect();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"), "{}", String::from_utf8_lossy(&answer));
    }
    assert!(g.get("/platform").starts_with("HTTP/1.1 200"));
}

#[test]
fn the_word_to_stop_is_obeyed() {
    let mut g = Guest::start();
    let pid = g.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert!(g.child.wait().unwrap().success());
}
