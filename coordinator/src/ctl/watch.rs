//! Watching a run: a progress bar on a terminal, lines elsewhere.

use std::{io::IsTerminal as _, process::ExitCode, time::Duration};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{Client, CtlError, Global, output};
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
        eprintln!(
            "detached: {} goes on; drumsctl run {} --attach picks it up, drumsctl cancel {} stops it",
            view.run, view.experiment, view.run
        );
        return Ok(ExitCode::from(DETACHED));
    };
    if global.json {
        output::json(&run)?;
    } else {
        println!("{}: {}", run.run, run.verdict.map_or("open", |v| v.as_str()));
        if let Some(ending) = &run.ending {
            println!("ending    {ending}");
        }
        let teardown = match (run.leaked.is_empty(), run.unreported.is_empty()) {
            (true, true) => "clean".to_owned(),
            (false, _) => format!("leaked {}", run.leaked.join(", ")),
            (true, false) => {
                let hosts: Vec<_> = run.unreported.iter().map(|h| h.as_str()).collect();
                format!("not reported by {}", hosts.join(", "))
            }
        };
        println!("teardown  {teardown}");
        println!("results   drumsctl results {}", run.experiment);
    }
    Ok(ExitCode::from(run.verdict.map_or(1, |v| v.exit_code())))
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
            Err(e @ CtlError::Unreachable { .. }) => {
                // The run does not depend on us, and a coordinator that restarts goes on with it.
                let since = *unheard.get_or_insert_with(tokio::time::Instant::now);
                if since.elapsed() > PATIENCE {
                    return Err(e);
                }
                bar.set_message("the coordinator cannot be reached; waiting for it");
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            }
            Err(e) => return Err(e),
        };
        unheard = None;
        for e in &page.events {
            after = e.number;
            let who = e.host.as_ref().map_or_else(|| "run".to_owned(), ToString::to_string);
            let line = format!("{}  {who:<10} {}", output::time(&e.at), e.text);
            if bar.is_hidden() {
                eprintln!("{line}");
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
    format!("{} {}  {}", run.run, run.phase, hosts.join("  |  "))
}
