//! The one integration binary. Modules named `live_*` make real sessions, alone on the machine.

mod cli;
mod disk;
mod docs;
mod live_arms;
mod live_bucket;
mod live_chaos;
mod live_engine;
mod live_fleet;
mod live_measure;
mod live_runbooks;
mod live_scale;
mod live_secrets;
mod live_upgrade;
mod live_windows;
mod metadata;
mod net;
mod s3;
