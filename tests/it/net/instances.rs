//! A launched host enrols with a real coordinator as the instance that was launched, and as no other: the programs
//! themselves, with instance metadata of the test's that signs with its own key. Launches are written into the home's store,
//! as whoever launches does.

#[path = "../../../infra/identity/tests/signer/mod.rs"]
mod signer;

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use drums_common::{
    clock::{Clock as _, Micros},
    token::{Secret, Token},
};
use drums_coordinator::{
    clock::SystemClock,
    net::ports::{Launched, Started},
    store::{AuditRow, Ownership, SqliteStore, Store as _, Who},
};
use drums_infra::{fleet::wait_until, loopback::Loopback};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use signer::{Message, SIGNER};

use super::node::{Node, PATIENCE};

/// 2026-11-30T19:10:01Z.
const STARTED: Micros = Micros(1_796_065_801_000_000);
const FIRST: &str = "i-0aaaaaaaaaaaaaaaa";
const SECOND: &str = "i-0bbbbbbbbbbbbbbbb";
const STRANGER: &str = "i-0cccccccccccccccc";

fn document(instance: &str) -> String {
    format!(
        "{{\n  \"accountId\" : \"123456789012\",\n  \"region\" : \"eu-central-1\",\n  \"instanceId\" : \"{instance}\",\n  \
         \"imageId\" : \"ami-0123456789abcdef0\",\n  \"instanceType\" : \"c8i.2xlarge\",\n  \
         \"pendingTime\" : \"2026-11-30T19:10:00Z\"\n}}"
    )
}

/// IMDSv2 of one machine, for as long as the test lives.
struct Metadata {
    at: SocketAddr,
    shown: Arc<Mutex<(String, String)>>,
}

impl Metadata {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let shown = Arc::new(Mutex::new((String::new(), String::new())));
        let serving = shown.clone();
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut request = Vec::new();
                let mut byte = [0];
                while !request.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|n| n == 1) {
                    request.push(byte[0]);
                }
                let (document, signature) = serving.lock().unwrap().clone();
                let body = match request.split(|b| *b == b' ').nth(1) {
                    Some(b"/latest/api/token") => "token".to_owned(),
                    Some(b"/latest/dynamic/instance-identity/document") => document,
                    _ => signature,
                };
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
                let _ = stream.write_all((head + &body).as_bytes());
            }
        });
        Self { at, shown }
    }

    /// From now on it is this machine, by AWS's word.
    fn show(&self, document: &str) {
        *self.shown.lock().unwrap() = (document.to_owned(), Message::of(document).sign());
    }
}

/// Ended with the test, whatever becomes of it.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A coordinator with hosts that are launched.
struct World {
    node: Node,
    dir: PathBuf,
    metadata: Metadata,
    _here: Loopback,
}

impl World {
    fn start(dir: &Path) -> Self {
        let here = Loopback::claim().unwrap();
        let [agents, enrol, api] = [(); 3].map(|()| here.port().unwrap());
        let programs = drums_tests::programs().unwrap();
        let mut node = Node { home: dir.join("home"), programs, child: None };
        node.said(&["init"]);
        let certificate = dir.join("eu-central-1.pem");
        fs::write(&certificate, SIGNER).unwrap();
        let at = here.address();
        let text = format!(
            "listen = \"{at}\"\nagents_port = {agents}\nenrol_port = {enrol}\napi = \"{at}:{api}\"\nadvertise = [\"{at}\"]\n{}\
             [identity.certificates]\neu-central-1 = \"{}\"\n",
            drums_tests::fleet::SHORT_LEASES,
            certificate.display(),
        );
        fs::write(node.home.join("coordinator.toml"), text).unwrap();
        node.start();
        node.until(true);
        Self { node, dir: dir.to_owned(), metadata: Metadata::start(), _here: here }
    }

    fn store(&self) -> SqliteStore {
        SqliteStore::open(&self.node.home.join("store.sqlite")).unwrap()
    }

