//! The launch gates: each refuses by itself, and nothing unknown passes.

use std::collections::BTreeMap;

use drums_common::clock::Micros;
use drums_provider::{
    ask::{Ask, RawAsk},
    books::{Books, Registered},
    cloud::{Market, Quota, Recipe},
    failure::FailureKind,
    gates::{Clearance, Facts, Gate, HOLDS_MS, judge},
    launch::State,
    limits::Limits,
    money::{Quoted, Source, UsdMicros},
    spend::{Caps, Meter, Until},
    tags,
    words::{CampaignId, instant_text},
};

use super::support::{self, MINUTE_MS, START, error};

const LIFE_MS: u64 = 120 * MINUTE_MS;

fn denied<T>() -> Result<T, drums_provider::failure::CloudError> {
    Err(error(FailureKind::Denied, "Describe"))
}

/// Gates that refuse after something was spoilt.
fn refused(spoil: impl FnOnce(&mut Ask, &mut Facts)) -> Vec<Gate> {
    under(support::limits(), spoil)
}

fn under(limits: Limits, spoil: impl FnOnce(&mut Ask, &mut Facts)) -> Vec<Gate> {
    let mut ask = support::raw_ask(LIFE_MS).read().unwrap();
    let mut facts = support::facts(&ask);
    spoil(&mut ask, &mut facts);
    let (table, cleared) = judge(&ask, &limits, &facts);
    let mut gates: Vec<_> = table.refusals().map(|r| r.gate).collect();
    gates.dedup();
    assert_eq!(cleared.is_none(), !gates.is_empty(), "{table}");
    assert!(table.rows.iter().all(|r| !r.evidence.is_empty()), "{table}");
    gates
}

#[test]
fn every_gate_shows_its_evidence_and_lets_a_good_launch_pass() {
    let ask = support::raw_ask(LIFE_MS).read().unwrap();
    let (table, cleared) = judge(&ask, &support::limits(), &support::facts(&ask));
    assert!(cleared.is_some(), "{table}");
    let gates: Vec<_> = table.rows.iter().map(|r| r.gate).collect();
    use Gate::{
        Account, Campaign, Clock, DayCap, Deadline, Hosts, Image, Launch, Nested, Price, Profile, Quota, RunCap,
        Schedule, Sweeper, Terminate, Type,
    };
    let all = [
        Account, Clock, Campaign, Deadline, Hosts, Type, Nested, Image, Quota, Price, Launch, Profile, Terminate,
        Schedule, Sweeper, RunCap, DayCap,
    ];
    assert_eq!(gates, all);
    let text = table.to_string();
    assert_eq!(text.lines().count(), all.len());
    assert!(text.contains("Pricing GetProducts of 2026-") && text.contains("$0.4000 an hour"), "{text}");
}

