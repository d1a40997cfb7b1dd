//! Layer 1 on a real kernel and a real service manager: the image of a server boots with a launch's own user data, and ends
//! when that says. All that is seen of it is its serial line and QEMU's events.

use std::{
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use drums_common::clock::Micros;
use drums_infra::{
    guest::{Guest, Off, Seed},
    image::server::{self, Server},
};
use drums_provider::user_data;

/// Of a boot to the point where user data run. A minute on two busy cores without KVM.
const BOOTS_IN: Duration = Duration::from_secs(240);
/// What a layer may take beyond the deadline.
const BOUND_S: u64 = 120;
/// systemd's word for the timer that user data's first line asks for.
const ARMED: &str = "Started drums-first-deadline.timer";
const UNIT: &str = "Started drums-deadline.service";

fn image() -> Option<Server> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("SKIP root: not root");
        return None;
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap();
    Some(server::shared(target).unwrap_or_else(|e| panic!("{e}: {:?}", std::error::Error::source(&e))))
}

/// As a launch gives it. No agent will come: nothing answers at that address.
fn user_data(deadline: SystemTime, lifetime: Duration) -> String {
    let since = deadline.duration_since(UNIX_EPOCH).unwrap();
    let guest = user_data::Guest {
        deadline: Micros(i64::try_from(since.as_micros()).unwrap()),
        lifetime_ms: u64::try_from(lifetime.as_millis()).unwrap(),
        agent_url: "http://10.0.2.2:9/drums-agent".to_owned(),
        agent_sha256: "5".repeat(64),
        token: "drums-token-1".to_owned(),
    };
    guest.user_data().unwrap().0
}

fn boot(server: &Server, seed: &Seed) -> Guest {
    Guest::boot(server, &Seed { instance_id: "i-0123456789abcdef0".to_owned(), ..seed.clone() }).unwrap()
}

/// Off by itself, and not before `from` and not after `to`; a second is what its clock and ours may be apart.
fn in_time(guest: &Guest, off: &Off, from: SystemTime, to: SystemTime) {
    let s = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    assert_eq!(off.reason, "guest-shutdown", "{}", guest.console());
    assert!(off.at >= from - Duration::from_secs(1), "{} s early:\n{}", s(from) - s(off.at), guest.console());
    assert!(off.at <= to, "{} s late:\n{}", s(off.at) - s(to), guest.console());
}

#[test]
fn live_a_guest_arms_its_deadline_first_and_at_every_boot_and_is_off_by_it() {
    let Some(server) = image() else { return };
    let lifetime = Duration::from_secs(150);
    let deadline = SystemTime::now() + lifetime;
    let mut guest = boot(&server, &Seed { user_data: user_data(deadline, lifetime), ..Seed::default() });
    guest.says(0, UNIT, BOOTS_IN).unwrap();
    let said = guest.console();
    let at = |text| said.find(text).unwrap_or_else(|| panic!("never said {text:?}:\n{said}"));
    assert!(at(ARMED) < at(UNIT), "the timer is not the first:\n{said}");
    assert!(!guest.is_off(), "off before its deadline:\n{said}");

    // As by a crash in the middle: the disk is as it was left.
    let before = guest.lines();
    guest.reset().unwrap();
    guest.says(before, "Linux version", BOOTS_IN).unwrap();
    guest.says(before, ARMED, BOOTS_IN).unwrap();
    // A boot that comes after the deadline, as on a machine that is busy, is ended as soon as it gets that far.
    let late = SystemTime::now().max(deadline) + Duration::from_secs(BOUND_S);
    let off = guest.off(lifetime + Duration::from_secs(BOUND_S)).unwrap();
    in_time(&guest, &off, deadline, late);
}

#[test]
fn live_a_guest_whose_clock_is_years_behind_is_off_at_the_end_of_its_lifetime() {
    let Some(server) = image() else { return };
    let lifetime = Duration::from_secs(75);
    let begun = SystemTime::now();
    let seed = Seed {
        // By the wall clock it would live for hours, and for years by its own.
        user_data: user_data(begun + Duration::from_secs(7_200), lifetime),
        clock: Some("2016-05-01T00:00:00".to_owned()),
        ..Seed::default()
    };
    let guest = boot(&server, &seed);
    guest.says(0, "setting system clock to 2016-05-01", BOOTS_IN).unwrap();
    let off = guest.off(BOOTS_IN + lifetime).unwrap();
    in_time(&guest, &off, begun + lifetime, begun + lifetime + Duration::from_secs(BOUND_S));
}
