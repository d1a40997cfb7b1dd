//! The rows, gate by gate.

use std::{collections::BTreeSet, fmt};

use drums_common::clock::Micros;

use super::{Facts, Gate, HostFacts, Row};
use crate::{
    ask::{Ask, AskedHost},
    cloud::Market,
    failure::CloudError,
    money::{Quoted, Source, UsdMicros},
    spend::{KILL_BOUND_MS, Meter, Rates, Until, dearest_day},
    tags,
    words::{Region, instant_text, read_instant},
};

/// As the sweeper's: beyond it signatures fail soon, and deadlines are not what they seem.
const SKEW_MS: u64 = 2 * 60_000;
/// An operator's own price or quota is refused when it is older than a quarter of a year.
const STALE_MS: u64 = 92 * 86_400_000;
/// The only architecture that images and agents are built for.
const ARCHITECTURE: &str = "x86_64";

/// Evidence of a pass, or of a refusal.
type Judged = Result<String, String>;

struct Rows(Vec<Row>);

impl Rows {
    fn add(&mut self, gate: Gate, about: impl fmt::Display, judged: Judged) {
        let passed = judged.is_ok();
        let evidence = judged.unwrap_or_else(|e| e);
        self.0.push(Row { gate, about: about.to_string(), passed, evidence });
    }
}

pub(super) fn all(ask: &Ask, facts: &Facts) -> Vec<Row> {
    let mut rows = Rows(Vec::new());
    // AWS's clock, where it is known; where not, gate `account` refuses anyway.
    let now = facts.account.as_ref().map_or(facts.local, |a| a.clock);
    let campaign = ask.campaign.id();
    rows.add(Gate::Account, campaign, account(facts));
    rows.add(Gate::Clock, campaign, clock(facts));
    rows.add(Gate::Deadline, campaign, deadline(ask, facts, now));
    rows.add(Gate::Hosts, campaign, hosts(ask, facts));
    let regions: BTreeSet<&Region> = ask.hosts.iter().map(|h| &h.region).collect();
    for region in regions {
        rows.add(Gate::Terminate, region, called(facts.terminate.get(region), "permitted, by DryRun"));
        rows.add(Gate::Schedule, region, schedule(facts, region));
        rows.add(Gate::Sweeper, region, sweeper(facts, region, now));
    }
    let mut launched = facts.meters.clone();
    let mut all_priced = true;
    for host in &ask.hosts {
        let Some(found) = facts.hosts.get(&host.host) else {
            rows.add(Gate::Type, &host.host, Err("nothing was found out about it".to_owned()));
            all_priced = false;
            continue;
        };
        rows.add(Gate::Type, &host.host, kind(host, found));
        rows.add(Gate::Nested, &host.host, nested(host, found));
        rows.add(Gate::Image, &host.host, image(found));
        rows.add(Gate::Quota, &host.host, quota(ask, facts, host, found, now));
        rows.add(Gate::Launch, &host.host, launch(host, found));
        let rates = rates(host, found, now);
        rows.add(Gate::Price, &host.host, rates.as_ref().map(said).map_err(Clone::clone));
        match rates {
            Ok(rates) => launched.push(Meter {
                host: host.host.clone(),
                campaign: campaign.clone(),
                experiment: ask.campaign.experiment(),
                rates,
                from: now,
                until: Until::Deadline(ask.campaign.deadline()),
            }),
            Err(_) => all_priced = false,
        }
    }
    rows.add(Gate::RunCap, campaign, run_cap(ask, &launched, all_priced, now));
    rows.add(Gate::DayCap, campaign, day_cap(ask, &launched, all_priced, now));
    rows.0
}

fn failed(e: &CloudError) -> String {
    e.to_string()
}

/// Of a call that answers with nothing but permission.
fn called(reply: Option<&Result<(), CloudError>>, ok: &str) -> Judged {
    match reply {
        Some(Ok(())) => Ok(ok.to_owned()),
        Some(Err(e)) => Err(failed(e)),
        None => Err("it was not tried".to_owned()),
    }
}

fn account(facts: &Facts) -> Judged {
    let account = facts.account.as_ref().map_err(failed)?;
    let expected = &facts.expected_account;
    if expected.len() != 12 || !expected.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("{expected:?} is no account of AWS; write its 12 digits into the configuration"));
    }
    if account.account != *expected {
        return Err(format!("these are credentials of {}, and {expected} is wanted", account.account));
    }
    Ok(account.arn.clone())
}

fn clock(facts: &Facts) -> Judged {
    let aws = facts.account.as_ref().map_err(failed)?.clock;
    let apart_ms = aws.ms_since(facts.local).max(facts.local.ms_since(aws));
    let said = format!("{} s off AWS's", apart_ms / 1_000);
    if apart_ms <= SKEW_MS { Ok(said) } else { Err(format!("{said}; set this machine's clock")) }
}

