//! What the guest is told at its start: from the environment, or from the kernel's command line when the kernel is ours.

use std::{collections::BTreeMap, fmt, net::Ipv4Addr, str::FromStr};

pub const DEFAULT_PORT: u16 = 5000;

/// An IPv4 address with the length of its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    pub address: Ipv4Addr,
    pub prefix: u8,
}

impl Cidr {
    pub fn netmask(self) -> Ipv4Addr {
        let bits = u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0);
        Ipv4Addr::from(bits)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl FromStr for Cidr {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let refuse = || format!("{s:?} is not an address: expected four numbers and a prefix, as in 198.19.0.2/30");
        let (address, prefix) = s.split_once('/').ok_or_else(refuse)?;
        let prefix = prefix.parse().ok().filter(|p| *p <= 32).ok_or_else(refuse)?;
        Ok(Self { address: address.parse().map_err(|_| refuse())?, prefix })
    }
}

/// A hardware address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl FromStr for Mac {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let refuse =
            || format!("{s:?} is not a hardware address: expected six pairs of digits, as in 02:00:00:00:00:01");
        let mut out = [0; 6];
        let mut parts = s.split(':');
        for byte in &mut out {
            let part = parts.next().filter(|p| p.len() == 2).ok_or_else(refuse)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| refuse())?;
        }
        if parts.next().is_some() { Err(refuse()) } else { Ok(Self(out)) }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// True if the kernel is the session's own: modules, link, clock and power are ours to deal with.
    pub own_kernel: bool,
    pub hostname: Option<String>,
    pub machine_id: Option<String>,
    pub port: u16,
    pub address: Option<Cidr>,
    pub gateway: Option<Ipv4Addr>,
    /// Hardware address of the gateway: entered for good, so that no answer waits for a resolution.
    pub gateway_mac: Option<Mac>,
}

impl Config {
    /// A container sees its host's command line, so that one counts only if the environment says nothing at all.
    pub fn read(environment: impl Iterator<Item = (String, String)>, command_line: &str) -> Result<Self, String> {
        let mut found: BTreeMap<String, String> = environment
            .filter_map(|(k, v)| Some((k.strip_prefix("DRUMS_")?.to_ascii_lowercase(), v)))
            .filter(|(_, v)| !v.is_empty())
            .collect();
        if found.is_empty() {
            found = command_line
                .split_ascii_whitespace()
                .filter_map(|word| word.strip_prefix("drums.")?.split_once('='))
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .collect();
        }
        let get = |key: &str| found.get(key).map(String::as_str);
        let port = match get("port") {
            Some(p) => p.parse().map_err(|_| format!("port {p:?} is not a number from 0 to 65535"))?,
            None => DEFAULT_PORT,
        };
        let hostname = get("hostname").map(checked_hostname).transpose()?;
        let machine_id = get("machine_id").map(checked_machine_id).transpose()?;
        let gateway = match get("gateway") {
            Some(g) => Some(g.parse().map_err(|_| format!("gateway {g:?} is not an IPv4 address"))?),
            None => None,
        };
        Ok(Self {
            own_kernel: get("boot") == Some("vm"),
            hostname,
            machine_id,
            port,
            address: get("address").map(str::parse).transpose()?,
            gateway,
            gateway_mac: get("gateway_mac").map(str::parse).transpose()?,
        })
    }
}

pub fn checked_hostname(s: &str) -> Result<String, String> {
    let fine = !s.is_empty() && s.len() <= 64 && s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.');
    if fine { Ok(s.to_owned()) } else { Err(format!("hostname {s:?} is not 1 to 64 letters, digits, - and .")) }
}

pub fn checked_machine_id(s: &str) -> Result<String, String> {
    let fine = s.len() == 32 && s.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    if fine { Ok(s.to_owned()) } else { Err(format!("machine id {s:?} is not 32 lower-case hexadecimal digits")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    /// The command line and the environment come from the host, the values through it from a plan.
    #[test]
    fn fuzz_the_configuration() {
        let good = b"quiet drums.boot=vm drums.hostname=s1 drums.address=198.19.0.2/30 drums.gateway=198.19.0.1 \
                     drums.gateway_mac=02:00:00:00:00:01 drums.port=80 drums.machine_id=0123456789abcdef0123456789abcdef"
            .to_vec();
        drums_fuzz::decoder!(vec![good], |bytes: &[u8]| {
            let line = String::from_utf8_lossy(bytes);
            if let Ok(c) = Config::read(std::iter::empty(), &line) {
                assert!(c.address.is_none_or(|a| a.prefix <= 32));
                assert!(c.hostname.is_none_or(|h| h.len() <= 64));
            }
        });
    }

    #[test]
    fn a_virtual_machine_reads_the_command_line() {
        let line = "quiet panic=-1 drums.boot=vm drums.hostname=s1g1 drums.address=198.19.0.2/30 drums.gateway=198.19.0.1 \
                    drums.gateway_mac=02:00:00:00:00:01 drums.machine_id=0123456789abcdef0123456789abcdef\n";
        let c = Config::read(std::iter::empty(), line).unwrap();
        assert!(c.own_kernel);
        assert_eq!(c.hostname.as_deref(), Some("s1g1"));
        assert_eq!(c.address.unwrap().to_string(), "198.19.0.2/30");
        assert_eq!(c.address.unwrap().netmask(), Ipv4Addr::new(255, 255, 255, 252));
        assert_eq!(c.gateway_mac, Some(Mac([2, 0, 0, 0, 0, 1])));
        assert_eq!(c.port, 5000);
    }

    #[test]
    fn a_container_never_obeys_its_host_s_command_line() {
        let c = Config::read(env(&[("DRUMS_HOSTNAME", "a"), ("HOME", "/")]).into_iter(), "drums.boot=vm drums.port=1")
            .unwrap();
        assert!(!c.own_kernel);
        assert_eq!((c.hostname.as_deref(), c.port), (Some("a"), 5000));
    }

    #[test]
    fn nonsense_is_refused_in_words() {
        for (key, value, word) in [
            ("DRUMS_PORT", "70000", "port"),
            ("DRUMS_ADDRESS", "198.19.0.2", "prefix"),
            ("DRUMS_ADDRESS", "198.19.0.2/33", "prefix"),
            ("DRUMS_GATEWAY", "x", "gateway"),
            ("DRUMS_GATEWAY_MAC", "02:00:00:00:00", "hardware"),
            ("DRUMS_HOSTNAME", "a b", "hostname"),
            ("DRUMS_MACHINE_ID", "ABC", "machine id"),
        ] {
            let error = Config::read(env(&[(key, value)]).into_iter(), "").unwrap_err();
            assert!(error.contains(word), "{key}: {error}");
        }
    }

    #[test]
    fn the_widest_and_the_narrowest_prefix_have_a_mask() {
        assert_eq!("1.2.3.4/0".parse::<Cidr>().unwrap().netmask(), Ipv4Addr::UNSPECIFIED);
        assert_eq!("1.2.3.4/32".parse::<Cidr>().unwrap().netmask(), Ipv4Addr::BROADCAST);
    }
}