    /// As before a launch's call: a host, and its token, bound to what is asked for.
    fn intend(&self, host: &str, attempt: u16) -> Launched {
        let launched = Launched {
            launch: format!("drums1-0a1b2c3d-006b0d1a80-1f2e3d4c5b6a7988-{attempt:04x}").parse().unwrap(),
            account: "123456789012".to_owned(),
            region: "eu-central-1".parse().unwrap(),
            image: "ami-0123456789abcdef0".parse().unwrap(),
            kind: "c8i.2xlarge".parse().unwrap(),
            instance: None,
        };
        // Where the coordinator is, and its CA, as it says itself.
        let by_hand = Token::parse(&self.node.said(&["host", "add", "by-hand"])).unwrap();
        let host_id = host.parse().unwrap();
        let token = Token { host: host_id, secret: Secret::new(rand_bytes(attempt)), ..by_hand };
        let row = |action: &str| AuditRow::new(SystemClock.now(), Who::coordinator(), action).host(&token.host);
        let mut store = self.store();
        store.add_host(&token.host, "ec2", Ownership::Owned, &row("host-add")).unwrap();
        let expires = SystemClock.now().plus_ms(600_000);
        store.add_launch_token(token.secret.sha256(), &token.host, expires, &launched, &row("token-add")).unwrap();
        fs::write(self.dir.join(format!("{host}.token")), token.reveal()).unwrap();
        launched
    }

    /// As after its read-back.
    fn launched(&self, launched: &Launched, instance: &str) {
        let started = Started { id: instance.parse().unwrap(), at: STARTED };
        let row = AuditRow::new(SystemClock.now(), Who::coordinator(), "launched");
        self.store().launched_as(launched.launch, &started, &row).unwrap();
    }

    /// The agent on a machine of its own, with this host's token. `on_ec2`: it was launched, and has instance metadata.
    fn agent(&self, machine: &str, host: &str, on_ec2: bool) -> (Process, PathBuf) {
        let machine = self.dir.join(machine);
        fs::create_dir_all(&machine).unwrap();
        if on_ec2 {
            fs::write(machine.join("deadline"), "DEADLINE_S=17000000000\nLIFETIME_S=10000000000\n").unwrap();
        }
        let at = |name: &str| machine.join(name).display().to_string();
        let text = format!(
            "state = \"{}\"\ntools = \"{}\"\nmeasure_lock = \"{}\"\n[paid]\ndeadline = \"{}\"\nfolder = \"{}\"\nlived = \"{}\"\n\
             imds = \"{}\"\npower_off_in_tests = \"/bin/false\"\n",
            at("state"),
            at("tools"),
            at("lock"),
            at("deadline"),
            at("run"),
            at("lived"),
            self.metadata.at,
        );
        fs::write(machine.join("agent.toml"), text).unwrap();
        let log = machine.join("log");
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(self.node.programs.join("drums-agent")).arg("run");
        command.arg("--config").arg(machine.join("agent.toml"));
        command.arg("--token-file").arg(self.dir.join(format!("{host}.token")));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(fs::File::create(&log).unwrap());
        (Process(command.spawn().unwrap()), log)
    }

    /// How an agent that is not enrolled ends, and what it says.
    fn refused(&self, machine: &str, host: &str, on_ec2: bool) -> (Option<i32>, String) {
        let (mut agent, log) = self.agent(machine, host, on_ec2);
        let mut status = None;
        wait_until(PATIENCE, || {
            status = agent.0.try_wait().unwrap();
            status.is_some()
        });
        let said = fs::read_to_string(log).unwrap();
        let status = status.unwrap_or_else(|| panic!("{machine} did not end: {said}"));
        (status.code(), said)
    }