fn deadline(ask: &Ask, facts: &Facts, now: Micros) -> Judged {
    let deadline = ask.campaign.deadline();
    let said = format!("{}, {} minutes from now", instant_text(deadline), deadline.ms_since(now) / 60_000);
    if facts.least_life_ms == 0 || ask.longest_life_ms == 0 {
        return Err("the least or the longest life is 0; give both".to_owned());
    }
    if now.plus_ms(facts.least_life_ms) > deadline {
        return Err(format!("{said}: too soon to be of use; {} minutes at least", facts.least_life_ms / 60_000));
    }
    if now.plus_ms(ask.longest_life_ms) < deadline {
        return Err(format!("{said}: {} minutes at most", ask.longest_life_ms / 60_000));
    }
    Ok(said)
}

fn hosts(ask: &Ask, facts: &Facts) -> Judged {
    let alive = *facts.alive.as_ref().map_err(failed)?;
    let said = format!("{alive} alive and {} more, of {} allowed", ask.hosts.len(), ask.max_hosts);
    let asked = u32::try_from(ask.hosts.len()).unwrap_or(u32::MAX);
    if asked > 0 && alive.saturating_add(asked) <= ask.max_hosts {
        Ok(said)
    } else {
        Err(format!("{said}; end some, or ask for fewer"))
    }
}

fn kind(host: &AskedHost, found: &HostFacts) -> Judged {
    let facts = found.kind.as_ref().map_err(failed)?;
    let kind = &host.kind;
    if facts.kind != *kind {
        return Err(format!("AWS answered for {}, and {kind} was asked for", facts.kind));
    }
    if kind.is_flex() || facts.burstable {
        return Err(format!("{kind} shares its processors or has credits; no timing of it means anything"));
    }
    if !facts.architectures.iter().any(|a| a == ARCHITECTURE) {
        return Err(format!("{kind} is {}; only {ARCHITECTURE} is built for", facts.architectures.join(", ")));
    }
    if facts.vcpus == 0 || facts.memory_mib == 0 {
        return Err(format!("{kind} has {} CPUs and {} MiB, which cannot be", facts.vcpus, facts.memory_mib));
    }
    let without: Vec<_> = found.launches.iter().map(|(p, _)| &p.zone).filter(|z| !facts.zones.contains(z)).collect();
    if !without.is_empty() {
        return Err(format!("{kind} is not in {without:?}; name subnets of {:?}", facts.zones));
    }
    Ok(format!("{kind}, {} CPUs, {} MiB, {} zones", facts.vcpus, facts.memory_mib, facts.zones.len()))
}

fn nested(host: &AskedHost, found: &HostFacts) -> Judged {
    let facts = found.kind.as_ref().map_err(failed)?;
    match (host.nested, facts.bare_metal, facts.nested_virtualisation) {
        (false, ..) => Ok("not wanted".to_owned()),
        (true, true, _) => Ok("bare metal, which needs none".to_owned()),
        (true, false, true) => Ok("offered; read back after the launch and proven by a guest".to_owned()),
        (true, false, false) => Err(format!("{} in {} does not offer it; choose another type", host.kind, host.region)),
    }
}

fn image(found: &HostFacts) -> Judged {
    let image = found.image.as_ref().map_err(failed)?;
    let said = format!("{} ({}), {}, {}", image.id, image.name, image.architecture, image.state);
    if image.state != "available" || image.architecture != ARCHITECTURE {
        return Err(format!("{said}; an available image for {ARCHITECTURE} is needed"));
    }
    Ok(said)
}

/// What is launched together, in one region and market, is counted together, although families may have quotas of their
/// own.
fn quota(ask: &Ask, facts: &Facts, host: &AskedHost, found: &HostFacts, now: Micros) -> Judged {
    let quoted = found.quota.as_ref().map_err(failed)?;
    dated(quoted, now)?;
    let same = |h: &&AskedHost| h.region == host.region && h.market == host.market;
    let mut needed: u32 = 0;
    for other in ask.hosts.iter().filter(same) {
        let found = facts.hosts.get(&other.host).ok_or("nothing was found out about another host")?;
        needed = needed.saturating_add(found.kind.as_ref().map_err(failed)?.vcpus);
    }
    let (limit, used) = (quoted.value.limit, quoted.value.used);
    let said = format!("{used} of {limit} virtual CPUs used, {needed} needed, by {}", quoted.source);
    if limit > 0 && used.saturating_add(needed) <= limit { Ok(said) } else { Err(format!("{said}; ask AWS for more")) }
}

