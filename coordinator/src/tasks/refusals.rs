//! How much of strangers' attempts the audit trail takes: whoever reaches a port must not be able to fill the disk.
//!
//! Per minute and source the first refusal is written as it is, the rest as one count. Sources beyond the first few of a
//! minute are counted together.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
};

use drums_common::clock::MonoMicros;

const WINDOW_MS: u64 = 60_000;
/// More than a fleet's worth of hosts with wrong tokens at once.
const SOURCES: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Refusals {
    begun: Option<MonoMicros>,
    /// What was not written down by itself.
    counted: BTreeMap<IpAddr, u32>,
    others: u32,
}

impl Refusals {
    /// True if this one is to be written down by itself.
    pub fn note(&mut self, from: IpAddr, now: MonoMicros) -> bool {
        self.begun.get_or_insert(now);
        let from = network(from);
        if let Some(n) = self.counted.get_mut(&from) {
            *n = n.saturating_add(1);
            return false;
        }
        if self.counted.len() >= SOURCES {
            self.others = self.others.saturating_add(1);
            return false;
        }
        self.counted.insert(from, 0);
        true
    }

    /// What was only counted in a minute that is over: who, and how often.
    pub fn over(&mut self, now: MonoMicros) -> Vec<(String, u32)> {
        if self.begun.is_none_or(|begun| now.ms_since(begun) < WINDOW_MS) {
            return Vec::new();
        }
        let Self { counted, others, .. } = std::mem::take(self);
        let counted = counted.into_iter().map(|(from, n)| (from.to_string(), n));
        counted.chain([("other addresses".to_owned(), others)]).filter(|(_, n)| *n > 0).collect()
    }
}

/// Whoever has one IPv6 address has the 64 bits below its network.
fn network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(s: u64) -> MonoMicros {
        MonoMicros(s * 1_000_000)
    }

    #[test]
    fn a_flood_is_one_row_and_one_count_per_source_and_minute() {
        let mut r = Refusals::default();
        let (a, b): (IpAddr, IpAddr) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let written = (0..10_000).filter(|_| r.note(a, at(5))).count();
        assert_eq!(written, 1);
        assert!(r.note(b, at(6)));
        assert!(r.over(at(64)).is_empty(), "the minute is not over");
        assert_eq!(r.over(at(65)), [("10.0.0.1".to_owned(), 9_999)]);
        assert!(r.over(at(200)).is_empty());
        assert!(r.note(a, at(200)), "another minute");
    }

    #[test]
    fn many_sources_are_counted_together() {
        let mut r = Refusals::default();
        let written = (0..=u16::MAX).filter(|n| r.note([10, 0, (n >> 8) as u8, *n as u8].into(), at(1))).count();
        assert_eq!(written, SOURCES);
        assert_eq!(r.over(at(61)), [("other addresses".to_owned(), 65_536 - SOURCES as u32)]);
        // One IPv6 network is one source, and a mapped address is the IPv4 one.
        assert!(r.note("2001:db8::1".parse().unwrap(), at(70)));
        assert!(!r.note("2001:db8::2".parse().unwrap(), at(70)));
        assert!(r.note("10.0.0.1".parse().unwrap(), at(70)));
        assert!(!r.note("::ffff:10.0.0.1".parse().unwrap(), at(70)));
    }
}
