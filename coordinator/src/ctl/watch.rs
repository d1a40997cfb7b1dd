//! Watching a run: a progress bar on a terminal, lines elsewhere.

use std::{io::IsTerminal as _, process::ExitCode, time::Duration};

use drums_common::verdict::Verdict;
use drums_common::{note, say};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{Client, CtlError, Global, output, results};
use crate::api::views::{EventsView, RunView};

/// Detached by Ctrl-C, as shells count it.
const DETACHED: u8 = 130;
/// The coordinator answers a long poll by then at the latest; short, so that the time left moves.
const POLL_S: u64 = 2;
/// A coordinator that restarts is back by then.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) async fn watch(global: &Global, client: &Client, view: RunView) -> Result<ExitCode, CtlError> {
    let bar = bar(global, &view);
    let mut closed = None;
    // Both branches are cancel-safe: a lost poll is asked again from the same number by whoever attaches.
    let detached = tokio::select! {
        result = follow(client, &view, &bar) => {
            closed = Some(result?);
            false
        }
        _ = tokio::signal::ctrl_c() => true,
    };
    bar.finish_and_clear();
    let Some(run) = closed.filter(|_| !detached) else {
        note!(
            "detached: {} goes on; drumsctl run {} --attach picks it up, drumsctl cancel {} stops it",
            view.run,
            view.experiment,
            view.run
        );
        return Ok(ExitCode::from(DETACHED));
    };
    let closing = Closing::of(client, &run).await?;
    if global.json {
        output::json(&Closed { run: &run, experiment_verdict: closing.experiment })?;
    } else {
        say!("{} is closed", run.run)?;
        if let Some(ending) = &run.ending {
            say!("ending    {ending}")?;
        }
        let teardown = match (run.leaked.is_empty(), run.unreported.is_empty()) {
            (true, true) => "clean".to_owned(),
            (false, _) => format!("leaked {}", run.leaked.join(", ")),
            (true, false) => {
                let hosts: Vec<_> = run.unreported.iter().map(|h| h.as_str()).collect();
                format!("not reported by {}", hosts.join(", "))
            }
        };
        say!("teardown  {teardown}")?;
        say!("results   drumsctl results {}", run.experiment)?;
        say!("verdict   {}", closing.in_words())?;
        for reason in &closing.reasons {
            say!("why       {}", say::one_line(reason))?;
        }
    }
    Ok(ExitCode::from(closing.exit_code()))
}

/// What `--json` prints of a closed run.
#[derive(serde::Serialize)]
struct Closed<'r> {
    #[serde(flatten)]
    run: &'r RunView,
    /// Absent when the run's own ending is its verdict.
    experiment_verdict: Option<Verdict>,
}

/// The verdict that a watched run ends with. All complete runs of a registration are pooled into the experiment's, and
/// one lucky run is not an experiment; a run that was not completed speaks for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Closing {
    alone: Option<Verdict>,
    experiment: Option<Verdict>,
    /// Why a run that was completed does not count.
    reasons: Vec<String>,
}

impl Closing {
    async fn of(client: &Client, run: &RunView) -> Result<Self, CtlError> {
        let alone = run.verdict;
        let experiment = match alone {
            Some(Verdict::Pass | Verdict::Fail | Verdict::Undecided) => {
                Some(results::verdict(client, run.experiment, run.registration).await?)
            }
            Some(Verdict::Invalid | Verdict::Incomplete | Verdict::Lost | Verdict::Cancelled) | None => None,
        };
        let reasons = match alone {
            Some(Verdict::Invalid) => results::reasons(client, run.experiment, run.registration, run.run).await?,
            _ => Vec::new(),
        };
        Ok(Self { alone, experiment, reasons })
    }

    fn in_words(&self) -> String {
        let alone = self.alone.map_or("open", Verdict::as_str);
        match self.experiment {
            Some(experiment) => format!("this run alone: {alone}; experiment: {experiment}"),
            None => format!("this run: {alone}"),
        }
    }

    fn exit_code(&self) -> u8 {
        self.experiment.or(self.alone).map_or(1, Verdict::exit_code)
    }
}

