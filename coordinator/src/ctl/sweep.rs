//! `drumsctl sweep`: ends what is overdue, by what AWS shows alone. It needs no home, no coordinator and no store.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    str::FromStr,
};

use clap::Args;
use drums_common::{clock::Clock as _, ids::InstallationId, note, say};
use drums_provider::{
    alarm::{Alarm, AlarmKind},
    cloud::{Canary, InstanceState, Shows},
    deadline::TagSays,
    failure::CloudError,
    host::KillId,
    sweep::{self, Mode, Regions, Scope, Spare},
    words::{InstanceId, Region, instant_text},
};
use serde::Serialize;

use super::{CtlError, Global, aws, output};
use crate::clock::SystemClock;

/// It did not find a canary, so it may not have found others either.
const BLIND: u8 = 20;
const HOUR_MS: u64 = 3_600_000;

#[derive(Debug, Args)]
pub struct Sweep {
    /// Whose hosts: the installation's 8 hexadecimal digits, as in its tag drums:installation.
    #[arg(long, value_name = "ID")]
    pub installation: InstallationId,
    /// A region to look at; may be repeated. Default: every region that is enabled for the account.
    #[arg(long = "region", value_name = "REGION")]
    pub regions: Vec<Region>,
    /// An instance that must be found and spared; may be repeated. With one --region, its id alone is enough.
    #[arg(long = "canary", value_name = "REGION/INSTANCE")]
    pub canaries: Vec<Named>,
    /// Say what would be ended, and end nothing.
    #[arg(long)]
    pub shadow: bool,
    /// Longest life of an instance that bears our tags and no token of ours; 1 to 168, as the stack's LongestLifeHours.
    #[arg(long, default_value_t = 24, value_name = "HOURS", value_parser = clap::value_parser!(u64).range(1..=168))]
    pub longest_life_hours: u64,
}

/// A canary as it is named on a command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    region: Option<Region>,
    instance: InstanceId,
}

impl FromStr for Named {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let (region, instance) = match s.split_once('/') {
            Some((region, instance)) => (Some(region.parse::<Region>().map_err(|e| e.to_string())?), instance),
            None => (None, s),
        };
        Ok(Self { region, instance: instance.parse::<InstanceId>().map_err(|e| e.to_string())? })
    }
}

impl Sweep {
    fn scope(&self) -> Result<(Scope, BTreeSet<Canary>), CtlError> {
        let mut canaries = BTreeSet::new();
        for Named { region, instance } in &self.canaries {
            let region = match (region, self.regions.as_slice()) {
                (Some(region), _) => region,
                (None, [only]) => only,
                (None, _) => {
                    let message = format!("canary {instance} may be in any of several regions");
                    return Err(CtlError::bad(message, format!("name its region: --canary REGION/{instance}")));
                }
            };
            canaries.insert(Canary { region: region.clone(), instance: instance.clone() });
        }
        let only: BTreeSet<Region> = self.regions.iter().cloned().collect();
        let regions = if only.is_empty() { Regions::All } else { Regions::Only(only) };
        let mode = if self.shadow { Mode::Shadow } else { Mode::Armed };
        let life_ms = self.longest_life_hours.saturating_mul(HOUR_MS);
        let scope = Scope::new(self.installation, regions, canaries.clone(), mode, life_ms).map_err(|e| {
            CtlError::bad(
                format!("nothing was swept: {e}"),
                "a canary is a stopped instance that infra/cloud/region.yaml makes: --canary REGION/INSTANCE",
            )
        })?;
        Ok((scope, canaries))
    }
}

pub(super) async fn sweep(global: &Global, c: Sweep) -> Result<ExitCode, CtlError> {
    let (scope, canaries) = c.scope()?;
    let cloud = reachable(canaries.iter().map(|c| &c.region).collect()).await?;
    let view = sweep::look(&*cloud, &scope, SystemClock.now()).await;
    let decided = sweep::decide(&scope, &view);
    let done = sweep::carry_out(&*cloud, &decided).await;
    let swept = Swept::of(&decided, &done);
    if global.json {
        output::json(&swept)?;
    } else {
        swept.show()?;
    }
    Ok(swept.verdict())
}

/// Asked where the canaries are, one after the other: a region that is away hides no other one.
async fn reachable(regions: BTreeSet<&Region>) -> Result<Box<dyn Shows>, CtlError> {
    let mut first = None;
    for region in regions {
        let cloud = aws::connect(region).await?;
        if cloud.account().await.is_ok() {
            return Ok(cloud);
        }
        first.get_or_insert(cloud);
    }
    // Then the sweep itself says what failed.
    first.ok_or_else(|| CtlError::bad("nothing was swept: no canary is named", "name one: --canary REGION/INSTANCE"))
}

