//! What the gates must know is asked of the cloud, each thing by its call.

use std::collections::BTreeMap;

use drums_provider::{
    ask::{Ask, RawAsk},
    books::Books,
    cloud::{ImageSource, Instance, InstanceState},
    failure::FailureKind,
    gates::{Gate, RegionSetup, Setup, Table, judge, look},
    money::{Quoted, Source, UsdMicros},
    words::Region,
};

use super::{
    memory::Memory,
    support::{self, MINUTE_MS, OURS, START, World, ready},
};

const LIFE_MS: u64 = 120 * MINUTE_MS;

fn setup() -> Setup {
    let region = RegionSetup {
        image: ImageSource::Parameter("/aws/service/an-image".to_owned()),
        security_groups: vec!["sg-00000001".parse().unwrap()],
        schedules: support::setup(),
        canary: support::canary(),
        hours: BTreeMap::new(),
        gib_month: None,
    };
    Setup { installation: OURS, regions: BTreeMap::from([(support::region(), region)]) }
}

fn cloud() -> Memory {
    let mut world = World::new();
    world.instances.push(support::canary_instance(Some(START)));
    Memory::new(world)
}

fn judged(cloud: &Memory, ask: &Ask, setup: &Setup) -> (Table, bool) {
    let facts = ready(look(cloud, ask, setup, Books::default(), START));
    let (table, cleared) = judge(ask, &support::limits(), &facts);
    (table, cleared.is_some())
}

fn refused(cloud: &Memory) -> Vec<Gate> {
    let (table, cleared) = judged(cloud, &support::raw_ask(LIFE_MS).read().unwrap(), &setup());
    let mut gates: Vec<_> = table.refusals().map(|r| r.gate).collect();
    gates.dedup();
    assert_eq!(cleared, gates.is_empty(), "{table}");
    gates
}

#[test]
fn what_is_asked_of_the_cloud_passes_every_gate_and_says_what_was_found() {
    let (table, cleared) = judged(&cloud(), &support::raw_ask(LIFE_MS).read().unwrap(), &setup());
    assert!(cleared, "{table}");
    let text = table.to_string();
    for evidence in [
        "arn:aws:iam::123456789012:user/me",
        "c8i.2xlarge, 8 CPUs",
        "ami-0123456789abcdef0 (debian-12)",
        "8 of 64 virtual CPUs used, 8 needed",
        "$0.4000 an hour by Pricing GetProducts",
        "DryRun in 2 subnets",
        "drums-host-01010101, given to a host by DryRun",
        "permitted, by DryRun",
        "tried in drums",
        "i-0000000000000000c found and spared 0 s ago",
        "0 alive and 1 more, of 4 allowed",
    ] {
        assert!(text.contains(evidence), "{evidence} is missing in\n{text}");
    }
}

#[test]
fn each_call_that_fails_is_refused_by_its_gate() {
    use Gate::{
        Account, Clock, DayCap, Hosts, Image, Launch, Nested, Price, Profile, Quota, RunCap, Schedule, Sweeper,
        Terminate, Type,
    };
    let table = [
        ("GetCallerIdentity", vec![Account, Clock]),
        ("DescribeRegions", vec![Hosts]),
        ("DescribeInstances of a region", vec![Hosts]),
        ("DescribeInstanceTypes", vec![Type, Nested, Quota, Launch, Profile]),
        ("DescribeImages", vec![Image, Launch, Profile]),
        ("DescribeSubnets", vec![Launch, Profile]),
        ("RunInstances", vec![Launch, Profile]),
        ("GetProducts of an hour", vec![Price, RunCap, DayCap]),
        ("GetProducts of a volume", vec![Price, RunCap, DayCap]),
        ("GetServiceQuota", vec![Quota]),
        ("TerminateInstances", vec![Terminate]),
        ("CreateSchedule", vec![Schedule]),
        ("DescribeInstances", vec![Sweeper]),
    ];
    for (call, mut gates) in table {
        let mut cloud = cloud();
        cloud.fails.insert(call, FailureKind::Denied);
        gates.sort();
        assert_eq!(refused(&cloud), gates, "{call}");
    }
}

#[test]
fn whatever_is_alive_counts_in_every_region_but_for_canaries() {
    let launch = support::launch(LIFE_MS);
    let other: Region = "us-east-1".parse().unwrap();
    let host = |number, state, region: &Region| Instance {
        state,
        region: region.clone(),
        ..support::instance_of(&launch.order(), number, START)
    };
    let mut cloud = cloud();
    cloud.regions.push(other.clone());
    let here = support::region();
    let mut theirs = host(9, InstanceState::Running, &here);
    theirs.token = theirs.token.map(|t| t.replace("01010101", "02020202"));
    cloud.world().instances.extend([
        host(1, InstanceState::Running, &here),
        host(2, InstanceState::Stopped, &other),
        host(3, InstanceState::ShuttingDown, &other),
        host(4, InstanceState::Terminated, &here),
        theirs,
    ]);
    assert_eq!(refused(&cloud), []);
    cloud.world().instances.push(host(5, InstanceState::Pending, &other));
    assert_eq!(refused(&cloud), [Gate::Hosts]);
}

#[test]
fn hosts_that_differ_by_name_alone_are_asked_for_once() {
    let mut raw = support::raw_ask(LIFE_MS);
    for n in 2..=4 {
        raw.hosts.push(drums_provider::ask::RawHost { name: format!("h{n}"), ..raw.hosts[0].clone() });
    }
    let cloud = cloud();
    let (table, cleared) = judged(&cloud, &raw.read().unwrap(), &setup());
    assert!(cleared, "{table}");
    for call in ["DescribeInstanceTypes", "DescribeImages", "GetServiceQuota", "GetProducts of an hour"] {
        assert_eq!(cloud.count(call), 1, "{call}");
    }
    assert_eq!(cloud.count("RunInstances"), 2, "in each subnet");
    raw.hosts[3].volume_gib += 1;
    let cloud = self::cloud();
    judged(&cloud, &raw.read().unwrap(), &setup());
    assert_eq!(cloud.count("RunInstances"), 4, "another volume is another launch");
}

#[test]
fn an_operators_own_prices_count_instead_of_awss() {
    let own =
        |value, as_of| Quoted { value: UsdMicros(value), source: Source::Config("prices.toml".to_owned()), as_of };
    let mut setup = setup();
    let there = setup.regions.get_mut(&support::region()).unwrap();
    there.hours.insert("c8i.2xlarge".parse().unwrap(), own(500_000, START));
    there.gib_month = Some(own(90_000, START));
    let cloud = cloud();
    let (table, cleared) = judged(&cloud, &support::raw_ask(LIFE_MS).read().unwrap(), &setup);
    assert!(cleared && table.to_string().contains("$0.5000 an hour by prices.toml"), "{table}");
    assert_eq!((cloud.count("GetProducts of an hour"), cloud.count("GetProducts of a volume")), (0, 0));
}

#[test]
fn a_region_that_the_configuration_does_not_have_is_refused_by_name() {
    let ask = RawAsk { ..support::raw_ask(LIFE_MS) }.read().unwrap();
    let none = Setup { regions: BTreeMap::new(), ..setup() };
    let (table, cleared) = judged(&cloud(), &ask, &none);
    assert!(!cleared && table.to_string().contains("no image, security groups, schedules and canary for eu-central-1"));
}