fn bar(global: &Global, view: &RunView) -> ProgressBar {
    if global.json || !std::io::stderr().is_terminal() {
        return ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    }
    let bar = ProgressBar::new(u64::from(view.blocks_total));
    let template = if output::colour() {
        "{msg}\n{bar:40.cyan} {pos}/{len} blocks {prefix} {elapsed_precise}"
    } else {
        "{msg}\n{bar:40} {pos}/{len} blocks {prefix} {elapsed_precise}"
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

/// Until the run is closed.
async fn follow(client: &Client, view: &RunView, bar: &ProgressBar) -> Result<RunView, CtlError> {
    let mut after = 0;
    let mut unheard: Option<tokio::time::Instant> = None;
    loop {
        let path = format!("/runs/{}/events?after={after}&wait_s={POLL_S}", view.run);
        let page: EventsView = match client.get(&path).await {
            Ok(page) => page,
            Err(e) if e.passes() => {
                // The run does not depend on us, and a coordinator that restarts, or has its store back, goes on with it.
                const WAITING: &str = "the coordinator cannot be reached, or cannot answer; waiting for it";
                if unheard.is_none() && bar.is_hidden() {
                    note!("{WAITING}");
                }
                let since = *unheard.get_or_insert_with(tokio::time::Instant::now);
                if since.elapsed() > PATIENCE {
                    return Err(e);
                }
                bar.set_message(WAITING);
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
            Err(e) => return Err(e),
        };
        if unheard.take().is_some() && bar.is_hidden() {
            note!("the coordinator is back");
        }
        for e in &page.events {
            after = e.number;
            let who = e.host.as_ref().map_or_else(|| "run".to_owned(), ToString::to_string);
            let line = say::one_line(&format!("{}  {who:<10} {}", output::time(&e.at), e.text));
            if bar.is_hidden() {
                note!("{line}");
            } else {
                bar.println(line);
            }
        }
        let run = page.run;
        bar.set_length(u64::from(run.blocks_total));
        bar.set_position(u64::from(run.blocks_done));
        bar.set_prefix(run.left_ms.map(|ms| format!("{} left,", output::duration(ms))).unwrap_or_default());
        bar.set_message(message(&run));
        if run.verdict.is_some() && page.events.is_empty() {
            return Ok(run);
        }
        if run.verdict.is_some() {
            // Once more for events beyond this page.
            continue;
        }
    }
}

fn message(run: &RunView) -> String {
    let hosts: Vec<String> = run
        .hosts
        .iter()
        .map(|h| {
            let what = if h.activity.is_empty() { h.block.clone().unwrap_or_default() } else { h.activity.clone() };
            format!("{} {what}", h.host).trim_end().to_owned()
        })
        .collect();
    say::one_line(&format!("{} {}  {}", run.run, run.phase, hosts.join("  |  ")))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use drums_analysis::synthetic::Scenario;
    use drums_common::{clock::Micros, digest::Sha256, ids::Generation, lease::LeaseTimes};

    use super::*;
    use crate::{
        api,
        artifacts::Artifacts,
        clock::SystemClock,
        config::Home,
        core::run::{Ending, Phase, RunState},
        store::{AuditRow, SqliteStore, Store, StoreHandle, Who, Written},
        tasks::Control,
    };

    /// A closed run with a scenario's evidence.
    fn add_run(s: &mut dyn Store, scenario: &Scenario, number: u32, ending: Ending, verdict: Verdict) {
        let (meta, records) = scenario.run(number);
        let hosts = scenario.hosts.iter().map(|(h, _)| (h.clone(), Default::default(), Generation(1))).collect();
        let sha = scenario.registration().sha256;
        let mut run = RunState::place(meta.run, sha, number, None, hosts, Micros(i64::from(number))).next;
        run.ending = Some(ending);
        run.phase = Phase::Closed { verdict };
        s.create_run(&run, &[], &AuditRow::new(Micros(1), Who::coordinator(), "run")).unwrap();
        for (host, _) in &scenario.hosts {
            let of_host: Vec<_> = records.iter().filter(|r| r.host == *host).cloned().collect();
            let written = Written::all(&of_host).unwrap();
            let stored = s.commit_evidence(meta.run, host, Generation(1), &written, Micros(1)).unwrap();
            assert_eq!(stored.through, of_host.len() as u64);
        }
    }

    /// A coordinator's API over the socket of its home.
    struct Serving {
        client: Client,
        down: tokio::sync::watch::Sender<bool>,
        tasks: [tokio::task::JoinHandle<()>; 2],
    }

    impl Serving {
        async fn start(home: &Home, store: SqliteStore) -> Self {
            let (down, is_down) = tokio::sync::watch::channel(false);
            let store = StoreHandle::start(Box::new(store)).unwrap();
            let (artifacts, times) = (Artifacts::new(home.artifacts()), LeaseTimes::default());
            let (control, driver) =
                Control::start(store, artifacts, Arc::new(SystemClock), times, None, is_down.clone()).await.unwrap();
            let sha = Sha256::of(b"-");
            let enrolment = api::Enrolment { ca: sha, addresses: vec![], agents_port: 1, enrol_port: 2 };
            let pki = Arc::new(crate::pki::Pki::open_or_create(&home.pki(), Micros(1_790_000_000_000_000)).unwrap().0);
            let context = Arc::new(api::Context { control, enrolment, home: String::new(), build: sha, pki });
            let served = api::serve_unix(&home.socket(), api::router(context), is_down).unwrap();
            let home = home.dir().to_owned();
            let client = Client::new(&Global { home, api: None, cert: None, key: None, ca: None, json: false });
            Self { client, down, tasks: [served, driver] }
        }

        async fn end(self) {
            self.down.send_replace(true);
            for task in self.tasks {
                task.await.unwrap();
            }
        }
    }

    /// The runs of a scenario's experiment that `add` puts into a new home's store.
    async fn serving(home: &Home, scenario: &Scenario, add: impl FnOnce(&mut SqliteStore)) -> Serving {
        let mut store = SqliteStore::open(&home.store()).unwrap();
        let audit = AuditRow::new(Micros(1), Who::coordinator(), "register");
        store.add_registration(&scenario.registration(), "spec", false, &audit).unwrap();
        for (host, _) in &scenario.hosts {
            store.add_host(host, "sandbox", crate::store::Ownership::Adopted, &audit).unwrap();
        }
        add(&mut store);
        Serving::start(home, store).await
    }

    /// A store's server that is away for a moment, say: the run goes on, and so does whoever watches it.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_failure_that_passes_ends_no_watch() {
        let dir = tempfile::tempdir().unwrap();
        let (home, scenario) = (Home::new(dir.path()), Scenario::exp028(1));
        let add = |s: &mut SqliteStore| add_run(s, &scenario, 1, Ending::Done, Verdict::Pass);
        let serving = serving(&home, &scenario, add).await;
        let runs: crate::api::views::RunsView = serving.client.get("/runs").await.unwrap();
        let rename = |from: &str, to: &str| {
            let c = rusqlite::Connection::open(home.store()).unwrap();
            c.busy_timeout(Duration::from_secs(60)).unwrap();
            c.execute_batch(&format!("ALTER TABLE {from} RENAME TO {to}")).unwrap();
        };
        rename("run_event", "away");
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let path = format!("/runs/{}/events", runs.runs[0].run);
        let back = async {
            let failed = serving.client.get::<EventsView>(&path).await.unwrap_err();
            assert!(matches!(&failed, CtlError::Refused(f) if f.code == "store"), "{failed:?}");
            rename("away", "run_event");
        };
        let (followed, ()) = tokio::join!(follow(&serving.client, &runs.runs[0], &bar), back);
        assert_eq!(followed.unwrap().verdict, Some(Verdict::Pass));
        serving.end().await;
    }

    /// Between the list and the request a run may close by itself.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_run_that_cannot_be_cancelled_keeps_no_other_from_it() {
        let dir = tempfile::tempdir().unwrap();
        let (home, scenario) = (Home::new(dir.path()), Scenario::exp028(1));
        let open = drums_common::ids::RunId([7; 6]);
        let add = |s: &mut SqliteStore| {
            add_run(s, &scenario, 1, Ending::Done, Verdict::Pass);
            let hosts = scenario.hosts.iter().map(|(h, _)| (h.clone(), Default::default(), Generation(1))).collect();
            let run = RunState::place(open, scenario.registration().sha256, 2, None, hosts, Micros(2)).next;
            s.create_run(&run, &[], &AuditRow::new(Micros(1), Who::coordinator(), "run")).unwrap();
        };
        let serving = serving(&home, &scenario, add).await;
        let runs: crate::api::views::RunsView = serving.client.get("/runs").await.unwrap();
        let ids: Vec<_> = runs.runs.iter().map(|r| r.run).collect();
        assert_eq!((ids.len(), ids[1]), (2, open));
        let (cancelled, failed) = crate::ctl::runs::cancel_each(&serving.client, &ids).await;
        assert_eq!(cancelled.iter().map(|r| r.run).collect::<Vec<_>>(), [open]);
        let [(run, CtlError::Refused(why))] = &failed[..] else { panic!("{failed:?}") };
        assert_eq!((*run, why.code.as_str()), (ids[0], "closed"));
        serving.end().await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_lucky_run_does_not_make_the_experiment_pass() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::new(dir.path());
        let good = Scenario::exp028(1);
        // Slower than the bar of 0.6 over runc allows.
        let mut bad = Scenario::exp028(1);
        bad.medians_ms.insert("drums-cold".parse().unwrap(), 62.0);
        bad.medians_ms.insert("drums-cold-delayed".parse().unwrap(), 77.5);
        let add = |s: &mut SqliteStore| {
            add_run(s, &bad, 1, Ending::Done, Verdict::Fail);
            add_run(s, &good, 2, Ending::Done, Verdict::Pass);
            add_run(s, &good, 3, Ending::Cancelled { by: "test".to_owned() }, Verdict::Cancelled);
        };
        let serving = serving(&home, &good, add).await;
        let client = &serving.client;
        let runs: crate::api::views::RunsView = client.get("/runs").await.unwrap();
        let closing = |number: usize| Closing::of(client, &runs.runs[number - 1]);
        let lucky = closing(2).await.unwrap();
        assert_eq!(lucky.alone, Some(Verdict::Pass));
        assert_eq!(lucky.experiment, closing(1).await.unwrap().experiment, "one experiment, one verdict");
        assert_eq!(lucky.in_words(), "this run alone: pass; experiment: undecided");
        assert_eq!(lucky.exit_code(), 11);
        // A run that was not completed speaks for itself.
        let cancelled = closing(3).await.unwrap();
        assert_eq!((cancelled.exit_code(), cancelled.in_words().as_str()), (15, "this run: cancelled"));

        serving.end().await;
    }
}
