//! The launch gates: each refuses by itself, and nothing unknown passes.

use drums_common::clock::Micros;
use drums_provider::{
    ask::Ask,
    cloud::{Market, Quota},
    failure::FailureKind,
    gates::{Facts, Gate, judge},
    money::{Quoted, Source, UsdMicros},
    spend::{Meter, Until},
    tags,
    words::instant_text,
};

use super::support::{self, MINUTE_MS, START, error};

const LIFE_MS: u64 = 120 * MINUTE_MS;

fn denied<T>() -> Result<T, drums_provider::failure::CloudError> {
    Err(error(FailureKind::Denied, "Describe"))
}

/// Gates that refuse after something was spoilt.
fn refused(spoil: impl FnOnce(&mut Ask, &mut Facts)) -> Vec<Gate> {
    let mut ask = support::raw_ask(LIFE_MS).read().unwrap();
    let mut facts = support::facts(&ask);
    spoil(&mut ask, &mut facts);
    let (table, cleared) = judge(&ask, &facts);
    let mut gates: Vec<_> = table.refusals().map(|r| r.gate).collect();
    gates.dedup();
    assert_eq!(cleared.is_none(), !gates.is_empty(), "{table}");
    assert!(table.rows.iter().all(|r| !r.evidence.is_empty()), "{table}");
    gates
}

#[test]
fn every_gate_shows_its_evidence_and_lets_a_good_launch_pass() {
    let ask = support::raw_ask(LIFE_MS).read().unwrap();
    let (table, cleared) = judge(&ask, &support::facts(&ask));
    assert!(cleared.is_some(), "{table}");
    let gates: Vec<_> = table.rows.iter().map(|r| r.gate).collect();
    use Gate::{
        Account, Clock, DayCap, Deadline, Hosts, Image, Launch, Nested, Price, Quota, RunCap, Schedule, Sweeper,
        Terminate, Type,
    };
    let all = [
        Account, Clock, Deadline, Hosts, Type, Nested, Image, Quota, Price, Launch, Terminate, Schedule, Sweeper,
        RunCap, DayCap,
    ];
    assert_eq!(gates, all);
    let text = table.to_string();
    assert_eq!(text.lines().count(), all.len());
    assert!(text.contains("Pricing GetProducts of 2026-") && text.contains("$0.4000 an hour"), "{text}");
}

#[test]
fn what_could_not_be_found_out_is_refused() {
    use Gate::{
        Account, Clock, DayCap, Hosts, Image, Launch, Nested, Price, Quota, RunCap, Schedule, Sweeper, Terminate, Type,
    };
    let host = |f: &mut Facts| f.hosts.values_mut().next().unwrap().clone();
    let set = |f: &mut Facts, h| *f.hosts.values_mut().next().unwrap() = h;
    assert_eq!(refused(|_, f| f.account = denied()), [Account, Clock]);
    assert_eq!(refused(|_, f| f.alive = denied()), [Hosts]);
    assert_eq!(refused(|_, f| f.terminate.clear()), [Terminate]);
    assert_eq!(refused(|_, f| drop(f.terminate.insert(support::region(), denied()))), [Terminate]);
    assert_eq!(refused(|_, f| f.schedules.clear()), [Schedule]);
    assert_eq!(refused(|_, f| drop(f.schedules.insert(support::region(), denied()))), [Schedule]);
    assert_eq!(refused(|_, f| f.canaries.clear()), [Sweeper]);
    assert_eq!(refused(|_, f| f.canaries[0].1 = denied()), [Sweeper]);
    assert_eq!(refused(|_, f| f.hosts.clear()), [Type, RunCap, DayCap]);
    for (spoil, gates) in [
        ((|h| h.kind = denied()) as fn(&mut drums_provider::gates::HostFacts), vec![Type, Nested, Quota]),
        (|h| h.image = denied(), vec![Image]),
        (|h| h.hour = denied(), vec![Price, RunCap, DayCap]),
        (|h| h.gib_month = denied(), vec![Price, RunCap, DayCap]),
        (|h| h.quota = denied(), vec![Quota]),
        (|h| h.launches[1].1 = denied(), vec![Launch]),
        (|h| h.launches.clear(), vec![Launch]),
    ] {
        let found = refused(|_, f| {
            let mut h = host(f);
            spoil(&mut h);
            set(f, h);
        });
        assert_eq!(found, gates);
    }
}

#[test]
fn zero_is_never_unlimited() {
    use Gate::{DayCap, Deadline, Hosts, Price, Quota as Vcpus, RunCap, Sweeper, Type};
    assert_eq!(refused(|a, _| a.max_hosts = 0), [Hosts]);
    assert_eq!(refused(|a, _| a.longest_life_ms = 0), [Deadline]);
    assert_eq!(refused(|_, f| f.least_life_ms = 0), [Deadline]);
    assert_eq!(refused(|_, f| f.sweep_age_ms = 0), [Sweeper]);
    let quota = |limit, used| {
        refused(|_, f| f.hosts.values_mut().for_each(|h| h.quota = Ok(support::quoted(Quota { limit, used }))))
    };
    assert_eq!(quota(0, 0), [Vcpus]);
    assert_eq!(quota(15, 8), [Vcpus]);
    assert_eq!(quota(16, 8), []);
    let free = |f: &mut Facts| f.hosts.values_mut().for_each(|h| h.hour = Ok(support::quoted(UsdMicros(0))));
    assert_eq!(refused(|_, f| free(f)), [Price, RunCap, DayCap]);
    assert_eq!(refused(|_, f| f.hosts.values_mut().for_each(|h| h.kind.as_mut().unwrap().vcpus = 0)), [Type]);
}

