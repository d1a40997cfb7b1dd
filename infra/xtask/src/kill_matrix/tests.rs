//! The matrix holds, and goes red when a layer is broken.

use std::collections::BTreeSet;

use drums_provider::sweep::Regions;

use super::{
    cell::{Cell, Fault, LAYERS, Layer, Moment, able, bound_s, cells},
    row::Row,
    rows::{self, LIFE_S},
    timer::Scripts,
    trials,
    world::{self, Jitter, Plan, SWEEP_EVERY_S, SWEEP_TAKES_S, Site, Trial},
};

fn bad(rows: &[Row]) -> Vec<String> {
    rows.iter().filter(|r| !r.in_bound).map(Row::name).collect()
}

#[test]
fn every_cell_is_dead_in_its_bound_and_by_each_layer_alone_that_is_to_kill() {
    let rows = rows::rows(&Site::deployed().unwrap(), &cells(), 1, 1).unwrap();
    assert_eq!(bad(&rows), [""; 0]);
    let whole = rows.iter().filter(|r| r.must_kill.is_none()).count();
    assert_eq!(whole, 9 + 28, "each fault, and each pair of the first eight");
    for layer in LAYERS {
        let alone: Vec<_> = rows.iter().filter(|r| r.must_kill == Some(layer)).collect();
        assert!(alone.iter().all(|r| r.killed_by == Some(layer)), "{layer}");
        assert!(alone.iter().all(|r| r.disabled.len() == 4 && !r.disabled.contains(&layer)), "{layer}");
        assert!(alone.len() > 20, "{layer}: {}", alone.len());
    }
}

#[test]
fn a_boot_of_six_minutes_a_silence_of_forty_and_an_outage_kill_no_host_before_its_deadline() {
    let rows = trials::rows(&Site::deployed().unwrap(), 1, 1).unwrap();
    assert_eq!(bad(&rows), [""; 0]);
    assert!(rows.len() > 20 && rows.iter().all(|r| r.killed_after_deadline_s.is_some_and(|s| s >= 0)));
}

/// One plan in which nothing is left but a layer.
fn alone(layer: Layer, strikes: &[(Fault, Moment)]) -> Plan {
    Plan {
        life_s: LIFE_S,
        strikes: strikes.to_vec(),
        trial: Trial::default(),
        left: BTreeSet::from([layer]),
        jitter: Jitter::SLOWEST,
    }
}

#[test]
fn a_layer_that_is_broken_turns_the_matrix_red_and_is_named() {
    type Break = (Layer, fn(&mut Site));
    let breaks: [Break; 5] = [
        (Layer::GuestTimer, |s| s.scripts = Scripts::with(|text| text.replace("poweroff", "halt")).unwrap()),
        (Layer::Watchdog, |s| s.watchdog_enabled = false),
        (Layer::Schedule, |s| s.scheduler_late_s = 3_600),
        (Layer::Sweeper, |s| s.swept = Regions::Only([super::aws::other_region()].into())),
        (Layer::Reaper, |s| s.reaps = false),
    ];
    for (layer, spoil) in breaks {
        let mut site = Site::deployed().unwrap();
        spoil(&mut site);
        let cells = [Fault::AgentDead, Fault::ScheduleRole, Fault::Sweeper].map(|f| Cell { faults: vec![f] });
        let rows = rows::rows(&site, &cells, 1, 0).unwrap();
        let red: Vec<_> = rows.iter().filter(|r| !r.in_bound).collect();
        assert!(!red.is_empty(), "{layer}");
        let named = red.iter().filter(|r| r.must_kill == Some(layer)).count();
        let wanted = rows.iter().filter(|r| r.must_kill == Some(layer)).count();
        assert!(named == wanted && named > 1, "{layer}: {named} of {wanted} rows of it are red");
        assert!(red.iter().all(|r| r.must_kill.is_none_or(|l| l == layer)), "{layer}: {:?}", bad(&rows));
    }
}