/// What a sweep saw and did, for people and scripts.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Swept {
    mode: Mode,
    /// By AWS's clock, if it was to be had.
    at: String,
    /// Whether it saw all that it was to see.
    complete: bool,
    /// Canaries that were found and spared.
    canaries: BTreeSet<Canary>,
    rows: Vec<Row>,
    alarms: Vec<Alarm>,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Row {
    region: Region,
    instance: InstanceId,
    whose: &'static str,
    /// The deadline that counts.
    due: Option<String>,
    why: String,
    done: Done,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Done {
    Spared,
    /// It was ended before, or goes.
    EndedBefore,
    /// In shadow mode.
    WouldEnd,
    /// The state that EC2 answered.
    Ended(InstanceState),
    /// It lives, and is overdue.
    Failed(String),
}

impl Done {
    fn text(&self) -> String {
        match self {
            Self::Spared => "spared".to_owned(),
            Self::EndedBefore => "ended before".to_owned(),
            Self::WouldEnd => "would be ended".to_owned(),
            Self::Ended(InstanceState::Terminated) => "ended: terminated".to_owned(),
            Self::Ended(_) => "ended: shutting down".to_owned(),
            Self::Failed(why) => format!("NOT ENDED: {why}"),
        }
    }
}

impl Swept {
    fn of(sweep: &sweep::Sweep, done: &[(KillId, Result<InstanceState, CloudError>)]) -> Self {
        let replies: BTreeMap<(&Region, &InstanceId), _> =
            done.iter().map(|(kill, reply)| ((kill.region(), kill.instance()), reply)).collect();
        let doomed = sweep.doomed.iter().map(|d| {
            let (region, instance) = (d.instance.region(), d.instance.id());
            let late = output::duration(sweep.now.ms_since(d.due));
            Row {
                region: region.clone(),
                instance: instance.clone(),
                whose: "ours",
                due: Some(instant_text(d.due)),
                why: format!("overdue for {late}, by its {}", source(d.instance.token().is_some(), d.tag)),
                done: match replies.get(&(region, instance)) {
                    Some(Ok(state)) => Done::Ended(*state),
                    Some(Err(e)) => Done::Failed(e.to_string()),
                    None => Done::WouldEnd,
                },
            }
        });
        let spared = sweep.spared.iter().map(|s| {
            let (whose, why) = reason(s.why);
            let done = if matches!(s.why, Spare::Going | Spare::Gone) { Done::EndedBefore } else { Done::Spared };
            let (region, instance) = (s.region.clone(), s.instance.clone());
            Row { region, instance, whose, due: s.due.map(instant_text), why: why.to_owned(), done }
        });
        let mut rows: Vec<Row> = doomed.chain(spared).collect();
        rows.sort();
        Self {
            mode: sweep.mode(),
            at: instant_text(sweep.now),
            complete: sweep.is_complete(),
            canaries: sweep.canaries.clone(),
            rows,
            alarms: sweep.alarms.clone(),
        }
    }

    fn show(&self) -> Result<(), CtlError> {
        let cells = |r: &Row| {
            let due = r.due.as_deref().map_or_else(|| "-".to_owned(), output::time);
            [r.region.to_string(), r.instance.to_string(), r.whose.to_owned(), due, r.why.clone(), r.done.text()]
        };
        let rows: Vec<_> = self.rows.iter().map(cells).collect();
        output::table(&["region", "instance", "whose", "due", "why", "what was done"], &rows)?;
        let count = |which: fn(&Done) -> bool| self.rows.iter().filter(|r| which(&r.done)).count();
        let ended = match self.mode {
            Mode::Shadow => format!("{} would be ended", count(|d| *d == Done::WouldEnd)),
            Mode::Armed => format!("{} ended", count(|d| matches!(d, Done::Ended(_)))),
        };
        let (spared, canaries) = (count(|d| *d == Done::Spared), self.canaries.len());
        say!("at {}: {ended}, {spared} spared; canaries found: {canaries}", output::time(&self.at))?;
        Ok(())
    }

    /// Every alarm, and whether it may be believed that nothing overdue is left.
    fn verdict(&self) -> ExitCode {
        for alarm in &self.alarms {
            note!("alarm: {}", say::one_line(&alarm.message));
        }
        for row in &self.rows {
            if let Done::Failed(why) = &row.done {
                note!("alarm: {} in {} is overdue and was not ended: {}", row.instance, row.region, say::one_line(why));
            }
        }
        let blind = self.alarms.iter().any(|a| a.kind == AlarmKind::CanaryMissing);
        let failed = self.rows.iter().any(|r| matches!(r.done, Done::Failed(_)));
        if self.complete && !failed {
            return ExitCode::SUCCESS;
        }
        note!("error: the sweep failed: what it saw and could end is ended, and more that is overdue may be left");
        note!(
            "help:  mend what the alarms name and sweep again; runbooks/clean-an-account.md ends hosts without drumsctl"
        );
        ExitCode::from(if blind { BLIND } else { 1 })
    }
}

/// What said when it was due.
fn source(token: bool, tag: TagSays) -> &'static str {
    match (token, tag) {
        (true, TagSays::Earlier) => "tag, which is earlier than its token",
        (true, _) => "token",
        (false, TagSays::Missing | TagSays::Unreadable) => "launch, since no deadline can be read",
        (false, _) => "tag or the longest life since its launch",
    }
}

