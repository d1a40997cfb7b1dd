//! Calls of cargo from inside tests and tasks.

use std::process::Command;

/// Takes out of a command's environment what cargo and its test runners tell a program about the package that it belongs
/// to: to the build scripts of another cargo it would look like a change, and half of the workspace would be built again.
pub fn outside(command: &mut Command) -> &mut Command {
    const OF_ONE_PACKAGE: [&str; 7] =
        ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_", "NEXTEST", "LD_LIBRARY_PATH"];
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if OF_ONE_PACKAGE.iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
    command
}