#[test]
fn a_backstop_on_heartbeats_a_short_boot_bound_and_silence_that_is_not_declared_turn_it_red() {
    type Break = (&'static str, fn(&mut Site));
    let breaks: [Break; 3] = [
        ("boot of 6 minutes", |s| s.heartbeat_alarm_s = Some(300)),
        ("boot of 6 minutes", |s| s.patience.boot_ms = 4 * 60_000),
        ("silence of 40 minutes", |s| s.silence = false),
    ];
    for (trial, spoil) in breaks {
        let mut site = Site::deployed().unwrap();
        spoil(&mut site);
        let rows = trials::rows(&site, 1, 0).unwrap();
        let red = bad(&rows);
        assert!(red.iter().any(|r| r.starts_with(trial)), "{trial}: {red:?}");
    }
}

/// A host that hung in its own shutdown: the timer did what it could.
#[test]
fn row_06_a_host_that_hangs_while_it_shuts_down_is_ended_from_outside_within_the_bound() {
    let site = Site::deployed().unwrap();
    let hung = [(Fault::KernelHung, Moment::ShuttingDown)];
    assert_eq!(able(&hung), BTreeSet::from([Layer::Schedule, Layer::Sweeper, Layer::Reaper]));
    for layer in [Layer::GuestTimer, Layer::Watchdog] {
        let it = world::run(&alone(layer, &hung), &site).unwrap();
        assert_eq!(it.death, None, "{layer}: it hung, and its machine went off all the same");
        let well = world::run(&alone(layer, &[]), &site).unwrap();
        assert_eq!(well.death.map(|d| d.by), Some(layer), "without the fault");
    }
    for layer in able(&hung) {
        let death = world::run(&alone(layer, &hung), &site).unwrap().death.unwrap();
        let bound = i64::try_from(layer.bound_s()).unwrap();
        assert!(death.by == layer && (0..=bound).contains(&death.after_deadline_s), "{layer}: {death:?}");
    }
}

#[test]
fn a_schedule_whose_role_is_broken_leaves_a_letter_and_one_that_is_missing_none() {
    let site = Site::deployed().unwrap();
    for (fault, letters) in [(Fault::ScheduleRole, 1), (Fault::ScheduleMissing, 0)] {
        let it = world::run(&alone(Layer::Schedule, &[(fault, Moment::Working)]), &site).unwrap();
        assert_eq!((it.death, it.dead_letters), (None, letters), "{fault}");
    }
}

#[test]
fn an_orphan_is_ended_by_its_life_lease_long_before_its_deadline() {
    let site = Site::deployed().unwrap();
    for fault in [Fault::CoordinatorDead, Fault::AgentDead, Fault::AgentFrozen, Fault::NetworkCut] {
        let it = world::run(&alone(Layer::Watchdog, &[(fault, Moment::Working)]), &site).unwrap();
        let death = it.death.unwrap();
        // About 8 minutes after the launch; then the lease, its step and the time to finish.
        let lived_s = i64::try_from(LIFE_S).unwrap() + death.after_deadline_s;
        assert!((43 * 60..46 * 60).contains(&lived_s), "{fault}: {lived_s} s");
    }
}

#[test]
fn one_plan_is_one_life() {
    let plan = Plan {
        left: LAYERS.into(),
        jitter: Jitter::drawn(7),
        ..alone(Layer::Reaper, &[(Fault::AgentDead, Moment::Booting)])
    };
    let outcome = || world::run(&plan, &Site::deployed().unwrap()).unwrap();
    assert_eq!(outcome(), outcome());
    assert!(outcome().instances > 1, "one that never enrols is replaced");
}

#[test]
fn what_only_the_sweeper_can_reach_has_five_minutes_and_nothing_else_has() {
    let only_swept = [(Fault::KernelHung, Moment::Working), (Fault::CredentialsRevoked, Moment::Launched)];
    assert_eq!((able(&only_swept), bound_s(&only_swept)), (BTreeSet::from([Layer::Sweeper]), 300));
    for cell in cells() {
        for strikes in cell.strikes() {
            assert!(!able(&strikes).is_empty(), "{strikes:?} leave nothing");
            assert!(strikes.len() > 1 || bound_s(&strikes) == 120, "{strikes:?}");
        }
    }
}

/// The simulation sweeps as often and takes as long as what is deployed.
#[test]
fn the_sweeper_is_simulated_as_it_is_deployed() {
    let stack = include_str!("../../../cloud/stack.yaml");
    assert!(stack.contains("ScheduleExpression: rate(1 minute)") && SWEEP_EVERY_S == 60);
    assert!(stack.contains(&format!("Timeout: {SWEEP_TAKES_S}")));
}
