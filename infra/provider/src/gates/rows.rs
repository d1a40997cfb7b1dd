//! The rows, gate by gate.

use std::{collections::BTreeSet, fmt};

use drums_common::{clock::Micros, ids::HostId};

use super::{Clearance, Cleared, Facts, Gate, HOLDS_MS, HostFacts, Row};
use crate::{
    ask::{Ask, AskedHost},
    books::Books,
    cloud::Market,
    deadline::Campaign,
    failure::CloudError,
    limits::Limits,
    money::{Quoted, Source, UsdMicros},
    spend::{Caps, KILL_BOUND_MS, Meter, Rates, Until},
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

/// All gates; and what is cleared, if they all pass.
pub(super) fn all(ask: &Ask, limits: &Limits, facts: &Facts) -> (Vec<Row>, Option<Clearance>) {
    let mut rows = Rows(Vec::new());
    // AWS's clock, where it is known; where not, gate `account` refuses anyway.
    let now = facts.account.as_ref().map_or(facts.local, |a| a.clock);
    let campaign = ask.campaign.id();
    rows.add(Gate::Account, campaign, account(limits, facts));
    rows.add(Gate::Clock, campaign, clock(facts));
    let regions: BTreeSet<&Region> = ask.hosts.iter().map(|h| &h.region).collect();
    for region in regions {
        rows.add(Gate::Terminate, region, called(facts.terminate.get(region), "permitted, by DryRun"));
        rows.add(Gate::Schedule, region, schedule(facts, region));
        rows.add(Gate::Sweeper, region, sweeper(limits, facts, region, now));
    }
    let (mut cleared, mut priced) = (Vec::new(), Vec::new());
    for host in &ask.hosts {
        let Some(found) = facts.hosts.get(&host.host) else {
            rows.add(Gate::Type, &host.host, Err("nothing was found out about it".to_owned()));
            continue;
        };
        rows.add(Gate::Type, &host.host, kind(host, found));
        rows.add(Gate::Nested, &host.host, nested(host, found));
        rows.add(Gate::Image, &host.host, image(host, found));
        rows.add(Gate::Quota, &host.host, quota(ask, facts, host, found, now));
        rows.add(Gate::Launch, &host.host, launch(host, found));
        rows.add(Gate::Profile, &host.host, profile(host, found));
        let rates = rates(host, found, now);
        rows.add(Gate::Price, &host.host, rates.as_ref().map(said).map_err(Clone::clone));
        let Ok(rates) = rates else { continue };
        if let (Ok(recipe), Some((setup, _))) = (&found.recipe, facts.schedules.get(&host.region)) {
            let (recipe, setup, rates) = (recipe.clone(), setup.clone(), rates.clone());
            cleared.push(Cleared { host: host.host.clone(), recipe, setup, rates });
        }
        priced.push((&host.host, rates));
    }
    let caps = match Caps::new(ask.run_usd, limits.day_usd, ask.drain_ms) {
        Ok(caps) => caps,
        Err(zero) => {
            rows.add(Gate::RunCap, campaign, Err(zero.to_string()));
            return (rows.0, None);
        }
    };
    let wish = Wish { campaign: &ask.campaign, caps, limits, hosts: priced.iter().map(|(h, r)| (*h, r)).collect() };
    let alive = facts.alive.as_ref().map_err(failed).copied();
    let unknown = alive.as_ref().map_or(0, |alive| alive.saturating_sub(running(&facts.books)));
    rows.by_the_books(&wish, ask.hosts.len(), &facts.books, alive, now);
    let clearance = Clearance {
        at: now,
        installation: facts.installation,
        campaign: ask.campaign.clone(),
        caps,
        limits: limits.clone(),
        unknown,
        hosts: cleared,
    };
    let whole = clearance.hosts.len() == ask.hosts.len();
    (rows.0, whole.then_some(clearance))
}

/// What may have changed since, with the books as they are in the transaction that stores the launches.
pub(super) fn again(clearance: &Clearance, books: &Books, now: Micros) -> Vec<Row> {
    let mut rows = Rows(Vec::new());
    let Clearance { campaign, caps, limits, unknown, hosts, .. } = clearance;
    rows.add(Gate::Age, campaign.id(), age(clearance.at, now));
    let wish = Wish { campaign, caps: *caps, limits, hosts: hosts.iter().map(|h| (&h.host, &h.rates)).collect() };
    rows.by_the_books(&wish, hosts.len(), books, Ok(running(books).saturating_add(*unknown)), now);
    rows.0
}

fn running(books: &Books) -> u32 {
    u32::try_from(books.running().count()).unwrap_or(u32::MAX)
}

/// What is to be on the books.
struct Wish<'a> {
    campaign: &'a Campaign,
    caps: Caps,
    limits: &'a Limits,
    /// Those whose prices are known.
    hosts: Vec<(&'a HostId, &'a Rates)>,
}

