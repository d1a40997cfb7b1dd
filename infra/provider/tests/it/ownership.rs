//! Who an instance belongs to, and who may end what.

use std::collections::BTreeMap;

use drums_common::{clock::Micros, ids::InstallationId};
use drums_provider::{
    cloud::{Instance, InstanceState},
    deadline::Campaign,
    host::{AdoptedHost, Belongs, KillId, OwnedHost, OwnedInstance},
    tags,
};
use proptest::prelude::*;

const HOUR_MS: u64 = 3_600_000;
const OURS: InstallationId = InstallationId([1; 4]);
const THEIRS: InstallationId = InstallationId([2; 4]);

fn host(installation: InstallationId) -> OwnedHost {
    let campaign = Campaign::new("c1".parse().unwrap(), Micros(1_796_000_000_000_000), None).unwrap();
    OwnedHost::first(installation, "h1".parse().unwrap(), campaign)
}

fn seen(token: Option<String>, tags: BTreeMap<String, String>) -> Instance {
    Instance {
        id: "i-0123456789abcdef0".parse().unwrap(),
        region: "eu-central-1".parse().unwrap(),
        zone: None,
        subnet: None,
        kind: None,
        image: None,
        state: InstanceState::Running,
        launched: Micros(1_795_990_000_000_000),
        token,
        tags,
        nested: None,
        imds_v2: None,
        public_address: false,
        security_groups: Vec::new(),
        profile: None,
        volumes: Vec::new(),
        attributes: None,
    }
}

/// Compiles only while exactly one of the two implementations fits, that is: while `T` cannot be turned into a `KillId`.
trait UnlessMortal<Which> {
    fn spared() -> bool {
        true
    }
}
impl<T> UnlessMortal<()> for T {}
impl<T: Into<KillId>> UnlessMortal<u8> for T {}

#[test]
fn nothing_but_an_owned_instance_gives_what_a_terminate_takes() {
    assert!(<AdoptedHost as UnlessMortal<_>>::spared());
    assert!(<Instance as UnlessMortal<_>>::spared());
    assert!(<OwnedHost as UnlessMortal<_>>::spared(), "not launched, so there is nothing to end");
    let ours = host(OURS);
    let owned = ours.claim(&seen(Some(ours.token().to_string()), BTreeMap::new())).unwrap();
    assert_eq!(owned.kill_id().instance().as_str(), "i-0123456789abcdef0");
}

#[test]
fn a_launch_claims_only_what_bears_its_own_token() {
    let ours = host(OURS);
    let next = ours.relaunch().unwrap();
    assert_eq!(next.deadline(), ours.deadline(), "a relaunch inherits the deadline");
    for other in [Some(next.token().to_string()), Some(host(THEIRS).token().to_string()), Some(String::new()), None] {
        // Tags alone do not make it this launch's: they are copied with one click.
        assert_eq!(ours.claim(&seen(other.clone(), tags::of(&ours))), None, "{other:?}");
    }
}

#[test]
fn the_token_decides_before_any_tag() {
    let (ours, theirs) = (host(OURS), host(THEIRS));
    let read = |token: Option<String>, tags| OwnedInstance::read(OURS, &seen(token, tags), HOUR_MS);
    let is_ours = |b: Belongs| matches!(b, Belongs::Ours(_));
    assert!(is_ours(read(Some(ours.token().to_string()), BTreeMap::new())), "tags taken away");
    assert!(is_ours(read(Some(ours.token().to_string()), tags::of(&theirs))), "tags made another's");
    assert_eq!(read(Some(theirs.token().to_string()), tags::of(&ours)), Belongs::Theirs);
    assert_eq!(read(None, tags::of(&theirs)), Belongs::Theirs);
    assert_eq!(read(Some("theirs".to_owned()), BTreeMap::new()), Belongs::Foreign);
    assert!(is_ours(read(Some("by hand".to_owned()), tags::of(&ours))));
}

#[test]
fn an_instance_without_a_token_of_ours_lives_by_its_tag_and_not_for_longer_than_anything_may() {
    let at = |tags| match OwnedInstance::read(OURS, &seen(None, tags), HOUR_MS) {
        Belongs::Ours(owned) => owned.deadline(),
        other => panic!("{other:?}"),
    };
    let launched = Micros(1_795_990_000_000_000);
    let with = |text: &str| {
        let mut tags = tags::of(&host(OURS));
        tags.insert(tags::DEADLINE.to_owned(), text.to_owned());
        tags
    };
    assert_eq!(at(with("2999-01-01T00:00:00Z")), launched.plus_ms(HOUR_MS));
    assert_eq!(at(with("1999-01-01T00:00:00Z")).0 / 1_000_000, 915_148_800);
    assert_eq!(at(with("whenever")), launched, "without a deadline it is due");
}

proptest! {
    #[test]
    fn two_installations_never_both_own_an_instance(
        token in prop_oneof![
            Just(None), Just(Some(host(OURS).token().to_string())), Just(Some(host(THEIRS).token().to_string())),
            ".{0,20}".prop_map(Some),
        ],
        tag in prop_oneof![Just(None), Just(Some(OURS.to_string())), Just(Some(THEIRS.to_string())), ".{0,9}".prop_map(Some)],
    ) {
        let tags = tag.map(|t| (tags::INSTALLATION.to_owned(), t)).into_iter().collect();
        let it = seen(token, tags);
        let owns = |i| matches!(OwnedInstance::read(i, &it, HOUR_MS), Belongs::Ours(_));
        prop_assert!(!(owns(OURS) && owns(THEIRS)));
    }
}