#[test]
fn what_could_not_be_found_out_is_refused() {
    use Gate::{
        Account, Clock, DayCap, Hosts, Image, Launch, Nested, Price, Profile, Quota, RunCap, Schedule, Sweeper,
        Terminate, Type,
    };
    let host = |f: &mut Facts| f.hosts.values_mut().next().unwrap().clone();
    let set = |f: &mut Facts, h| *f.hosts.values_mut().next().unwrap() = h;
    assert_eq!(refused(|_, f| f.account = denied()), [Account, Clock]);
    assert_eq!(refused(|_, f| f.alive = denied()), [Hosts]);
    assert_eq!(refused(|_, f| f.terminate.clear()), [Terminate]);
    assert_eq!(refused(|_, f| drop(f.terminate.insert(support::region(), denied()))), [Terminate]);
    assert_eq!(refused(|_, f| f.schedules.clear()), [Schedule]);
    assert_eq!(refused(|_, f| drop(f.schedules.insert(support::region(), (support::setup(), denied())))), [Schedule]);
    assert_eq!(refused(|_, f| f.canaries.clear()), [Sweeper]);
    assert_eq!(refused(|_, f| f.canaries[0].1 = denied()), [Sweeper]);
    assert_eq!(refused(|_, f| f.hosts.clear()), [Type, RunCap, DayCap]);
    for (spoil, gates) in [
        ((|h| h.kind = denied()) as fn(&mut drums_provider::gates::HostFacts), vec![Type, Nested, Quota, Launch]),
        (|h| h.image = denied(), vec![Image, Launch]),
        (|h| h.recipe = denied(), vec![Launch, Profile]),
        (|h| h.hour = denied(), vec![Price, RunCap, DayCap]),
        (|h| h.gib_month = denied(), vec![Price, RunCap, DayCap]),
        (|h| h.quota = denied(), vec![Quota]),
        (|h| h.launches[1].1 = denied(), vec![Launch]),
        (|h| h.launches[0].1 = denied(), vec![Launch, Profile]),
        (|h| drop(h.launches.pop()), vec![Launch]),
        (|h| h.launches.clear(), vec![Launch, Profile]),
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
    let limited = |limit: fn(&mut Limits)| {
        let mut limits = support::limits();
        limit(&mut limits);
        under(limits, |_, _| {})
    };
    assert_eq!(limited(|l| l.max_hosts = 0), [Hosts]);
    assert_eq!(limited(|l| l.longest_life_ms = 0), [Deadline]);
    assert_eq!(limited(|l| l.least_life_ms = 0), [Deadline]);
    assert_eq!(limited(|l| l.sweep_age_ms = 0), [Sweeper]);
    assert_eq!(limited(|l| l.day_usd = UsdMicros(0)), [RunCap]);
    assert_eq!(refused(|a, _| a.run_usd = UsdMicros(0)), [RunCap]);
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
    let shorter = Limits { longest_life_ms: LIFE_MS - MINUTE_MS, ..support::limits() };
    assert_eq!(under(shorter, |_, _| {}), [Gate::Deadline]);
    assert_eq!(refused(|_, f| f.local = Micros(0)), [Gate::Clock]);
}

#[test]
fn money_is_counted_with_what_runs_already() {
    let books = |day, meters| Books { campaigns: registered(day), meters };
    let cap = |run: UsdMicros, day: UsdMicros, meters: Vec<Meter>| {
        let limits = Limits { day_usd: day, ..support::limits() };
        under(limits, |a, f| {
            a.run_usd = run;
            f.books = books(UsdMicros(u64::MAX), meters);
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
    let worst = meter("c1").worst_case(START);
    let twice = worst.times(2);
    assert_eq!(cap(worst, worst, vec![]), []);
    assert_eq!(cap(worst.minus(UsdMicros(1)), worst, vec![]), [Gate::RunCap]);
    assert_eq!(cap(worst, worst.minus(UsdMicros(1)), vec![]), [Gate::DayCap]);
    assert_eq!(cap(worst, worst, vec![meter("c2")]), [Gate::DayCap], "another run's of the same day");
    assert_eq!(cap(worst, twice, vec![meter("c2")]), []);
    assert_eq!(cap(worst, twice, vec![meter("c1")]), [Gate::RunCap], "the same run's");
    let day = |day, until| {
        let running = Meter { until, ..meter("c2") };
        refused(|_, f| f.books = books(day, vec![running]))
    };
    let runs = Until::Deadline(START.plus_ms(LIFE_MS));
    assert_eq!(day(twice, runs), []);
    assert_eq!(day(twice.minus(UsdMicros(1)), runs), [Gate::DayCap], "the cap that another run was launched under");
    assert_eq!(day(UsdMicros(1), Until::Ended(START)), [], "which counts while it runs");
    assert_eq!(refused(|_, f| f.books.meters = vec![meter("c2")]), [Gate::DayCap], "and must be known");
}

/// Two campaigns as they are stored, each with this cap of the day.
fn registered(day: UsdMicros) -> BTreeMap<CampaignId, Registered> {
    let stored = |id: &str| {
        let ask = RawAsk { campaign: id.to_owned(), ..support::raw_ask(LIFE_MS) }.read().unwrap();
        let caps = Caps::new(UsdMicros(u64::MAX), day, 1).unwrap();
        (ask.campaign.id().clone(), Registered { campaign: ask.campaign, caps })
    };
    BTreeMap::from(["c1", "c2"].map(stored))
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
    let metal = refused(|_, f| {
        for host in f.hosts.values_mut() {
            let kind = host.kind.as_mut().unwrap();
            (kind.nested_virtualisation, kind.bare_metal) = (false, true);
            host.recipe.as_mut().unwrap().nested = false;
        }
    });
    assert_eq!(metal, [], "which needs none");
    let flex = "m7i-flex.large".parse().unwrap();
    assert_eq!(
        refused(|a, f| {
            a.hosts[0].kind = std::clone::Clone::clone(&flex);
            for host in f.hosts.values_mut() {
                host.kind.as_mut().unwrap().kind = flex.clone();
                host.recipe.as_mut().unwrap().kind = flex.clone();
            }
        }),
        [Type]
    );
    let image = |change: fn(&mut drums_provider::cloud::ImageFacts)| {
        refused(|_, f| f.hosts.values_mut().for_each(|h| change(h.image.as_mut().unwrap())))
    };
    assert_eq!(image(|i| i.state = "deregistered".to_owned()), [Image]);
    assert_eq!(image(|i| i.architecture = "arm64".to_owned()), [Image]);
    assert_eq!(image(|i| i.root_gib = 31), [Image]);
    for account in ["1", "210987654321"] {
        assert_eq!(under(Limits { account: account.to_owned(), ..support::limits() }, |_, _| {}), [Account]);
    }
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
    let (table, cleared) = judge(&ask, &support::limits(), &facts);
    assert!(cleared.is_none());
    assert!(table.to_string().contains("spot may not have nested virtualisation"), "{table}");
}

#[test]
fn what_was_tried_is_what_was_asked_for() {
    type Change = fn(&mut Recipe);
    let changes: [Change; 11] = [
        |r| r.region = "us-east-1".parse().unwrap(),
        |r| r.kind = "c8i.large".parse().unwrap(),
        |r| r.image = "ami-00000001".parse().unwrap(),
        |r| r.root_device = "/dev/sda1".to_owned(),
        |r| r.volume_gib = 31,
        |r| r.market = Market::Spot,
        |r| r.nested = false,
        |r| r.prove_guest = false,
        |r| r.placements.reverse(),
        |r| drop(r.placements.pop()),
        |r| r.security_groups.clear(),
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let found = refused(|_, f| f.hosts.values_mut().for_each(|h| change(h.recipe.as_mut().unwrap())));
        assert_eq!(found, [Gate::Launch], "change {i}");
    }
    let other = |r: &mut Recipe| r.profile = "another".parse().unwrap();
    let found = refused(|_, f| f.hosts.values_mut().for_each(|h| other(h.recipe.as_mut().unwrap())));
    assert_eq!(found, [Gate::Launch, Gate::Profile]);
}

fn cleared() -> Clearance {
    let ask = support::raw_ask(LIFE_MS).read().unwrap();
    judge(&ask, &support::limits(), &support::facts(&ask)).1.unwrap()
}

/// Gates that refuse a clearance in the transaction that stores what comes of it.
fn refused_later(books: &Books, now: Micros) -> Vec<Gate> {
    match cleared().confirm(books, now) {
        Ok(_) => Vec::new(),
        Err(table) => table.refusals().map(|r| r.gate).collect(),
    }
}

#[test]
fn what_is_cleared_is_launched_as_it_was_tried_and_nothing_else_is() {
    let cleared = cleared();
    let ask = support::raw_ask(LIFE_MS).read().unwrap();
    let facts = support::facts(&ask);
    let launches = cleared.confirm(&Books::default(), START).unwrap();
    assert_eq!(launches.len(), 1);
    let (launch, found) = (&launches[0], facts.hosts.values().next().unwrap());
    assert_eq!(launch.order().recipe, *found.recipe.as_ref().unwrap());
    assert_eq!((launch.host().campaign(), launch.host().host()), (&ask.campaign, &ask.hosts[0].host));
    assert!(matches!(launch.state(), State::Intended { .. }));
    let meter = launch.meter().unwrap();
    assert_eq!((meter.from, meter.until), (START, Until::Deadline(ask.campaign.deadline())));
    assert_eq!(meter.rates, support::rates());
    assert_eq!((cleared.caps().run(), cleared.caps().day()), (ask.run_usd, support::limits().day_usd));
}

#[test]
fn a_clearance_holds_for_a_while() {
    let books = Books::default();
    assert_eq!(refused_later(&books, START.plus_ms(HOLDS_MS)), []);
    assert_eq!(refused_later(&books, START.plus_ms(HOLDS_MS + 1)), [Gate::Age]);
    assert_eq!(refused_later(&books, Micros(START.0 - 600_000_000)), [Gate::Age], "given at a time to come");
}

#[test]
fn a_clearance_is_judged_again_by_the_books_in_the_transaction() {
    let mine = || cleared().confirm(&Books::default(), START).unwrap().remove(0).meter().unwrap();
    let of = |campaign: &str, host: &str| Meter {
        campaign: campaign.parse().unwrap(),
        host: host.parse().unwrap(),
        ..mine()
    };
    let books = |day: UsdMicros, meters| Books { campaigns: registered(day), meters };
    let plenty = UsdMicros(u64::MAX);
    assert_eq!(refused_later(&books(plenty, vec![of("c2", "h9")]), START), []);
    assert_eq!(refused_later(&books(plenty, vec![mine()]), START), [Gate::Campaign], "launched twice by one clearance");
    let ended = Meter { until: Until::Ended(START), ..mine() };
    assert_eq!(refused_later(&books(plenty, vec![ended]), START), [Gate::Campaign], "its token was used");
    let many = (0..4).map(|i| of("c2", &format!("h{i}"))).collect();
    assert_eq!(refused_later(&books(plenty, many), START), [Gate::Hosts], "two asks at once");
    let strays = {
        let ask = support::raw_ask(LIFE_MS).read().unwrap();
        let facts = Facts { alive: Ok(3), ..support::facts(&ask) };
        judge(&ask, &support::limits(), &facts).1.unwrap()
    };
    assert!(strays.confirm(&Books::default(), START).is_ok());
    let refused = strays.confirm(&books(plenty, vec![of("c2", "h9")]), START).unwrap_err();
    assert_eq!(refused.refusals().map(|r| r.gate).collect::<Vec<_>>(), [Gate::Hosts], "what nobody knows of counts");
    let worst = mine().worst_case(START);
    assert_eq!(refused_later(&books(worst.times(2), vec![of("c2", "h9")]), START), []);
    let one_less = worst.times(2).minus(UsdMicros(1));
    assert_eq!(refused_later(&books(one_less, vec![of("c2", "h9")]), START), [Gate::DayCap]);
    let mut lower = books(plenty, Vec::new());
    let caps = Caps::new(worst.minus(UsdMicros(1)), plenty, 1).unwrap();
    lower.campaigns.get_mut(&"c1".parse().unwrap()).unwrap().caps = caps;
    assert_eq!(refused_later(&lower, START), [Gate::RunCap], "the campaign's own cap, as it is stored");
}

#[test]
fn a_stored_campaign_with_another_deadline_or_experiment_is_refused() {
    let stored = |raw: RawAsk| {
        let mut books = Books { campaigns: registered(UsdMicros(u64::MAX)), meters: Vec::new() };
        let id: CampaignId = "c1".parse().unwrap();
        books.campaigns.get_mut(&id).unwrap().campaign = raw.read().unwrap().campaign;
        let at_the_gates = refused(|_, f| f.books = books.clone());
        assert_eq!(at_the_gates, refused_later(&books, START));
        at_the_gates
    };
    assert_eq!(stored(support::raw_ask(LIFE_MS)), []);
    assert_eq!(stored(support::raw_ask(LIFE_MS + 1_000)), [Gate::Campaign]);
    assert_eq!(stored(support::raw_ask(LIFE_MS - 1_000)), [Gate::Campaign]);
    assert_eq!(stored(RawAsk { experiment: None, ..support::raw_ask(LIFE_MS) }), [Gate::Campaign]);
}
