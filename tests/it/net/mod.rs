//! Both sides of the network in one process, on loopback.

mod enrol;
mod fake;
mod hostile;
mod link;
mod renew;
mod standby;
mod upload;
