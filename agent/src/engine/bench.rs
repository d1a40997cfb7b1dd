//! What making a process costs.
