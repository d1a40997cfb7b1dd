//! The external arm: a program of somebody else's makes the sessions, spoken to in JSON lines over its standard input
//! and output. How incumbents join that cannot be planned step by step. `docs/external-arm.md` is the contract.
//!
//! One process of the program per session lives in the session's group; undoing a session asks a fresh process, by the
//! session's name, because the first one may have died. Everything else (limits, prober, gates) is as in every arm.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::SocketAddrV4,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    time::Duration,
};

use drums_common::arm::ArmKind;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{
    arms::{Arm, GUEST_PORT, Plan, Site, Template, ToolPaths, WantedIdentity, cgroup_limits},
    engine::api::{SessionOrder, Target},
    probe::raw_us,
    steps::{Cx, MakeCgroup, MakeDir, PlanError, Receipt, Resource, Step, StepError, tail},
    sys::{Leaf, LeafOf, StdIo, Sys, SysError, ToolSpec},
};

/// The longest answer accepted.
const MAX_LINE: usize = 64 << 10;
/// For everything but `create`, which has the session's own limit.
const SHORT: Duration = Duration::from_secs(20);

/// What the program says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Answer {
    ok: bool,
    error: String,
    /// Of `create`: where the session's guest server answers.
    address: String,
    /// Of `create` and `facts`: what shows that the mechanism ran.
    mechanism: BTreeMap<String, String>,
    /// Of `observe`: is anything of the session left?
    present: bool,
}

#[derive(Debug, thiserror::Error)]
enum TalkError {
    #[error("the program's {op}: {source}")]
    Io { op: String, source: std::io::Error },
    #[error("the program ended before it answered {op}")]
    Ended { op: String },
    #[error("the program did not answer {op} within {waited_ms} ms")]
    TimedOut { op: String, waited_ms: u128 },
    #[error("the program's answer to {op} is not as agreed: {why}")]
    Malformed { op: String, why: String },
    #[error("the program refused {op}: {why}")]
    Refused { op: String, why: String },
}

/// One process of the program.
struct Talk {
    stream: UnixStream,
    inbox: Vec<u8>,
}

impl Talk {
    fn new(stream: UnixStream) -> Self {
        Self { stream, inbox: Vec::new() }
    }

    fn ask(&mut self, request: &Value, limit: Duration) -> Result<Answer, TalkError> {
        let op = request["op"].as_str().unwrap_or("?").to_owned();
        let io = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset => TalkError::Ended { op: op.clone() },
            _ => TalkError::Io { op: op.clone(), source },
        };
        self.stream.set_write_timeout(Some(SHORT)).map_err(io)?;
        self.stream.write_all(format!("{request}\n").as_bytes()).map_err(io)?;
        let deadline = raw_us() + limit.as_micros() as u64;
        loop {
            if let Some(end) = self.inbox.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.inbox.drain(..=end).collect();
                let answer: Answer = serde_json::from_slice(&line).map_err(|e| {
                    let text = String::from_utf8_lossy(&line[..line.len().min(200)]).into_owned();
                    TalkError::Malformed { op: op.clone(), why: format!("{e} in {text:?}") }
                })?;
                return if answer.ok { Ok(answer) } else { Err(TalkError::Refused { op, why: answer.error }) };
            }
            if self.inbox.len() > MAX_LINE {
                return Err(TalkError::Malformed { op, why: format!("a line longer than {MAX_LINE} bytes") });
            }
            let left = deadline.saturating_sub(raw_us());
            if left == 0 {
                return Err(TalkError::TimedOut { op, waited_ms: limit.as_millis() });
            }
            self.stream.set_read_timeout(Some(Duration::from_micros(left))).map_err(io)?;
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(TalkError::Ended { op }),
                Ok(n) => self.inbox.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                    return Err(TalkError::TimedOut { op, waited_ms: limit.as_millis() });
                }
                Err(e) => return Err(io(e)),
            }
        }
    }
}

/// The program, its arguments, and where it may keep things of a session.
fn tool(command: &[String], dir: &Path, leaf: Option<LeafOf>) -> ToolSpec {
    ToolSpec {
        program: command.first().map(PathBuf::from).unwrap_or_default(),
        args: command.get(1..).unwrap_or_default().to_vec(),
        env: vec![("DRUMS_SESSION_DIR".to_owned(), dir.display().to_string())],
        leaf,
        fds: vec![0, 1],
        stderr: StdIo::File(dir.join("external.log")),
        ..ToolSpec::default()
    }
}

