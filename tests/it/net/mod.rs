//! Both sides of the network in one process, on loopback.

mod enrol;
mod fake;
mod hostile;
mod instances;
mod link;
mod node;
mod renew;
mod rotate;
mod standby;
mod upload;
mod versions;
