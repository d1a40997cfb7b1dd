//! `drumsctl host provision`: whether a paid host may be launched, what it would cost, and the calls that would be made.

use std::{path::PathBuf, process::ExitCode, str::FromStr};

use clap::Args;
use drums_common::{
    clock::{Clock as _, Micros},
    ids::{ExperimentId, HostId},
    note, say,
};
use drums_provider::{
    ask::{Ask, BadAsk, RawAsk, RawHost},
    books::Books,
    cloud::{Call, KillSchedule, LaunchOrder, ScheduleName, Shows},
    failure::{CloudError, FailureKind},
    gates::{self, Facts, Row},
    host::OwnedHost,
    money::UsdMicros,
    spend::{Meter, Rates, Until},
    words::{CampaignId, Region, instant_text},
};
use serde::Serialize;

use super::{CtlError, Global, aws, output};
use crate::{
    account::{AccountError, AwsAccount},
    clock::SystemClock,
};

#[derive(Debug, Args)]
pub struct Provision {
    /// The host's name: a-z, 0-9 and -.
    pub name: HostId,
    /// Its EC2 instance type.
    #[arg(long = "type", value_name = "TYPE")]
    pub kind: String,
    /// What it is launched for; all hosts of a campaign share its deadline and its cap.
    #[arg(long)]
    pub campaign: CampaignId,
    /// The experiment that the campaign is of.
    #[arg(long)]
    pub experiment: Option<ExperimentId>,
    /// When it must be dead: a UTC time as 2027-01-31T12:00:00Z, or a while from now as 3h.
    #[arg(long, value_name = "TIME")]
    pub deadline: ByThen,
    /// What the campaign may cost, in US dollars as 5 or 12.50.
    #[arg(long, value_name = "USD")]
    pub max_usd: String,
    #[arg(long)]
    pub region: Region,
    /// Take spare capacity, which EC2 may take back at any time.
    #[arg(long)]
    pub spot: bool,
    /// Do without nested virtualisation: no arm of it can be a virtual machine.
    #[arg(long)]
    pub no_nested: bool,
    /// What you have in AWS and allow there; docs/account.example.toml is one.
    #[arg(long, value_name = "FILE")]
    pub account: PathBuf,
    /// Ask every gate and show every call, and launch nothing.
    #[arg(long)]
    pub dry_run: bool,
}

/// A time to come, given as such or as how far away it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByThen(Micros);

impl FromStr for ByThen {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        if let Ok(at) = s.parse::<jiff::Timestamp>() {
            return Ok(Self(Micros(at.as_microsecond())));
        }
        let wrong =
            || format!("{s:?} is no time to come; expected one as 2027-01-31T12:00:00Z, or a while as 90m or 3h");
        let away: jiff::SignedDuration = s.parse().map_err(|_| wrong())?;
        let us = i64::try_from(away.as_micros()).ok().filter(|us| *us > 0).ok_or_else(wrong)?;
        Ok(Self(Micros(SystemClock.now().0.saturating_add(us))))
    }
}

/// Before an instance is launched nobody knows its id.
const NOT_YET: &str = "i-00000000000000000";

pub(super) async fn provision(global: &Global, c: Provision) -> Result<ExitCode, CtlError> {
    if !c.dry_run {
        return Err(CtlError::bad(
            "launching a paid host is not built yet: nothing was asked and nothing was launched",
            "add --dry-run: it asks every gate, and shows what it would cost and every call that would be made",
        ));
    }
    let account = AwsAccount::read(&c.account).map_err(unusable)?;
    let ask = c.ask(&account)?;
    let cloud = aws::connect(&c.region).await?;
    let facts = gates::look(&*cloud, &ask, &account.setup, Books::default(), SystemClock.now()).await;
    let (table, cleared) = gates::judge(&ask, &account.limits, &facts);
    let (calls, calls_unknown) = match calls(&*cloud, &ask, &facts).await {
        Ok(calls) => (calls, None),
        Err(e) => (Vec::new(), Some(e.to_string())),
    };
    let plan = Plan {
        host: c.name.clone(),
        campaign: c.campaign.clone(),
        deadline: instant_text(ask.campaign.deadline()),
        passed: cleared.is_some(),
        worst_case_usd: worst_case(&ask, &facts).map(|usd| usd.to_string().trim_start_matches('$').to_owned()),
        max_usd: c.max_usd.clone(),
        gates: table.rows,
        calls,
        calls_unknown,
    };
    if global.json {
        output::json(&plan)?;
    } else {
        plan.show(&c)?;
    }
    Ok(plan.verdict())
}

