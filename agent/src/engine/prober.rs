//! The prober of every arm, over `crate::probe`.

use std::time::Duration;

use serde_json::Value;

use super::api::{ProbeError, Prober, ReadyAnswer, Target};
use crate::probe;

/// HTTP from the calling thread and its network namespace.
#[derive(Clone, Copy, Debug, Default)]
pub struct HttpProber;

impl Prober for HttpProber {
    fn ready(
        &self,
        target: &Target,
        nonce: &str,
        deadline_us: u64,
        alive: &mut dyn FnMut() -> bool,
    ) -> Result<ReadyAnswer, ProbeError> {
        probe::wait_ready(target, nonce, deadline_us, alive)
    }
    fn post(
        &self,
        target: &Target,
        path: &str,
        body: &Value,
        timeout: Duration,
        alive: &mut dyn FnMut() -> bool,
    ) -> Result<Value, ProbeError> {
        probe::post_json(target, path, body, timeout, alive)
    }
    fn get(
        &self,
        target: &Target,
        path: &str,
        timeout: Duration,
        alive: &mut dyn FnMut() -> bool,
    ) -> Result<Value, ProbeError> {
        probe::get_json(target, path, timeout, alive)
    }
}
