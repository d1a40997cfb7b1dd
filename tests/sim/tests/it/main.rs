//! Simulated hours, rows of field faults, and the model: one binary.

mod hours;
mod model;
mod rows;