fn unusable(e: AccountError) -> CtlError {
    match e {
        AccountError::Read { path, source } => CtlError::File { attempt: "read", path, source },
        e @ (AccountError::Parse { .. } | AccountError::Refused { .. }) => {
            CtlError::bad(e.to_string(), "correct it; docs/account.example.toml has every key with its meaning")
        }
    }
}

impl Provision {
    fn ask(&self, account: &AwsAccount) -> Result<Ask, CtlError> {
        let subnets = account.subnets.get(&self.region).into_iter().flatten();
        let raw = RawAsk {
            campaign: self.campaign.to_string(),
            experiment: self.experiment.map(|e| e.to_string()),
            deadline: instant_text(self.deadline.0),
            max_usd: self.max_usd.clone(),
            drain_minutes: account.drain_minutes,
            instance_profile: account.profile.to_string(),
            hosts: vec![RawHost {
                name: self.name.to_string(),
                kind: self.kind.clone(),
                region: self.region.to_string(),
                subnets: subnets.map(ToString::to_string).collect(),
                volume_gib: account.volume_gib,
                spot: self.spot,
                nested: !self.no_nested,
            }],
        };
        raw.read().map_err(|BadAsk(refusals)| {
            let said = refusals.iter().map(|r| format!("{}: {}", self.place(&r.place), r.message));
            let message = said.collect::<Vec<_>>().join("\n       ");
            CtlError::bad(message, "nothing was asked of AWS; correct the flag, or the account's file")
        })
    }

    /// Where the operator wrote what an ask calls by its own name.
    fn place(&self, of_ask: &str) -> String {
        let file = |key: &str| format!("{}, {key}", self.account.display());
        let of_host = of_ask.strip_prefix("hosts[0].");
        match of_host.unwrap_or(of_ask) {
            "type" => "--type".to_owned(),
            "max_usd" => "--max-usd".to_owned(),
            key @ ("deadline" | "campaign" | "experiment" | "region") => format!("--{key}"),
            key if key.starts_with("subnets") => file(&format!("ec2.regions.{}.{key}", self.region)),
            key => file(&format!("ec2.{key}")),
        }
    }
}

/// What it costs if nothing ends it before it must; `None` without a price.
fn worst_case(ask: &Ask, facts: &Facts) -> Option<UsdMicros> {
    let now = facts.account.as_ref().map_or(facts.local, |a| a.clock);
    let costs = ask.hosts.iter().map(|host| {
        let found = facts.hosts.get(&host.host)?;
        let meter = Meter {
            host: host.host.clone(),
            campaign: ask.campaign.id().clone(),
            experiment: ask.campaign.experiment(),
            rates: Rates {
                hour: found.hour.clone().ok()?,
                gib_month: found.gib_month.clone().ok()?,
                volume_gib: host.volume_gib,
            },
            from: now,
            until: Until::Deadline(ask.campaign.deadline()),
        };
        Some(meter.worst_case(now))
    });
    costs.sum()
}

/// The calls that change something, in their order; or why they cannot be told.
async fn calls(cloud: &dyn Shows, ask: &Ask, facts: &Facts) -> Result<Vec<Call>, CloudError> {
    let mut calls = Vec::new();
    for host in &ask.hosts {
        let unseen = |what: &str| CloudError::new(FailureKind::Invalid, what, "nothing was found out about the host");
        let recipe = facts.hosts.get(&host.host).ok_or_else(|| unseen("RunInstances"))?.recipe.clone()?;
        let placement = recipe.placements.first().cloned().ok_or_else(|| unseen("RunInstances"))?;
        let owned = OwnedHost::first(facts.installation, host.host.clone(), ask.campaign.clone());
        let (setup, _) = facts.schedules.get(&host.region).ok_or_else(|| unseen("CreateSchedule"))?;
        let schedule = KillSchedule {
            name: ScheduleName::of(&owned.token()),
            region: host.region.clone(),
            setup: setup.clone(),
            instance: NOT_YET.parse().map_err(|_| unseen("CreateSchedule"))?,
            at: ask.campaign.deadline(),
            enabled: true,
        };
        let order = LaunchOrder { host: owned, recipe, placement, due: ask.campaign.deadline() };
        calls.push(cloud.shown_run(&order).await?);
        calls.push(cloud.shown_schedule(&schedule).await?);
    }
    Ok(calls)
}

/// What came of a dry run, for people and scripts.
#[derive(Debug, Serialize)]
struct Plan {
    host: HostId,
    campaign: CampaignId,
    deadline: String,
    /// Whether every gate was.
    passed: bool,
    worst_case_usd: Option<String>,
    max_usd: String,
    gates: Vec<Row>,
    /// Those that change something, in their order.
    calls: Vec<Call>,
    /// Why there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    calls_unknown: Option<String>,
}

