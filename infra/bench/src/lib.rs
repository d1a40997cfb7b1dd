//! The bench of the control plane: simulated agents (`agents`) against the real coordinator (`home`), floors that have
//! nothing of ours in them (`floor`), and what is measured (`rows`). Knows nothing of arms; what it prints are ratios.

pub mod agents;
pub mod floor;
pub mod home;
pub mod link;
pub mod process;
pub mod results;
pub mod row;
pub mod rows;
