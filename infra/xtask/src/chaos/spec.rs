//! The experiments that run meanwhile: small, and with gates so wide that nothing but the faults ends them.

/// Two real arms, a block of some seconds. `hosts` of the fleet take part.
pub fn spec(id: &str, hosts: usize, blocks: u32) -> String {
    format!(
        r#"id = "{id}"
title = "Runs that faults are done to"
hypothesis = "Whatever happens to them, what they say is true."
[workload]
name = "minimal"
[limits]
cpu_milli = 1000
cpuset_size = 1
memory_mib = 256
vmm_memory_overhead_mib = 0
[design]
order = "williams"
blocks_per_host = {blocks}
warmup_blocks = 1
template_builds_per_host = 1
seed = 7
ready_timeout_ms = 20000
margin = 0.25
alpha = 0.05
[run]
max_runs = 100
deadline_minutes = 2
[hosts]
count = {hosts}
[[arm]]
name = "drums-cold"
kind = "drums-cold"
[[arm]]
name = "runc-cold"
kind = "runc-cold"
[[metric]]
metric = "create_to_ready_ms"
endpoint = "E3"
position = "K2"
base_case = "cold as shipped"
primary = true
[[bar]]
name = "the path"
metric = "create_to_ready_ms"
numerator = "drums-cold"
denominator = "runc-cold"
at_most = 1000.0
rule = "bound"
[gates]
max_steal_fraction = 1.0
max_outside_cpu_fraction = 64.0
max_canary_ratio = 100.0
max_clock_step_ms = 1000.0
settle_timeout_ms = 1000
max_void_fraction = 1.0
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_spec() {
        for hosts in [1, 2] {
            drums_common::spec::parse("chaos.toml", spec("EXP-910", hosts, 2).as_bytes()).unwrap();
        }
    }
}
