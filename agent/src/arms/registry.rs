//! Which arms there are.

use drums_common::arm::ArmKind;

use super::{Arm, drums::Drums, external::External, qemu::Qemu, runc::Runc};

/// Every arm that this agent can plan.
pub fn all() -> Vec<Box<dyn Arm>> {
    vec![
        Box::new(Drums::cold()),
        Box::new(Drums::restored()),
        Box::new(Runc::cold()),
        Box::new(Runc::restored()),
        Box::new(Qemu::cold()),
        Box::new(Qemu::warm()),
        Box::new(External),
    ]
}

pub fn find(arms: &[Box<dyn Arm>], kind: ArmKind) -> Option<&dyn Arm> {
    arms.iter().find(|a| a.kind() == kind).map(|b| &**b)
}