impl Rows {
    /// What clock and store decide. `alive`: instances that AWS shows, whether or not anybody here knows of them.
    fn by_the_books(&mut self, wish: &Wish<'_>, asked: usize, books: &Books, alive: Result<u32, String>, now: Micros) {
        let id = wish.campaign.id();
        let mut with = books.clone();
        with.meters.extend(wish.hosts.iter().map(|(host, rates)| Meter {
            host: (*host).clone(),
            campaign: id.clone(),
            experiment: wish.campaign.experiment(),
            rates: (*rates).clone(),
            from: now,
            until: Until::Deadline(wish.campaign.deadline()),
        }));
        self.add(Gate::Campaign, id, registered(wish, books));
        self.add(Gate::Deadline, id, deadline(wish.campaign, wish.limits, now));
        self.add(Gate::Hosts, id, count(asked, wish.limits, books, alive));
        let all_priced = wish.hosts.len() == asked;
        let run = books.campaigns.get(id).map_or(wish.caps.run(), |there| there.caps.run().min(wish.caps.run()));
        let minutes = KILL_BOUND_MS / 60_000;
        let what = format!("to the deadline and {minutes} minutes beyond");
        self.add(Gate::RunCap, id, capped(with.worst_case(id, now), run, all_priced, &what));
        let (day, worst) = with.dearest_day(now);
        let day = instant_text(Micros(day.saturating_mul(86_400_000_000)));
        let what = format!("on {}, everything that runs included", day.split('T').next().unwrap_or_default());
        let day = books.day_cap(wish.caps.day()).and_then(|cap| capped(worst, cap, all_priced, &what));
        self.add(Gate::DayCap, id, day);
    }
}

fn age(at: Micros, now: Micros) -> Judged {
    let said = format!("given {} s ago", now.ms_since(at) / 1_000);
    if at > now.plus_ms(SKEW_MS) {
        return Err(format!("given at {}, which is to come; judge again", instant_text(at)));
    }
    if now.ms_since(at) <= HOLDS_MS {
        Ok(said)
    } else {
        Err(format!("{said}; it holds {} s: judge again", HOLDS_MS / 1_000))
    }
}

fn registered(wish: &Wish<'_>, books: &Books) -> Judged {
    let asked = wish.campaign;
    if let Some((again, _)) = wish.hosts.iter().find(|(host, _)| books.has(asked.id(), host)) {
        return Err(format!("host {again} was launched in it already; give another name"));
    }
    match books.campaigns.get(asked.id()) {
        None => Ok("new".to_owned()),
        Some(there) if there.campaign == *asked => Ok("as it is stored".to_owned()),
        Some(there) => Err(format!(
            "it is stored with deadline {} and {}, and asked for with {} and {}; a campaign keeps both: take another name",
            instant_text(there.campaign.deadline()),
            of_experiment(&there.campaign),
            instant_text(asked.deadline()),
            of_experiment(asked),
        )),
    }
}

fn of_experiment(campaign: &Campaign) -> String {
    campaign.experiment().map_or("no experiment".to_owned(), |e| e.to_string())
}

