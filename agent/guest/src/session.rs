//! Who this session is, and the calls of DrumsBench's own: `/drums/ready`, `state`, `personalise`, `digest`.

use std::{
    fs, io,
    net::Ipv4Addr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{
    chacha::Stream,
    config::{Cidr, Config, Mac, checked_hostname, checked_machine_id},
    http::{Request, Response},
    link,
};

const MACHINE_ID: &str = "/etc/machine-id";
/// Longest nonce and saved state that are taken.
const MAX_TEXT: usize = 256;

pub struct Session {
    own_kernel: bool,
    gateway: Option<Ipv4Addr>,
    gateway_mac: Option<Mac>,
    started: Instant,
    inner: Mutex<Inner>,
}

struct Inner {
    random: Stream,
    state: String,
    restored: bool,
}

/// What `/drums/ready` answers. Field names are the contract with the prober.
#[derive(Serialize)]
struct Ready {
    nonce: String,
    ready: bool,
    hostname: String,
    machine_id: String,
    address: String,
    /// 16 bytes of the userspace stream, never the same twice.
    random: String,
    state: String,
    /// `cold` until the post-restore call, then `restored`.
    boot: &'static str,
    /// Our own process id: 1 in every arm.
    pid: u32,
    own_kernel: bool,
    /// Wall clock, microseconds since 1970.
    clock_us: u64,
    uptime_us: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    state: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Personalise {
    hostname: Option<String>,
    machine_id: Option<String>,
    address: Option<String>,
    gateway: Option<String>,
    gateway_mac: Option<String>,
    clock_us: Option<u64>,
    seed_hex: Option<String>,
}

/// An address to take once the answer has left.
pub struct Switch {
    address: Cidr,
    gateway: Option<Ipv4Addr>,
    gateway_mac: Option<Mac>,
}

impl Switch {
    pub fn apply(&self) -> io::Result<()> {
        link::configure(self.address, self.gateway, self.gateway_mac)
    }
}

impl Session {
    pub fn new(config: &Config, seed: &[u8; 32]) -> Self {
        Self {
            own_kernel: config.own_kernel,
            gateway: config.gateway,
            gateway_mac: config.gateway_mac,
            started: Instant::now(),
            inner: Mutex::new(Inner { random: Stream::new(seed), state: String::new(), restored: false }),
        }
    }

    pub fn ready(&self, request: &Request) -> Response {
        let nonce = request.query("nonce").unwrap_or_default();
        if nonce.is_empty() || nonce.len() > MAX_TEXT || !nonce.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Response::error(400, "expected ?nonce= with hexadecimal digits");
        }
        let (random, state, restored) = {
            let mut inner = self.lock();
            (inner.random.next16(), inner.state.clone(), inner.restored)
        };
        Response::json(
            200,
            &Ready {
                nonce: nonce.to_owned(),
                ready: true,
                hostname: hostname(),
                machine_id: machine_id(),
                address: link::current(),
                random: to_hex(&random),
                state,
                boot: if restored { "restored" } else { "cold" },
                pid: std::process::id(),
                own_kernel: self.own_kernel,
                clock_us: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64),
                uptime_us: self.started.elapsed().as_micros() as u64,
            },
        )
    }

    /// Sets the saved state: a template marks itself before it is saved, and its siblings carry the mark.
    pub fn set_state(&self, request: &Request) -> Response {
        match serde_json::from_slice::<State>(&request.body) {
            Ok(s) if s.state.len() <= MAX_TEXT => {
                self.lock().state = s.state;
                Response::json(200, &serde_json::json!({ "ok": true }))
            }
            Ok(_) => Response::error(400, format!("the state is longer than {MAX_TEXT} bytes")),
            Err(e) => Response::error(400, format!("the body is not {{\"state\":\"..\"}}: {e}")),
        }
    }

    /// The post-restore call. Everything asked for is tried, the answer says what became of each, and `ok` is true
    /// only if all of it happened. A new address is not taken here: the caller applies the `Switch` after answering.
    pub fn personalise(&self, request: &Request) -> (Response, Option<Switch>) {
        let order: Personalise = match serde_json::from_slice(&request.body) {
            Ok(order) => order,
            Err(e) => return (Response::error(400, format!("the body is not a post-restore order: {e}")), None),
        };
        let plan = match self.plan(&order) {
            Ok(plan) => plan,
            Err(why) => return (Response::error(400, why), None),
        };
        let mut failed = Vec::new();
        let mut done = Vec::new();
        let mut note = |what: &str, result: io::Result<()>| match result {
            Ok(()) => done.push(what.to_owned()),
            Err(e) => failed.push(format!("{what}: {e}")),
        };
        if let Some(us) = order.clock_us {
            // Only a kernel of our own has a clock of its own; elsewhere this would set the host's.
            if self.own_kernel {
                note("clock", set_clock(us));
            } else {
                note("clock is the host's", Ok(()));
            }
        }
        if let Some(name) = &order.hostname {
            note("hostname", set_hostname(name));
        }
        if let Some(id) = &order.machine_id {
            note("machine_id", set_machine_id(id));
        }
        if let Some(seed) = plan.seed {
            self.lock().random = Stream::new(&seed);
            note("random", Ok(()));
            if self.own_kernel {
                note("kernel_random", reseed_kernel(&seed));
            }
        }
        self.lock().restored = true;
        if plan.switch.is_some() {
            note("address follows", Ok(()));
        }
        let answer = serde_json::json!({ "ok": failed.is_empty(), "done": done, "failed": failed });
        (Response::json(200, &answer), plan.switch)
    }

    fn plan(&self, order: &Personalise) -> Result<Plan, String> {
        order.hostname.as_deref().map(checked_hostname).transpose()?;
        order.machine_id.as_deref().map(checked_machine_id).transpose()?;
        let seed = order.seed_hex.as_deref().map(seed_of).transpose()?;
        let gateway = match order.gateway.as_deref() {
            Some(g) => Some(g.parse().map_err(|_| format!("gateway {g:?} is not an IPv4 address"))?),
            None => self.gateway,
        };
        let gateway_mac = order.gateway_mac.as_deref().map(str::parse).transpose()?.or(self.gateway_mac);
        let address: Option<Cidr> = order.address.as_deref().map(str::parse).transpose()?;
        // Where the host configures the link, an address in the order is only information.
        let switch = address.filter(|_| self.own_kernel).map(|address| Switch { address, gateway, gateway_mac });
        Ok(Plan { seed, switch })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Plan {
    seed: Option<[u8; 32]>,
    switch: Option<Switch>,
}

/// Digest of the binary that runs, read when asked: a call of its own, so that no arm pays for it while it is timed.
pub fn digest() -> Response {
    let hash = || -> io::Result<String> {
        let mut hasher = Sha256::new();
        io::copy(&mut fs::File::open("/proc/self/exe")?, &mut hasher)?;
        Ok(to_hex(&hasher.finalize()))
    };
    match hash() {
        Ok(sha256) => Response::json(200, &serde_json::json!({ "guest_sha256": sha256 })),
        Err(e) => Response::error(500, format!("cannot read /proc/self/exe: {e}")),
    }
}

pub fn set_hostname(name: &str) -> io::Result<()> {
    Ok(nix::unistd::sethostname(name)?)
}

pub fn set_machine_id(id: &str) -> io::Result<()> {
    // Replaced, not rewritten: on an overlay a write would copy the lower file up first, and a reader never sees half.
    let fresh = format!("{MACHINE_ID}.new");
    fs::write(&fresh, format!("{id}\n"))?;
    fs::rename(&fresh, MACHINE_ID)
}

fn hostname() -> String {
    nix::unistd::gethostname().map(|h| h.to_string_lossy().into_owned()).unwrap_or_default()
}

fn machine_id() -> String {
    fs::read_to_string(MACHINE_ID).map(|t| t.trim().to_owned()).unwrap_or_default()
}

fn set_clock(us: u64) -> io::Result<()> {
    let time = nix::sys::time::TimeSpec::new((us / 1_000_000) as i64, (us % 1_000_000 * 1000) as i64);
    Ok(nix::time::clock_settime(nix::time::ClockId::CLOCK_REALTIME, time)?)
}

/// Stirs the kernel's own generator and makes it draw a new key: a restored kernel repeats its template's otherwise,
/// unless it has a driver for the generation id of its machine.
fn reseed_kernel(seed: &[u8; 32]) -> io::Result<()> {
    use std::{io::Write as _, os::fd::AsRawFd as _};
    const RNDRESEEDCRNG: libc::Ioctl = 0x5207 as libc::Ioctl;
    let mut device = fs::OpenOptions::new().write(true).open("/dev/urandom")?;
    device.write_all(seed)?;
    // SAFETY: this request takes no argument.
    if unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn seed_of(hex: &str) -> Result<[u8; 32], String> {
    let refuse = || "seed_hex is not 64 hexadecimal digits".to_owned();
    if hex.len() != 64 || !hex.is_ascii() {
        return Err(refuse());
    }
    let mut out = [0; 32];
    for (i, byte) in out.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).map_err(|_| refuse())?;
    }
    Ok(out)
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> Session {
        Session::new(&Config::read(std::iter::empty(), "").unwrap(), &[1; 32])
    }

    fn request(query: &[(&str, &str)], body: &str) -> Request {
        Request {
            method: String::new(),
            path: String::new(),
            query: query.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            headers: vec![],
            body: body.as_bytes().to_vec(),
        }
    }

    fn ready(session: &Session) -> serde_json::Value {
        serde_json::from_slice(&session.ready(&request(&[("nonce", "00ff")], "")).body).unwrap()
    }

    #[test]
    fn ready_echoes_the_nonce_and_never_repeats_its_random_bytes() {
        let s = session();
        let (a, b) = (ready(&s), ready(&s));
        assert_eq!((a["nonce"].as_str(), a["boot"].as_str()), (Some("00ff"), Some("cold")));
        assert_ne!(a["random"], b["random"]);
        assert_eq!(a["random"].as_str().unwrap().len(), 32);
    }

    #[test]
    fn a_nonce_is_required_and_bounded() {
        let s = session();
        for nonce in ["", "xyz", &"a".repeat(MAX_TEXT + 1)] {
            assert_eq!(s.ready(&request(&[("nonce", nonce)], "")).status, 400);
        }
        assert_eq!(s.ready(&request(&[], "")).status, 400);
    }

    #[test]
    fn siblings_agree_on_the_state_and_part_after_a_new_key() {
        let (a, b) = (session(), session());
        for s in [&a, &b] {
            assert_eq!(s.set_state(&request(&[], "{\"state\":\"saved-1\"}")).status, 200);
        }
        assert_eq!(ready(&a)["random"], ready(&b)["random"], "clones repeat until they are re-keyed");
        let order = format!("{{\"seed_hex\":\"{}\"}}", "5a".repeat(32));
        assert_eq!(a.personalise(&request(&[], &order)).0.status, 200);
        let (a, b) = (ready(&a), ready(&b));
        assert_ne!(a["random"], b["random"]);
        assert_eq!(
            (&a["state"], a["boot"].as_str(), b["boot"].as_str()),
            (&b["state"], Some("restored"), Some("cold"))
        );
    }

    #[test]
    fn a_broken_order_changes_nothing() {
        let s = session();
        for body in [
            "",
            "[]",
            "{\"seed_hex\":\"00\"}",
            "{\"hostname\":\"a b\"}",
            "{\"machine_id\":\"x\"}",
            "{\"address\":\"1.2.3.4\"}",
            "{\"gateway\":\"x\"}",
            "{\"unknown\":1}",
            "{\"clock_us\":-1}",
        ] {
            assert_eq!(s.personalise(&request(&[], body)).0.status, 400, "{body}");
        }
        assert_eq!(ready(&s)["boot"].as_str(), Some("cold"));
    }

    #[test]
    fn a_namespace_never_sets_the_host_s_clock_or_its_address() {
        let s = session();
        let (response, switch) = s.personalise(&request(&[], "{\"clock_us\":1,\"address\":\"198.19.0.2/30\"}"));
        assert!(String::from_utf8(response.body).unwrap().contains("clock is the host's"));
        assert!(switch.is_none());
    }
}
