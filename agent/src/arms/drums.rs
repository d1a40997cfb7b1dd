//! The drums arms: namespaces, overlay and limits; restored ones by CRIU. Filled in next.
