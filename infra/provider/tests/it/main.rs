//! What the pieces do together.

mod ownership;