fn count(asked: usize, limits: &Limits, books: &Books, alive: Result<u32, String>) -> Judged {
    // A launch that is stored counts before AWS shows anything of it.
    let alive = alive?.max(running(books));
    let said = format!("{alive} alive and {asked} more, of {} allowed", limits.max_hosts);
    let asked = u32::try_from(asked).unwrap_or(u32::MAX);
    if asked > 0 && alive.saturating_add(asked) <= limits.max_hosts {
        Ok(said)
    } else {
        Err(format!("{said}; end some, or ask for fewer"))
    }
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

fn account(limits: &Limits, facts: &Facts) -> Judged {
    let account = facts.account.as_ref().map_err(failed)?;
    let expected = &limits.account;
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

fn deadline(campaign: &Campaign, limits: &Limits, now: Micros) -> Judged {
    let deadline = campaign.deadline();
    let said = format!("{}, {} minutes from now", instant_text(deadline), deadline.ms_since(now) / 60_000);
    if limits.least_life_ms == 0 || limits.longest_life_ms == 0 {
        return Err("the least or the longest life is configured as 0; give both".to_owned());
    }
    if now.plus_ms(limits.least_life_ms) > deadline {
        return Err(format!("{said}: too soon to be of use; {} minutes at least", limits.least_life_ms / 60_000));
    }
    if now.plus_ms(limits.longest_life_ms) < deadline {
        return Err(format!("{said}: {} minutes at most", limits.longest_life_ms / 60_000));
    }
    Ok(said)
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

fn image(host: &AskedHost, found: &HostFacts) -> Judged {
    let image = found.image.as_ref().map_err(failed)?;
    let said = format!("{} ({}), {}, {}", image.id, image.name, image.architecture, image.state);
    if image.state != "available" || image.architecture != ARCHITECTURE {
        return Err(format!("{said}; an available image for {ARCHITECTURE} is needed"));
    }
    if host.volume_gib < image.root_gib {
        return Err(format!("{said}; it needs {} GiB, and {} were asked for", image.root_gib, host.volume_gib));
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

/// What was tried is what was asked for, in every subnet, and would be launched.
fn launch(host: &AskedHost, found: &HostFacts) -> Judged {
    let recipe = found.recipe.as_ref().map_err(failed)?;
    let (kind, image) = (found.kind.as_ref().map_err(failed)?, found.image.as_ref().map_err(failed)?);
    if *recipe != host.recipe(kind, image, recipe.security_groups.clone(), recipe.placements.clone()) {
        return Err("what was tried is not what was asked for; judge again".to_owned());
    }
    if !recipe.placements.iter().map(|p| &p.subnet).eq(&host.subnets) {
        return Err("the subnets tried are not those asked for; judge again".to_owned());
    }
    if let Some(untried) = recipe.placements.iter().find(|p| !found.launches.iter().any(|(tried, _)| tried == *p)) {
        return Err(format!("{} was not tried", untried.subnet));
    }
    if recipe.placements.is_empty() || recipe.security_groups.is_empty() {
        return Err("there is no subnet to be in, or no security group that closes it; name both".to_owned());
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
    Ok(format!("DryRun in {} subnets", found.launches.len()))
}

/// EC2 looks a profile up to see whether its role may be passed: what it would launch with it has it.
fn profile(host: &AskedHost, found: &HostFacts) -> Judged {
    let recipe = found.recipe.as_ref().map_err(failed)?;
    if recipe.profile != host.profile {
        return Err(format!("{} was tried, and {} asked for; judge again", recipe.profile, host.profile));
    }
    let tried = found.launches.first().ok_or("it was not tried")?;
    tried.1.as_ref().map_err(failed)?;
    Ok(format!("{}, given to a host by DryRun", host.profile))
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
        Some((_, Ok(evidence))) => Ok(evidence.clone()),
        Some((_, Err(e))) => Err(failed(e)),
        None => Err("it was not tried".to_owned()),
    }
}

fn sweeper(limits: &Limits, facts: &Facts, region: &Region, now: Micros) -> Judged {
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
            Some(at) if limits.sweep_age_ms > 0 && now.ms_since(at) <= limits.sweep_age_ms => {
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

fn capped(worst: UsdMicros, cap: UsdMicros, all_priced: bool, what: &str) -> Judged {
    let said = format!("{worst} at worst {what}, of {cap}");
    if !all_priced {
        return Err(format!("not known without every price; without them {said}"));
    }
    if worst <= cap { Ok(said) } else { Err(format!("{said}; shorten the deadline, or raise the cap")) }
}