/// Asks a fresh process of the program one thing about a session, by name: how the undo and the audit reach it.
fn ask_once(sys: &dyn Sys, command: &[String], dir: &Path, op: &str, session: &str) -> Result<Answer, SysError> {
    let refused = |why: String| SysError::Refused { op: "ask the external program", why };
    let (ours, theirs) = UnixStream::pair().map_err(|e| SysError::os("make", "a socket pair", e))?;
    let theirs = OwnedFd::from(theirs);
    let mut spec = tool(command, dir, None);
    if !sys.path_exists(dir)? {
        spec.stderr = StdIo::Null;
    }
    let child = sys.spawn_tool(&spec, &[theirs.as_fd(), theirs.as_fd()])?;
    drop(theirs);
    let mut talk = Talk::new(ours);
    let answer = talk.ask(&json!({"op": op, "session": session}), SHORT).map_err(|e| refused(e.to_string()));
    // End of input is its sign to leave; one that stays is killed.
    drop(talk);
    if sys.wait(&child, 2_000).is_err() {
        sys.signal(&child, libc::SIGKILL)?;
        sys.wait(&child, 2_000)?;
    }
    answer
}

/// Undo of [`Resource::External`].
pub fn destroy(sys: &dyn Sys, command: &[String], dir: &Path, session: &str) -> Result<(), SysError> {
    ask_once(sys, command, dir, "destroy", session).map(drop)
}

/// Observation of [`Resource::External`].
pub fn present(sys: &dyn Sys, command: &[String], dir: &Path, session: &str) -> Result<bool, SysError> {
    ask_once(sys, command, dir, "observe", session).map(|a| a.present)
}

/// The program's process for this session; later steps and the fidelity reading speak to it.
struct SpawnProgram {
    resource: Resource,
    spec: ToolSpec,
}

/// The conversation, kept with the session.
struct Conversation(std::sync::Mutex<Talk>);

impl Step for SpawnProgram {
    fn phase(&self) -> &'static str {
        "program"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        let make = |source| StepError::Make { resource: self.resource.to_string(), source };
        let (ours, theirs) = UnixStream::pair().map_err(|e| make(SysError::os("make", "a socket pair", e)))?;
        let theirs = OwnedFd::from(theirs);
        let child = sys.spawn_tool(&self.spec, &[theirs.as_fd(), theirs.as_fd()]).map_err(make)?;
        let process = child.process;
        cx.children.insert(Cx::SESSION.to_owned(), child);
        cx.put(Conversation(std::sync::Mutex::new(Talk::new(ours))));
        Ok(Receipt::Process(process))
    }
}

/// `create`: the program answers with the session's address.
struct CreateSession {
    resource: Resource,
    request: Value,
    limit: Duration,
    log: PathBuf,
}

/// What the program said of its mechanism when it made the session.
struct Said(BTreeMap<String, String>);

impl Step for CreateSession {
    fn phase(&self) -> &'static str {
        "create"
    }
    fn resource(&self) -> Option<&Resource> {
        Some(&self.resource)
    }
    fn apply(&self, sys: &dyn Sys, cx: &mut Cx) -> Result<Receipt, StepError> {
        let failed = |e: &dyn std::fmt::Display| {
            StepError::Other(format!("create a session: {e}; its error output: {}", tail(sys, &self.log)))
        };
        let Some(conversation) = cx.get::<Conversation>() else {
            return Err(StepError::Other("create a session: its program was not started".to_owned()));
        };
        let answer = {
            let mut talk = conversation.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            talk.ask(&self.request, self.limit).map_err(|e| failed(&e))?
        };
        let address: SocketAddrV4 = answer.address.parse().map_err(|_| {
            let got = &answer.address;
            failed(&format!("its address {got:?} is not IPv4:PORT, as in 127.0.0.1:5000"))
        })?;
        cx.target = Some(Target::new(address));
        cx.put(Said(answer.mechanism));
        Ok(Receipt::Made)
    }
}

pub struct External;

impl Arm for External {
    fn kind(&self) -> ArmKind {
        ArmKind::External
    }

    /// Which program it is stands in the experiment; whether it runs here is seen when it is started.
    fn unfit(&self, _: &ToolPaths) -> Option<String> {
        None
    }

