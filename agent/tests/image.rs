//! The real agent on an image of an enrolled host. Root only, as the agent is.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpListener,
    process::{Command, Stdio},
};

/// Answers as IMDSv2 of this instance does, for as long as the test lives.
fn instance_metadata(instance: &'static str) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                if stream.read(&mut byte).is_ok_and(|n| n == 1) {
                    request.push(byte[0]);
                } else {
                    break;
                }
            }
            let document =
                format!("{{\"accountId\":\"123456789012\",\"region\":\"eu-central-1\",\"instanceId\":\"{instance}\"}}");
            let body = match request.split(|b| *b == b' ').nth(1) {
                Some(b"/latest/api/token") => "token",
                Some(b"/latest/dynamic/instance-identity/document") => &document,
                _ => "MIAG",
            };
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            let _ = stream.write_all((head + body).as_bytes());
        }
    });
    at
}

#[test]
fn live_an_agent_on_an_image_of_an_enrolled_host_does_not_start() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIP root: not root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("agent.toml");
    // What the image has of the host that it was made of.
    let identity = dir.path().join("state/identity");
    fs::create_dir_all(&identity).unwrap();
    let was = "{\"accountId\":\"123456789012\",\"region\":\"eu-central-1\",\"instanceId\":\"i-0aaaaaaaaaaaaaaaa\"}";
    fs::write(identity.join("instance.json"), was).unwrap();
    let ends = |instance| {
        let at = |name: &str| dir.path().join(name).display().to_string();
        let text = format!(
            "state = \"{}\"\ntools = \"{}\"\nmeasure_lock = \"{}\"\n[paid]\ndeadline = \"{}\"\nimds = \"{}\"\n",
            at("state"),
            at("tools"),
            at("lock"),
            at("no-deadline"),
            instance_metadata(instance),
        );
        fs::write(&config, text).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_drums-agent"));
        let output = command.arg("run").arg("--config").arg(&config).stdin(Stdio::null()).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = ends("i-0bbbbbbbbbbbbbbbb");
    assert_eq!(code, Some(20), "{said}");
    for word in ["i-0aaaaaaaaaaaaaaaa", "i-0bbbbbbbbbbbbbbbb", "an image of an enrolled host"] {
        assert!(said.contains(word), "it does not say {word:?}: {said}");
    }
    // On its own instance it gets further: to what else is missing here.
    let (code, said) = ends("i-0aaaaaaaaaaaaaaaa");
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("not a host of any coordinator"), "{said}");
}
