//! Some seconds of faults, done to real daemons and arms. What takes its time, every kind of fault, is
//! `cargo xtask chaos --seed 1 --minutes 10`; here the path is walked.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};

#[test]
fn live_some_seconds_of_chaos_break_no_promise() -> Result<()> {
    let mut command = Command::new(drums_tests::programs()?.join("xtask"));
    command.args(["chaos", "--seed", "1", "--minutes", "0.1"]).arg("--image").arg(drums_tests::image()?);
    let output = command.output().context("cannot start xtask")?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{out}");
    ensure!(output.status.success(), "{}\n{out}\n{err}", output.status);
    Ok(())
}
