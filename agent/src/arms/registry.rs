//! Which arms there are.

use drums_common::arm::ArmKind;

use super::Arm;

/// Every arm that this agent can plan.
pub fn all() -> Vec<Box<dyn Arm>> {
    Vec::new()
}

pub fn find(arms: &[Box<dyn Arm>], kind: ArmKind) -> Option<&dyn Arm> {
    arms.iter().find(|a| a.kind() == kind).map(|b| &**b)
}
