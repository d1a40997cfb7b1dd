//! The operator's command line; everything is in `drums_coordinator::ctl`.

fn main() -> std::process::ExitCode {
    drums_coordinator::ctl::main()
}
