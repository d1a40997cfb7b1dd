//! Function, identity and equivalence of one session: pure checks of what a guest said against what it was asked to be.
//! Each answers with failures in words; empty means passed.

use drums_common::{arm::ArmKind, digest::Sha256, evidence::Identity};

use crate::{arms::WantedIdentity, engine::api::GuestReady};

/// A session answered ready: is it the session that was ordered?
pub fn function(kind: ArmKind, wanted: &WantedIdentity, state: &str, ready: &GuestReady) -> Vec<String> {
    let mut out = Vec::new();
    let mut differs = |what: &str, want: &str, got: &str| {
        if want != got {
            out.push(format!("{what} is {got:?} and was to be {want:?}"));
        }
    };
    differs("its hostname", &wanted.hostname, &ready.hostname);
    differs("its machine id", &wanted.machine_id, &ready.machine_id);
    differs("its boot", if kind.from_template() { "restored" } else { "cold" }, &ready.boot);
    differs("its saved state", state, &ready.state);
    if kind.from_template() && state.is_empty() {
        out.push("its template had no saved state, so nothing shows that it was restored".to_owned());
    }
    out
}

/// Siblings must differ in every field from everyone seen before in the run.
pub fn distinct(identity: &Identity, seen: &[(String, Identity)]) -> Vec<String> {
    let mut out = Vec::new();
    let fields = |i: &Identity| {
        [
            ("hostname", i.hostname.clone()),
            ("machine id", i.machine_id.clone()),
            ("address", i.address.clone()),
            ("random stream", i.random.clone()),
        ]
    };
    for (n, (what, mine)) in fields(identity).into_iter().enumerate() {
        if mine.is_empty() {
            out.push(format!("it has no {what}"));
        } else if let Some((who, _)) = seen.iter().find(|(_, other)| fields(other)[n].1 == mine) {
            out.push(format!("its {what} {mine} is also that of {who}"));
        }
    }
    out
}

/// The guest server's digest as a session told it (zeros when it did not), and what contradicts the workload.
pub fn equivalence(expected: Sha256, got: Option<Sha256>) -> (Sha256, Option<String>) {
    match got {
        Some(got) if got == expected => (got, None),
        Some(got) => (got, Some(format!("the guest server's SHA-256 is {got}; the workload's is {expected}"))),
        None => (Sha256([0; 32]), Some("the guest server did not tell its digest".to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted() -> WantedIdentity {
        WantedIdentity { hostname: "s1".into(), machine_id: "aa".into(), seed_hex: String::new() }
    }

    fn ready(boot: &str, state: &str) -> GuestReady {
        GuestReady {
            hostname: "s1".into(),
            machine_id: "aa".into(),
            boot: boot.into(),
            state: state.into(),
            ..GuestReady::default()
        }
    }

    #[test]
    fn function_wants_the_ordered_session() {
        use ArmKind::{DrumsCold, DrumsRestored};
        assert!(function(DrumsCold, &wanted(), "", &ready("cold", "")).is_empty());
        assert!(function(DrumsRestored, &wanted(), "mark", &ready("restored", "mark")).is_empty());
        for (kind, state, got) in [
            (DrumsCold, "", ready("restored", "")),
            (DrumsCold, "", ready("cold", "mark")),
            (DrumsRestored, "mark", ready("cold", "mark")),
            (DrumsRestored, "mark", ready("restored", "other")),
            (DrumsRestored, "", ready("restored", "")),
            (DrumsCold, "", GuestReady { hostname: "template".into(), ..ready("cold", "") }),
            (DrumsCold, "", GuestReady { machine_id: "bb".into(), ..ready("cold", "") }),
        ] {
            assert_eq!(function(kind, &wanted(), state, &got).len(), 1, "{kind} {got:?}");
        }
    }

    #[test]
    fn one_shared_field_is_a_breach() {
        let id = |a: &str, b: &str, c: &str, d: &str| Identity {
            hostname: a.into(),
            machine_id: b.into(),
            address: c.into(),
            random: d.into(),
        };
        let seen = vec![
            ("template 0 of w".to_owned(), id("t", "t", "t", "t")),
            ("a failed session".to_owned(), Identity::default()),
        ];
        assert!(distinct(&id("a", "b", "c", "d"), &seen).is_empty());
        assert_eq!(distinct(&id("a", "b", "c", "t"), &seen), ["its random stream t is also that of template 0 of w"]);
        assert_eq!(distinct(&id("a", "b", "", "d"), &seen), ["it has no address"]);
        assert_eq!(distinct(&id("t", "t", "t", "t"), &seen).len(), 4);
    }

    #[test]
    fn the_guest_server_must_be_the_workloads() {
        let want = Sha256::of(b"guest");
        assert_eq!(equivalence(want, Some(want)), (want, None));
        assert!(equivalence(want, Some(Sha256::of(b"other"))).1.is_some());
        assert!(equivalence(want, None).1.is_some());
    }
}