fn launch(host: &AskedHost, found: &HostFacts) -> Judged {
    let tried: Vec<_> = found.launches.iter().map(|(p, _)| &p.subnet).collect();
    if let Some(untried) = host.subnets.iter().find(|s| !tried.contains(s)) {
        return Err(format!("{untried} was not tried"));
    }
    if tried.is_empty() {
        return Err("there is no subnet to be in".to_owned());
    }
    for (place, reply) in &found.launches {
        if let Err(e) = reply {
            let spot = if host.market == Market::Spot && host.nested {
                "; spot may not have nested virtualisation"
            } else {
                ""
            };
            return Err(format!("in {} ({}): {}{spot}", place.subnet, place.zone, failed(e)));
        }
    }
    Ok(format!("DryRun in {} subnets", tried.len()))
}

fn dated<T>(quoted: &Quoted<T>, now: Micros) -> Result<(), String> {
    let Source::Config(place) = &quoted.source else { return Ok(()) };
    if quoted.as_of > now {
        return Err(format!("what {place} says is of {}, which is to come", instant_text(quoted.as_of)));
    }
    if quoted.as_of.plus_ms(STALE_MS) < now {
        return Err(format!("what {place} says is of {}: look it up again", instant_text(quoted.as_of)));
    }
    Ok(())
}

fn rates(host: &AskedHost, found: &HostFacts, now: Micros) -> Result<Rates, String> {
    let price = |quoted: &Result<Quoted<UsdMicros>, CloudError>, what: &str| {
        let quoted = quoted.as_ref().map_err(failed)?;
        dated(quoted, now)?;
        if quoted.value == UsdMicros(0) {
            return Err(format!("the price of {what} is 0 by {}, which no price is", quoted.source));
        }
        Ok(quoted.clone())
    };
    Ok(Rates {
        hour: price(&found.hour, "an hour")?,
        gib_month: price(&found.gib_month, "a GiB for a month")?,
        volume_gib: host.volume_gib,
    })
}

fn said(rates: &Rates) -> String {
    format!(
        "{} an hour by {} of {}; {} a GiB and month by {}",
        rates.hour.value,
        rates.hour.source,
        instant_text(rates.hour.as_of),
        rates.gib_month.value,
        rates.gib_month.source
    )
}

fn schedule(facts: &Facts, region: &Region) -> Judged {
    match facts.schedules.get(region) {
        Some(Ok(evidence)) => Ok(evidence.clone()),
        Some(Err(e)) => Err(failed(e)),
        None => Err("it was not tried".to_owned()),
    }
}

fn sweeper(facts: &Facts, region: &Region, now: Micros) -> Judged {
    let mut why = format!("no canary in {region} is known: make one, and sweep the region");
    for (canary, shown) in facts.canaries.iter().filter(|(c, _)| c.region == *region) {
        let seen = match shown {
            Ok(seen) => seen,
            Err(e) => {
                why = failed(e);
                continue;
            }
        };
        match seen.tags.get(tags::SWEPT).and_then(|t| read_instant(t)) {
            // A note from the future would hold for ever.
            Some(at) if at > now.plus_ms(SKEW_MS) => {
                why = format!("{} was swept at {}, which is to come", canary.instance, instant_text(at));
            }
            Some(at) if facts.sweep_age_ms > 0 && now.ms_since(at) <= facts.sweep_age_ms => {
                return Ok(format!("{} found and spared {} s ago", canary.instance, now.ms_since(at) / 1_000));
            }
            Some(at) => {
                why = format!("{} was swept last at {}: the sweeper is not at work", canary.instance, instant_text(at));
            }
            None => why = format!("{} was never swept: the sweeper is not at work", canary.instance),
        }
    }
    Err(why)
}

fn run_cap(ask: &Ask, meters: &[Meter], all_priced: bool, now: Micros) -> Judged {
    let own = meters.iter().filter(|m| m.campaign == *ask.campaign.id());
    let worst: UsdMicros = own.map(|m| m.worst_case(now)).sum();
    let minutes = KILL_BOUND_MS / 60_000;
    capped(worst, ask.caps.run(), all_priced, &format!("to the deadline and {minutes} minutes beyond"))
}

fn day_cap(ask: &Ask, meters: &[Meter], all_priced: bool, now: Micros) -> Judged {
    let (day, worst) = dearest_day(meters, now);
    let day = instant_text(Micros(day.saturating_mul(86_400_000_000)));
    let day = day.split('T').next().unwrap_or_default().to_owned();
    capped(worst, ask.caps.day(), all_priced, &format!("on {day}, everything that runs included"))
}

fn capped(worst: UsdMicros, cap: UsdMicros, all_priced: bool, what: &str) -> Judged {
    let said = format!("{worst} at worst {what}, of {cap}");
    if !all_priced {
        return Err(format!("not known without every price; without them {said}"));
    }
    if worst <= cap { Ok(said) } else { Err(format!("{said}; shorten the deadline, or raise the cap")) }
}