#[test]
fn deadlines_too_near_or_too_far_are_refused_by_awss_clock() {
    let at = |minutes: u64| {
        refused(|_, f| {
            let account = f.account.as_mut().unwrap();
            account.clock = START.plus_ms(LIFE_MS - minutes * MINUTE_MS);
            f.local = account.clock;
            f.canaries[0].1 = Ok(support::canary_instance(Some(account.clock)));
        })
    };
    assert_eq!(at(10), []);
    assert_eq!(at(9), [Gate::Deadline]);
    assert_eq!(refused(|a, _| a.longest_life_ms = LIFE_MS - MINUTE_MS), [Gate::Deadline]);
    assert_eq!(refused(|_, f| f.local = Micros(0)), [Gate::Clock]);
}

#[test]
fn money_is_counted_with_what_runs_already() {
    let worst = support::rates().worst_case(START, START.plus_ms(LIFE_MS));
    let cap = |run: UsdMicros, day: UsdMicros, meters: Vec<Meter>| {
        refused(|a, f| {
            a.caps = drums_provider::spend::Caps::new(run, day, 1).unwrap();
            f.meters = meters;
        })
    };
    let meter = |campaign: &str| Meter {
        host: "h9".parse().unwrap(),
        campaign: campaign.parse().unwrap(),
        experiment: None,
        rates: support::rates(),
        from: START,
        until: Until::Deadline(START.plus_ms(LIFE_MS)),
    };
    let twice = worst.times(2);
    assert_eq!(cap(worst, worst, vec![]), []);
    assert_eq!(cap(worst.minus(UsdMicros(1)), worst, vec![]), [Gate::RunCap]);
    assert_eq!(cap(worst, worst.minus(UsdMicros(1)), vec![]), [Gate::DayCap]);
    assert_eq!(cap(worst, worst, vec![meter("c2")]), [Gate::DayCap], "another run's of the same day");
    assert_eq!(cap(worst, twice, vec![meter("c2")]), []);
    assert_eq!(cap(worst, twice, vec![meter("c1")]), [Gate::RunCap], "the same run's");
}

#[test]
fn prices_and_quotas_of_an_operators_own_are_dated() {
    let of = |as_of: Micros| {
        let quoted = Quoted { value: UsdMicros(1), source: Source::Config("prices.toml:3".to_owned()), as_of };
        refused(|_, f| f.hosts.values_mut().for_each(|h| h.gib_month = Ok(quoted.clone())))
    };
    assert_eq!(of(START), []);
    assert!(of(Micros(START.0 - 93 * 86_400_000_000)).contains(&Gate::Price));
    assert!(of(START.plus_ms(1)).contains(&Gate::Price));
}

#[test]
fn types_that_share_processors_or_lack_what_is_needed_are_refused() {
    use Gate::{Account, Image, Nested, Sweeper, Type};
    let kind = |change: fn(&mut drums_provider::cloud::TypeFacts)| {
        refused(|_, f| f.hosts.values_mut().for_each(|h| change(h.kind.as_mut().unwrap())))
    };
    assert_eq!(kind(|k| k.burstable = true), [Type]);
    assert_eq!(kind(|k| k.architectures = vec!["arm64".to_owned()]), [Type]);
    assert_eq!(kind(|k| drop(k.zones.pop())), [Type], "one of the subnets is in a zone without it");
    assert_eq!(kind(|k| k.nested_virtualisation = false), [Nested]);
    assert_eq!(kind(|k| (k.nested_virtualisation, k.bare_metal) = (false, true)), []);
    let flex = "m7i-flex.large".parse().unwrap();
    assert_eq!(
        refused(|a, f| {
            a.hosts[0].kind = std::clone::Clone::clone(&flex);
            f.hosts.values_mut().for_each(|h| h.kind.as_mut().unwrap().kind = flex.clone());
        }),
        [Type]
    );
    let image = |change: fn(&mut drums_provider::cloud::ImageFacts)| {
        refused(|_, f| f.hosts.values_mut().for_each(|h| change(h.image.as_mut().unwrap())))
    };
    assert_eq!(image(|i| i.state = "deregistered".to_owned()), [Image]);
    assert_eq!(image(|i| i.architecture = "arm64".to_owned()), [Image]);
    assert_eq!(refused(|_, f| f.expected_account = "1".to_owned()), [Account]);
    assert_eq!(refused(|_, f| f.expected_account = "210987654321".to_owned()), [Account]);
    let swept = |at: Option<Micros>| refused(|_, f| f.canaries[0].1 = Ok(support::canary_instance(at)));
    assert_eq!(swept(None), [Sweeper]);
    assert_eq!(swept(Some(Micros(START.0 - 11 * 60_000_000))), [Sweeper], "eleven minutes ago");
    assert_eq!(swept(Some(START.plus_ms(60 * MINUTE_MS))), [Sweeper], "a note from the future would hold for ever");
    assert_eq!(
        refused(|_, f| {
            let it = f.canaries[0].1.as_mut().unwrap();
            it.tags.insert(tags::SWEPT.to_owned(), format!("at {}", instant_text(START)));
        }),
        [Sweeper]
    );
}

#[test]
fn spot_that_is_refused_with_nested_virtualisation_says_so() {
    let mut ask = support::raw_ask(LIFE_MS).read().unwrap();
    ask.hosts[0].market = Market::Spot;
    let mut facts = support::facts(&ask);
    for host in facts.hosts.values_mut() {
        host.launches[0].1 = Err(error(FailureKind::Unsupported, "RunInstances"));
    }
    let (table, cleared) = judge(&ask, &facts);
    assert!(cleared.is_none());
    assert!(table.to_string().contains("spot may not have nested virtualisation"), "{table}");
}
