//! A minute of every kind of fault, done to real daemons and arms: `cargo xtask chaos --seed 1`, where a failure is
//! repeated.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};

#[test]
fn live_a_minute_of_chaos_breaks_no_promise() -> Result<()> {
    let mut command = Command::new(drums_tests::programs()?.join("xtask"));
    let output =
        command.args(["chaos", "--built", "--seed", "1", "--minutes", "1"]).output().context("cannot start xtask")?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{out}");
    ensure!(output.status.success(), "{}\n{out}\n{err}", output.status);
    Ok(())
}
