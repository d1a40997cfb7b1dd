//! A drawn tenth of the fault windows: the agent, its shim or its tool is killed there for real. The seed is the day's
//! number, so that days cover what one day leaves out; it is printed, and `cargo xtask fault-windows --seed N --draw 0.1`
//! repeats it.

use std::{
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, ensure};

fn a_drawn_tenth(arms: [&str; 2]) -> Result<()> {
    let day = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs() / 86_400;
    let mut command = Command::new(drums_tests::programs()?.join("xtask"));
    command.args(["fault-windows", "--draw", "0.1", "--seed", &day.to_string()]);
    command.arg("--image").arg(drums_tests::image()?);
    for arm in arms {
        command.args(["--arm", arm]);
    }
    let output = command.output().context("cannot start xtask")?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("seed {day}\n{out}");
    ensure!(output.status.success(), "seed {day}: {}\n{out}\n{err}", output.status);
    Ok(())
}

#[test]
fn live_nothing_stays_of_drums_sessions_killed_in_a_fault_window() -> Result<()> {
    a_drawn_tenth(["drums-cold", "drums-restored"])
}

#[test]
fn live_nothing_stays_of_runc_sessions_killed_in_a_fault_window() -> Result<()> {
    a_drawn_tenth(["runc-cold", "runc-restored"])
}

#[test]
fn live_nothing_stays_of_qemu_sessions_killed_in_a_fault_window() -> Result<()> {
    a_drawn_tenth(["qemu-cold", "qemu-warm"])
}
