//! The coordinator's network: the agents' endpoint and the enrolment endpoint.
//!
//! Owns connections, streams, limits on what a peer may send, and who a peer is (by its certificate). Refuses to know
//! runs, blocks and verdicts: parsed messages leave through `ports`.

pub mod ports;
