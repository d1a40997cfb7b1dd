//! Tests of the infrastructure with machines that boot.

mod live_guest;
