//! The one integration binary. Modules named `live_*` make real sessions, alone on the machine.

mod docs;
mod metadata;
mod net;
