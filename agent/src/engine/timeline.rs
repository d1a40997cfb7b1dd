//! Phases of one operation, as offsets from its intended start.

use drums_common::evidence::Phase;

use super::api::Timed;

pub(super) struct Timeline {
    start_us: u64,
    phases: Vec<Phase>,
}

impl Timeline {
    pub(super) fn start(now_us: u64) -> Self {
        Self { start_us: now_us, phases: Vec::with_capacity(12) }
    }

    pub(super) fn start_us(&self) -> u64 {
        self.start_us
    }

    /// A phase that lasted from `from_us` to `to_us`; it extends the last one if that has the same name.
    pub(super) fn mark(&mut self, name: &str, from_us: u64, to_us: u64) {
        let end_us = to_us.saturating_sub(self.start_us);
        match self.phases.last_mut() {
            Some(last) if last.name == name => last.end_us = end_us,
            _ => self.phases.push(Phase {
                name: name.to_owned(),
                start_us: from_us.saturating_sub(self.start_us),
                end_us,
            }),
        }
    }

    pub(super) fn done(self, done_us: u64) -> Timed {
        Timed { intended_start_us: self.start_us, done_us, phases: self.phases }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_name_are_one_phase() {
        let mut t = Timeline::start(100);
        t.mark("network", 100, 110);
        t.mark("network", 111, 120);
        t.mark("spawn", 120, 150);
        let timed = t.done(160);
        let got: Vec<_> = timed.phases.iter().map(|p| (p.name.as_str(), p.start_us, p.end_us)).collect();
        assert_eq!(got, [("network", 0, 20), ("spawn", 20, 50)]);
        assert!((timed.duration_ms() - 0.06).abs() < 1e-9);
    }
}