fn reason(why: Spare) -> (&'static str, &'static str) {
    match why {
        Spare::Canary => ("ours", "canary"),
        Spare::NotDue => ("ours", "not due"),
        Spare::Going => ("ours", "shutting down"),
        Spare::Gone => ("ours", "terminated"),
        Spare::Theirs => ("another's", "another installation's"),
        Spare::UnknownCanary => ("ours", "a canary that nobody named"),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use drums_common::clock::Micros;

    use super::*;
    use crate::ctl::{Cli, Command};

    fn scope(arguments: &str) -> Result<(Scope, BTreeSet<Canary>), CtlError> {
        let line = format!("drumsctl sweep --installation 0a1b2c3d {arguments}");
        let Some(Command::Sweep(c)) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else {
            panic!("{line} is no sweep")
        };
        c.scope()
    }

    #[test]
    fn a_canary_has_a_region_and_each_sweep_a_canary() {
        let id = "i-0123456789abcdef0";
        let (_, one) = scope(&format!("--region eu-central-1 --canary {id}")).unwrap();
        let (_, same) = scope(&format!("--canary eu-central-1/{id}")).unwrap();
        assert_eq!(one, same);
        for (arguments, word) in [
            (String::new(), "no canary"),
            (format!("--canary {id}"), "REGION/i-"),
            (format!("--region eu-central-1 --region us-east-1 --canary {id}"), "REGION/i-"),
            (format!("--region eu-central-1 --canary us-east-1/{id}"), "not swept"),
        ] {
            let CtlError::BadInput { message, help } = scope(&arguments).unwrap_err() else { panic!("{arguments}") };
            assert!(format!("{message} {help}").contains(word), "{arguments}: {message} {help}");
        }
        for bad in ["i-1", "eu/i-0123456789abcdef0", "eu-central-1/", "eu-central-1/vol-0123456789abcdef0"] {
            assert!(bad.parse::<Named>().is_err(), "{bad}");
        }
        for hours in ["0", "169"] {
            let line = format!("drumsctl sweep --installation 0a1b2c3d --canary x-1/{id} --longest-life-hours {hours}");
            assert!(Cli::try_parse_from(line.split_whitespace()).is_err(), "{hours} hours");
        }
    }

    #[test]
    fn what_a_sweep_ends_with_tells_blind_from_failed() {
        let alarm = |kind| Alarm::new(kind, "");
        let row = |done| Row {
            region: "eu-central-1".parse().unwrap(),
            instance: "i-0123456789abcdef0".parse().unwrap(),
            whose: "ours",
            due: None,
            why: String::new(),
            done,
        };
        let swept = |complete, alarms, rows| Swept {
            mode: Mode::Armed,
            at: instant_text(Micros(0)),
            complete,
            canaries: BTreeSet::new(),
            rows,
            alarms,
        };
        let code = |swept: Swept| format!("{:?}", swept.verdict());
        let exit = |code: u8| format!("{:?}", ExitCode::from(code));
        assert_eq!(code(swept(true, vec![alarm(AlarmKind::TagEdited)], vec![row(Done::WouldEnd)])), exit(0));
        assert_eq!(code(swept(true, vec![], vec![row(Done::Failed("denied".to_owned()))])), exit(1));
        assert_eq!(code(swept(false, vec![alarm(AlarmKind::RegionUnseen)], vec![])), exit(1));
        let both = vec![alarm(AlarmKind::RegionUnseen), alarm(AlarmKind::CanaryMissing)];
        assert_eq!(code(swept(false, both, vec![])), exit(BLIND));
    }
}
