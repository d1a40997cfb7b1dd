use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread::JoinHandle,
};

use super::*;

/// A server that hands each accepted connection and its number to `serve`, until `connections` were served.
fn server(connections: u32, serve: impl Fn(u32, TcpStream) + Send + 'static) -> (Target, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!("bound to IPv4") };
    let thread = std::thread::spawn(move || {
        for n in 0..connections {
            let (stream, _) = listener.accept().unwrap();
            serve(n, stream);
        }
    });
    (Target::new(address), thread)
}

fn head(s: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let mut b = [0; 1];
    while !bytes.ends_with(b"\r\n\r\n") && s.read(&mut b).unwrap_or(0) == 1 {
        bytes.push(b[0]);
    }
    String::from_utf8(bytes).unwrap()
}

fn answer(s: &mut TcpStream, body: &str) {
    let _ = write!(s, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
}

fn soon(ms: u64) -> u64 {
    raw_us() + ms * 1_000
}

#[test]
fn a_full_answer_with_the_nonce_is_ready() {
    let (target, t) = server(1, |_, mut s| {
        assert!(head(&mut s).starts_with("GET /drums/ready?nonce=abcd HTTP/1.1\r\n"));
        answer(&mut s, r#"{"nonce":"abcd","ready":true,"hostname":"h","uptime_s":3.5}"#);
    });
    let before = raw_us();
    let a = wait_ready(&target, "abcd", soon(5_000), &mut || true).unwrap();
    assert_eq!(a.guest.hostname, "h");
    assert_eq!(a.attempts, 1);
    assert!(a.ready_us > before && a.ready_us <= raw_us());
    t.join().unwrap();
}

#[test]
fn a_guest_that_says_too_much_of_itself_is_not_ready() {
    for field in ["hostname", "machine_id", "address", "random", "state", "boot", "guest_sha256"] {
        let long = "x".repeat(MAX_WORD + 1);
        let text = format!(r#"{{"nonce":"abcd","ready":true,"{field}":"{long}"}}"#);
        let e = json::<GuestReady>(text.as_bytes()).unwrap_err().to_string();
        assert!(e.contains("a text of 1025 bytes"), "{field}: {e}");
        assert!(json::<GuestReady>(text.replace("xx", "x").as_bytes()).is_ok(), "{field}");
    }
}

#[test]
fn a_wrong_nonce_is_an_error_at_once() {
    let (target, t) = server(1, |_, mut s| {
        head(&mut s);
        answer(&mut s, r#"{"nonce":"0000","ready":true}"#);
    });
    let e = wait_ready(&target, "abcd", soon(5_000), &mut || true).unwrap_err();
    assert!(matches!(e, ProbeError::WrongNonce { ref got, .. } if got == "0000"), "{e}");
    t.join().unwrap();
}

#[test]
fn a_partial_answer_does_not_count_and_is_tried_again() {
    let (target, t) = server(3, |n, mut s| {
        head(&mut s);
        match n {
            0 => drop(s.write_all(b"HTTP/1.1 200 OK\r\nContent-Le")),
            1 => {
                drop(s.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{\"nonce\":\"abcd\",\"ready\":true}"))
            }
            _ => answer(&mut s, r#"{"nonce":"abcd","ready":true}"#),
        }
    });
    assert_eq!(wait_ready(&target, "abcd", soon(5_000), &mut || true).unwrap().attempts, 3);
    t.join().unwrap();
}

#[test]
fn an_accepting_but_silent_peer_is_not_ready() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!("bound to IPv4") };
    let e = wait_ready(&Target::new(address), "abcd", soon(150), &mut || true).unwrap_err();
    assert!(matches!(e, ProbeError::NotReady { ref last, .. } if last.contains("no full answer")), "{e}");
}

#[test]
fn a_refused_connection_is_retried_until_the_deadline() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!("bound to IPv4") };
    drop(listener);
    let e = wait_ready(&Target::new(address), "abcd", soon(100), &mut || true).unwrap_err();
    match e {
        ProbeError::NotReady { attempts, last, .. } => {
            assert!(attempts > 20, "{attempts} attempts in 100 ms are not tight");
            assert!(last.contains("ECONNREFUSED"), "{last}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_session_that_ended_is_not_waited_for() {
    let asked = Arc::new(AtomicU32::new(0));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!("bound to IPv4") };
    let count = asked.clone();
    let mut alive = move || count.fetch_add(1, Ordering::Relaxed) < 2;
    let e = wait_ready(&Target::new(address), "abcd", soon(60_000), &mut alive).unwrap_err();
    assert!(matches!(e, ProbeError::Ended { .. }), "{e}");
    assert_eq!(asked.load(Ordering::Relaxed), 3);
}

#[test]
fn a_call_to_a_session_that_ended_is_not_waited_for() {
    // The kernel takes the connection, and nobody ever answers.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let SocketAddr::V4(address) = listener.local_addr().unwrap() else { panic!("bound to IPv4") };
    let mut asked = 0;
    let mut alive = || {
        asked += 1;
        asked < 3
    };
    let patience = Duration::from_secs(3_600);
    let e = post_json::<_, serde_json::Value>(&Target::new(address), "/x", &(), patience, &mut alive).unwrap_err();
    assert!(matches!(e, ProbeError::Call { source: CallError::Ended, .. }), "{e}");
    // Nor is one that could not even be connected to.
    drop(listener);
    let e = get_json::<serde_json::Value>(&Target::new(address), "/x", patience, &mut || false).unwrap_err();
    assert!(matches!(e, ProbeError::Call { source: CallError::Ended, .. }), "{e}");
}

#[test]
fn oversized_and_foreign_answers_are_refused() {
    let (target, t) = server(3, |n, mut s| {
        head(&mut s);
        match n {
            0 => drop(s.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 16385\r\n\r\n")),
            1 => drop(s.write_all(b"SSH-2.0-x\r\n")),
            _ => drop(s.write_all(b"HTTP/1.1 501 Not Implemented\r\nContent-Length: 2\r\n\r\n{}")),
        }
    });
    let get = || get_json::<serde_json::Value>(&target, "/x", Duration::from_secs(2), &mut || true).unwrap_err();
    assert!(matches!(get(), ProbeError::Call { source: CallError::TooLarge, .. }));
    assert!(matches!(get(), ProbeError::Call { source: CallError::NotHttp(_), .. }));
    assert!(matches!(get(), ProbeError::Call { source: CallError::Status { status: 501, .. }, .. }));
    t.join().unwrap();
}

#[test]
fn a_json_call_sends_its_body_once() {
    let (target, t) = server(1, |_, mut s| {
        assert!(head(&mut s).contains("Content-Length: 13\r\n"));
        let mut body = [0; 13];
        s.read_exact(&mut body).unwrap();
        assert_eq!(&body, br#"{"state":"s"}"#);
        answer(&mut s, r#"{"ok":true}"#);
    });
    let body = serde_json::json!({"state": "s"});
    let v: serde_json::Value = post_json(&target, "/drums/state", &body, Duration::from_secs(2), &mut || true).unwrap();
    assert_eq!(v["ok"], true);
    t.join().unwrap();
}

#[test]
fn a_link_that_does_not_exist_is_said_so() {
    let target = Target::new("127.0.0.1:9".parse().unwrap()).via("drums-none", Ipv4Addr::LOCALHOST);
    let e = wait_ready(&target, "abcd", soon(5_000), &mut || true).unwrap_err();
    assert!(e.to_string().contains("bound to drums-none"), "{e}");
}

/// A connection that is under way until its peer is drained: a stream with a full send buffer.
fn under_way() -> (OwnedFd, UnixStream) {
    let (mut ours, peer) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    peer.set_nonblocking(true).unwrap();
    while ours.write(&[0; 4096]).is_ok() {}
    (ours.into(), peer)
}

fn drain(mut peer: &UnixStream) {
    let mut sink = [0; 65536];
    while matches!(peer.read(&mut sink), Ok(n) if n > 0) {}
}

/// A guest that answers the first SYN late, after six more were sent (here some 60 ms), is met by that answer and not by
/// the answer to a later try.
#[test]
fn a_late_answer_counts_when_it_comes() {
    let mut peers: Vec<UnixStream> = Vec::new();
    let started = raw_us();
    let mut late_us = 0;
    let mut begin = || {
        let (ours, peer) = under_way();
        peers.push(peer);
        if peers.len() == 7 {
            late_us = raw_us() - started;
            drain(&peers[0]);
        }
        Ok(ours)
    };
    let mut dial = Dial::new(&mut begin);
    let first = dial.connected(soon(60_000), &mut || true).unwrap();
    assert_eq!((dial.attempts, dial.under_way.len()), (7, 6));
    drop(first);
    drop(dial);
    assert!(late_us >= 6 * FIRST_BESIDE_US, "seven tries within {late_us} us load the guest");
    drain(&peers[0]);
    assert_eq!(peers[0].read(&mut [0; 1]).unwrap(), 0, "another connection than the first was used");
}

/// Those beside the one that was used stay open until its answer is there, and serve if it fails.
#[test]
fn connections_beside_the_first_serve_when_it_fails() {
    let mut peers: Vec<UnixStream> = Vec::new();
    let mut begin = || {
        let (ours, peer) = under_way();
        peers.push(peer);
        if peers.len() == 3 {
            peers.iter().for_each(drain);
        }
        Ok(ours)
    };
    let mut dial = Dial::new(&mut begin);
    for left in [2, 1, 0] {
        let fd = dial.connected(soon(60_000), &mut || true).unwrap();
        assert_eq!((dial.attempts, dial.under_way.len()), (3, left));
        drop(fd);
    }
}

#[test]
fn connections_under_way_are_bounded() {
    let mut peers = Vec::new();
    let mut begin = || {
        let (ours, peer) = under_way();
        peers.push(peer);
        Ok(ours)
    };
    let mut dial = Dial::new(&mut begin);
    for _ in 0..MAX_OPEN + 3 {
        assert!(dial.one_more(raw_us()).unwrap().is_none());
    }
    assert_eq!(dial.under_way.len(), MAX_OPEN);
    // How many more were begun until then is the machine's business, how many are kept is ours.
    let e = dial.connected(soon(5), &mut || true).unwrap_err();
    assert!(matches!(e, CallError::ConnectTimeout(67..)), "{e}");
    assert_eq!(dial.under_way.len(), MAX_OPEN);
}

#[test]
fn a_server_without_a_place_is_asked_again() {
    let (target, t) = server(2, |n, mut s| {
        head(&mut s);
        match n {
            0 => drop(s.write_all(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}")),
            _ => answer(&mut s, r#"{"ok":true}"#),
        }
    });
    let v: serde_json::Value = get_json(&target, "/x", Duration::from_secs(5), &mut || true).unwrap();
    assert_eq!(v["ok"], true);
    t.join().unwrap();
}

/// A session's answers come from a guest that may be hostile.
#[test]
fn fuzz_answers() {
    let good = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}".to_vec();
    let refusal = b"HTTP/1.0 503 no\r\ncontent-type: text/plain\r\n\r\nlater".to_vec();
    assert!(Answer::parse(&good).unwrap().unwrap().complete(&good));
    drums_fuzz::decoder!(vec![good, refusal], |bytes: &[u8]| {
        if let Ok(Some(answer)) = Answer::parse(bytes) {
            assert!(answer.length.is_none_or(|n| n <= MAX_RESPONSE));
            for closed in [false, true] {
                if let Ok(body) = answer.finish(bytes, closed) {
                    assert!(body.len() <= bytes.len());
                    let _ = json::<serde_json::Value>(&body);
                }
            }
        }
    });
}