    fn plan(&self, site: &Site, order: &SessionOrder<'_>, _: Option<&Template>) -> Result<Plan, PlanError> {
        let command = &order.arm.command;
        match command.first() {
            Some(program) if Path::new(program).is_absolute() => {}
            other => {
                let why = format!("arm {} names {other:?} as its program: expected an absolute path", order.arm.name);
                return Err(PlanError::Other(why));
            }
        }
        let (name, dir) = (site.name(order.session), site.dir(order.session));
        let identity = WantedIdentity::of(order);
        let limits = cgroup_limits(order);
        let request = json!({
            "op": "create",
            "session": name,
            "workload": {"tree": order.workload.tree, "sha256": order.workload.sha256},
            "limits": {"cpu_milli": limits.cpu_milli, "cpus": limits.cpus, "memory_bytes": limits.memory_bytes},
            "identity": {
                "hostname": identity.hostname,
                "machine_id": identity.machine_id,
                "seed_hex": identity.seed_hex,
            },
            "ready_timeout_ms": order.ready_timeout.as_millis() as u64,
        });
        let leaf = LeafOf { group: name.clone(), leaf: Leaf::Tool };
        let resource = Resource::External { command: command.clone(), dir: dir.clone(), session: name.clone() };
        Ok(Plan {
            before: Vec::new(),
            steps: vec![
                Box::new(MakeCgroup::new(&name, limits)),
                Box::new(MakeDir::new(&dir, &[])),
                Box::new(SpawnProgram {
                    resource: Resource::Process { role: Cx::SESSION.to_owned() },
                    spec: tool(command, &dir, Some(leaf)),
                }),
                Box::new(CreateSession {
                    resource,
                    request,
                    limit: order.ready_timeout,
                    log: dir.join("external.log"),
                }),
            ],
            // Replaced by what the program answers; until then it leads nowhere.
            ready_at: Target::new(SocketAddrV4::new(std::net::Ipv4Addr::UNSPECIFIED, GUEST_PORT)),
            personalise: None,
            cgroup: name,
        })
    }

    fn mechanism(
        &self,
        _: &Site,
        order: &SessionOrder<'_>,
        _: &dyn Sys,
        cx: &Cx,
        faults: &mut Vec<String>,
    ) -> BTreeMap<String, String> {
        let mut read = cx.get::<Said>().map(|s| s.0.clone()).unwrap_or_default();
        read.insert("program".to_owned(), order.arm.command.join(" "));
        match cx.get::<Conversation>() {
            Some(c) => {
                let mut talk = c.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                match talk.ask(&json!({"op": "facts"}), SHORT) {
                    Ok(answer) => read.extend(answer.mechanism),
                    Err(e) => faults.push(e.to_string()),
                }
            }
            None => faults.push("the session's program is not known".to_owned()),
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader},
        thread::JoinHandle,
    };

    use super::*;

    fn program(answer: &'static str) -> (Talk, JoinHandle<String>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let t = std::thread::spawn(move || {
            let mut line = String::new();
            BufReader::new(theirs.try_clone().unwrap()).read_line(&mut line).unwrap();
            theirs.write_all(answer.as_bytes()).unwrap();
            line
        });
        (Talk::new(ours), t)
    }

    /// Whatever a program answers is an answer or an error within the time limit.
    #[test]
    fn fuzz_answers_of_programs() {
        let good = br#"{"ok":true,"address":"127.0.0.1:5000","mechanism":{"a":"b"},"more":1}"#.to_vec();
        let refused = br#"{"ok":false,"error":"no room"}"#.to_vec();
        drums_fuzz::decoder!(vec![good, refused], |bytes: &[u8]| {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(bytes).unwrap();
            theirs.write_all(b"\n").unwrap();
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            if let Ok(answer) = Talk::new(ours).ask(&json!({"op": "create", "session": "s"}), SHORT) {
                assert!(answer.ok);
            }
        });
    }

    #[test]
    fn an_answer_is_one_line_of_json() {
        let (mut talk, t) =
            program("{\"ok\":true,\"address\":\"127.0.0.1:5000\",\"mechanism\":{\"a\":\"b\"},\"more\":1}\n");
        let a = talk.ask(&json!({"op": "create", "session": "s"}), SHORT).unwrap();
        assert_eq!(a.address, "127.0.0.1:5000");
        assert_eq!(a.mechanism["a"], "b");
        assert_eq!(t.join().unwrap(), "{\"op\":\"create\",\"session\":\"s\"}\n");
    }

    #[test]
    fn refusals_garbage_and_an_early_end_are_told_apart() {
        let ask = |answer| {
            let (mut talk, t) = program(answer);
            let e = talk.ask(&json!({"op": "create"}), SHORT).unwrap_err();
            t.join().unwrap();
            e
        };
        assert!(
            matches!(ask("{\"ok\":false,\"error\":\"no engine\"}\n"), TalkError::Refused { why, .. } if why == "no engine")
        );
        assert!(matches!(ask("hello\n"), TalkError::Malformed { .. }));
        assert!(matches!(ask("{\"ok\":true"), TalkError::Ended { .. }));
    }

    #[test]
    fn silence_has_a_limit() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let e = Talk::new(ours).ask(&json!({"op": "facts"}), Duration::from_millis(50)).unwrap_err();
        assert!(matches!(e, TalkError::TimedOut { .. }), "{e}");
    }
}