impl Plan {
    fn show(&self, c: &Provision) -> Result<(), CtlError> {
        say!("{}: {} in {}, dead by {}", self.host, c.kind, c.region, output::time(&self.deadline))?;
        say!("")?;
        let cells = |r: &Row| {
            let verdict = if r.passed { "ok" } else { "REFUSED" };
            [r.gate.to_string(), r.about.clone(), verdict.to_owned(), r.evidence.clone()]
        };
        output::table(&["gate", "about", "verdict", "evidence"], &self.gates.iter().map(cells).collect::<Vec<_>>())?;
        say!("")?;
        match &self.worst_case_usd {
            Some(usd) => say!("worst case: ${usd}, of ${} that the campaign may cost", self.max_usd)?,
            None => say!("worst case: not known without every price")?,
        }
        say!("what the coordinator has launched or stored is counted only as far as AWS shows it")?;
        say!("")?;
        if let Some(why) = &self.calls_unknown {
            say!("what would be called is not known: {}", say::one_line(why))?;
            return Ok(());
        }
        let whether = if self.passed { "would be made" } else { "would be made if every gate passed" };
        say!("calls that {whether}, in this order; with no capacity the next subnet is tried")?;
        for call in &self.calls {
            say!("")?;
            say!("{} in {}", call.call, call.region)?;
            for (name, value) in &call.parameters {
                say!("  {name} = {}", say::one_line(value))?;
            }
        }
        say!("")?;
        say!("{NOT_YET} stands for the instance that RunInstances answers with")?;
        Ok(())
    }

    fn verdict(&self) -> ExitCode {
        if self.passed {
            note!("every gate passed; nothing was launched");
            return ExitCode::SUCCESS;
        }
        let refused = self.gates.iter().filter(|r| !r.passed);
        let refused: Vec<String> = refused.map(|r| format!("{} ({})", r.gate, r.about)).collect();
        note!("error: the host may not be launched: refused by {}", refused.join(", "));
        note!("help:  the table's evidence says of each what was found and what to do");
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::ctl::{Cli, Command, fleet::HostCommand};

    const ACCOUNT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/account.example.toml");

    fn ask(change: &str) -> Result<Ask, CtlError> {
        let line = format!(
            "drumsctl host provision h1 --type c8i.xlarge --campaign c1 --deadline 3h --max-usd 5 --region eu-central-1 \
             --account {ACCOUNT} --dry-run {change}"
        );
        let Some(Command::Host(HostCommand::Provision(c))) = Cli::try_parse_from(words(&line)).unwrap().command else {
            panic!("{line}")
        };
        c.ask(&AwsAccount::read(&c.account).unwrap())
    }

    /// A flag that stands twice counts as its last one.
    fn words(line: &str) -> Vec<String> {
        let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let last = words.len();
        if let [.., flag, value] = words.clone().as_slice()
            && let Some(at) = words.iter().position(|w| w == flag).filter(|at| at + 2 < last)
        {
            words[at + 1].clone_from(value);
            words.truncate(last - 2);
        }
        words
    }

    #[test]
    fn what_is_asked_for_is_the_flags_and_the_accounts() {
        let before = SystemClock.now();
        let asked = ask("").unwrap();
        let away_ms = asked.campaign.deadline().ms_since(before);
        assert!((10_799_000..10_860_000).contains(&away_ms), "{away_ms}");
        let host = &asked.hosts[0];
        assert_eq!((asked.run_usd, asked.drain_ms, host.volume_gib), (UsdMicros(5_000_000), 900_000, 30));
        assert!(host.nested && host.subnets.len() == 2);
        assert!(!ask("--no-nested").unwrap().hosts[0].nested);
    }

    #[test]
    fn what_is_refused_is_named_as_the_operator_wrote_it() {
        for (change, place) in [
            ("--type c8i", "--type: "),
            ("--type m7i-flex.large", "--type: "),
            ("--max-usd 0", "--max-usd: "),
            ("--deadline 1969-01-01T00:00:00Z", "--deadline: "),
            ("--region us-east-1", "account.example.toml, ec2.regions.us-east-1.subnets: "),
        ] {
            let CtlError::BadInput { message, .. } = ask(change).unwrap_err() else { panic!("{change}") };
            assert!(message.contains(place), "{change}: {message}");
        }
        for bad in ["", "soon", "0h", "-3h"] {
            assert!(bad.parse::<ByThen>().is_err(), "{bad:?}");
        }
    }
}