    /// The host connects, and its agent ends in order.
    fn accepted(&self, machine: &str, host: &str) {
        let (mut agent, log) = self.agent(machine, host, true);
        let state = || {
            let fleet = self.node.json(&["fleet", "--json"]);
            let hosts = fleet["hosts"].as_array().unwrap().clone();
            hosts.into_iter().find(|h| h["host"] == host || h["name"] == host).unwrap()["state"].clone()
        };
        let connected = wait_until(PATIENCE, || agent.0.try_wait().unwrap().is_some() || state() == "connected");
        assert!(connected && state() == "connected", "{}: {}", state(), fs::read_to_string(&log).unwrap());
        kill(Pid::from_raw(agent.0.id().cast_signed()), Signal::SIGTERM).unwrap();
        assert!(agent.0.wait().unwrap().success(), "{}", fs::read_to_string(&log).unwrap());
    }

    fn events(&self, host: &str, action: &str) -> Vec<String> {
        let events = self.node.json(&["events", "--host", host, "--json"]);
        let rows = events["events"].as_array().or(events.as_array()).unwrap().clone();
        rows.iter().filter(|e| e["action"] == action).map(|e| e["detail"].as_str().unwrap().to_owned()).collect()
    }
}

fn rand_bytes(attempt: u16) -> [u8; 32] {
    [u8::try_from(attempt).unwrap(); 32]
}

fn said_so((code, said): &(Option<i32>, String), want: i32, words: &[&str]) {
    assert_eq!(*code, Some(want), "{said}");
    for word in words {
        assert!(said.contains(word), "it does not say {word:?}: {said}");
    }
}

#[test]
fn live_a_launched_host_is_enrolled_as_the_instance_that_was_launched_and_as_no_other() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIP root: not root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let world = World::start(dir.path());
    let (one, two) = (world.intend("h1", 1), world.intend("h2", 2));

    // Whoever has read the user data has the token, and no document; somebody is told of it.
    said_so(&world.refused("thief", "h1", false), 20, &["instance-not-shown", "h1", one.launch.to_string().as_str()]);
    let told = world.events("h1", "enrolment-refused");
    assert!(told.len() == 1 && told[0].contains("instance-not-shown"), "{told:?}");

    // Before the launch was read back nobody knows which instance it is: it is started again, until it may.
    world.metadata.show(&document(FIRST));
    said_so(&world.refused("m1", "h1", true), 3, &["instance-not-known-yet", "tried again"]);
    world.launched(&one, FIRST);
    world.accepted("m1", "h1");
    let used = world.events("h1", "token-used");
    assert!(used.len() == 1 && used[0].contains(FIRST) && used[0].contains(&one.launch.to_string()), "{used:?}");

    world.launched(&two, SECOND);
    // A document that was used by another host, whoever shows it.
    said_so(&world.refused("m2-a", "h2", true), 20, &["instance-used", "the identity document of host h1"]);
    let (account, kind) = (("123456789012", "210987654321"), ("c8i.2xlarge", "c8i.24xlarge"));
    for (machine, document, words) in [
        (
            "m2-b",
            document(STRANGER),
            vec!["instance-other", "i-0bbbbbbbbbbbbbbbb was launched, and i-0cccccccccccccccc is shown"],
        ),
        (
            "m2-c",
            document(SECOND).replace(account.0, account.1),
            vec!["instance-other", "account 123456789012 was launched"],
        ),
        ("m2-d", document(SECOND).replace(kind.0, kind.1), vec!["instance-other", "type c8i.2xlarge was launched"]),
    ] {
        world.metadata.show(&document);
        said_so(&world.refused(machine, "h2", true), 20, &words);
    }
    // As somebody says who can write a document, and not sign it.
    world.metadata.show(&document(STRANGER));
    world.metadata.shown.lock().unwrap().0 = document(SECOND);
    said_so(&world.refused("m2-e", "h2", true), 20, &["instance-not-signed", "eu-central-1"]);

    // All that has not cost the instance its token.
    world.metadata.show(&document(SECOND));
    world.accepted("m2", "h2");
    // And afterwards nobody else has anything of it.
    said_so(&world.refused("m2-f", "h2", true), 20, &["token-used"]);
}
