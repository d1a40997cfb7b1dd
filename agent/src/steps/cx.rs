//! What steps of one plan hand to later ones while a session lives. None of it is needed to undo anything.

use std::{
    any::{Any, TypeId},
    collections::{BTreeMap, HashMap},
    fmt,
    os::fd::OwnedFd,
};

use super::Process;
use crate::{probe::Target, sys::Child};

/// The blackboard of one session.
#[derive(Default)]
pub struct Cx {
    /// The session's network namespace, kept alive by this descriptor.
    pub netns: Option<OwnedFd>,
    /// Taps by link name: the descriptor that QEMU gets.
    pub taps: Vec<Tap>,
    /// Processes by role; `session` is pid 1 (or the monitor) whose end means that the session is dead.
    pub children: BTreeMap<String, Child>,
    /// Where the session answers, when only its making tells (an external program's sessions); it goes before the plan's.
    pub target: Option<Target>,
    extra: HashMap<TypeId, Box<dyn Any + Send>>,
}

pub struct Tap {
    pub link: String,
    pub fd: OwnedFd,
}

impl Cx {
    /// Role of the process whose end means that the session is dead.
    pub const SESSION: &'static str = "session";

    pub fn child(&self, role: &str) -> Option<&Child> {
        self.children.get(role)
    }
    pub fn session(&self) -> Option<&Child> {
        self.children.get(Self::SESSION)
    }
    pub fn process(&self, role: &str) -> Option<Process> {
        self.children.get(role).map(|c| c.process)
    }
    /// Keeps something of an arm's own (a QMP connection, say) with the session.
    pub fn put<T: Any + Send>(&mut self, value: T) {
        self.extra.insert(TypeId::of::<T>(), Box::new(value));
    }
    pub fn get<T: Any + Send>(&self) -> Option<&T> {
        self.extra.get(&TypeId::of::<T>()).and_then(|b| b.downcast_ref())
    }
    pub fn get_mut<T: Any + Send>(&mut self) -> Option<&mut T> {
        self.extra.get_mut(&TypeId::of::<T>()).and_then(|b| b.downcast_mut())
    }
    pub fn take<T: Any + Send>(&mut self) -> Option<T> {
        self.extra.remove(&TypeId::of::<T>()).and_then(|b| b.downcast().ok()).map(|b| *b)
    }
}

impl fmt::Debug for Cx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cx").field("netns", &self.netns).field("children", &self.children).finish_non_exhaustive()
    }
}
