//! Rules about what the project depends on, over `cargo metadata`; no network.

use std::collections::BTreeSet;

use cargo_metadata::{Metadata, Package, PackageId};

/// Licences that dependencies may have; the same list stands in deny.toml.
const LICENCES: [&str; 14] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "MIT-0",
    "MPL-2.0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Crates that do cryptography for TLS; exactly one of them, ring, may be linked.
const PROVIDERS: [&str; 7] =
    ["aws-lc-rs", "aws-lc-sys", "boring-sys", "graviola", "openssl-sys", "ring", "rustls-rustcrypto"];

/// True if one of the alternatives of an SPDX expression is allowed in full.
fn allowed(expression: &str) -> bool {
    let expression = expression.replace('/', " OR ");
    // No dependency's expression nests deeper than "(A OR B) AND C"; one that does is refused and looked at by a person.
    expression.split(" AND ").all(|part| {
        let part = part.trim().trim_start_matches('(').trim_end_matches(')');
        part.split(" OR ").any(|licence| LICENCES.contains(&licence.trim()))
    })
}

/// Packages that are resolved for this platform; `packages` also lists those that no feature selects.
fn resolved(metadata: &Metadata) -> Vec<&Package> {
    let resolve = metadata.resolve.as_ref().expect("metadata was asked for with its dependencies");
    let ids: BTreeSet<&PackageId> = resolve.nodes.iter().map(|n| &n.id).collect();
    metadata.packages.iter().filter(|p| ids.contains(&p.id)).collect()
}

#[test]
fn every_dependency_has_an_allowed_licence() {
    let metadata = drums_tests::metadata().unwrap();
    let mut refused = Vec::new();
    for package in resolved(&metadata) {
        match &package.license {
            Some(licence) if allowed(licence) => {}
            licence => refused.push(format!("{} {}: {licence:?}", package.name, package.version)),
        }
    }
    assert!(refused.is_empty(), "not on the list of licences: {refused:#?}");
}

#[test]
fn the_licence_list_is_the_one_of_deny_toml() {
    let text = std::fs::read_to_string(drums_tests::root().join("deny.toml")).unwrap();
    let list = text.split("allow = [").nth(1).and_then(|s| s.split(']').next()).unwrap();
    let theirs: Vec<&str> = list.split('"').skip(1).step_by(2).collect();
    assert_eq!(theirs, LICENCES);
}

#[test]
fn expressions_are_read_as_spdx_means_them() {
    assert!(allowed("MIT OR Apache-2.0") && allowed("MIT/GPL-3.0") && allowed("(MIT OR GPL-2.0) AND Unicode-3.0"));
    assert!(!allowed("GPL-3.0") && !allowed("MIT AND GPL-3.0") && !allowed("LGPL-2.1 OR GPL-2.0"));
}

#[test]
fn one_crypto_provider_and_it_is_ring() {
    let metadata = drums_tests::metadata().unwrap();
    let found: BTreeSet<&str> =
        resolved(&metadata).iter().map(|p| p.name.as_str()).filter(|n| PROVIDERS.contains(n)).collect();
    assert_eq!(found, BTreeSet::from(["ring"]));
    let versions = resolved(&metadata).iter().filter(|p| p.name.as_str() == "ring").count();
    assert_eq!(versions, 1, "two versions of ring are two providers");
}

#[test]
fn bincode_is_the_pinned_one() {
    let metadata = drums_tests::metadata().unwrap();
    let versions: Vec<String> =
        resolved(&metadata).iter().filter(|p| p.name.as_str() == "bincode").map(|p| p.version.to_string()).collect();
    assert_eq!(versions, ["2.0.1"]);
    let requirements: BTreeSet<String> = metadata
        .workspace_packages()
        .iter()
        .flat_map(|p| &p.dependencies)
        .filter(|d| d.name == "bincode")
        .map(|d| d.req.to_string())
        .collect();
    assert_eq!(requirements, BTreeSet::from(["=2.0.1".to_owned()]));
}

#[test]
fn dependencies_come_from_the_registry_or_the_workspace() {
    let metadata = drums_tests::metadata().unwrap();
    let foreign: Vec<&str> = resolved(&metadata)
        .iter()
        .filter(|p| p.source.as_ref().is_some_and(|s| !s.repr.starts_with("registry+")))
        .map(|p| p.name.as_str())
        .collect();
    assert!(foreign.is_empty(), "from git or elsewhere: {foreign:?}");
}

/// It takes minutes and gigabytes to compile.
#[test]
fn only_drums_ec2_reaches_the_aws_sdk_and_what_is_built_by_default_leaves_it_out() {
    let metadata = drums_tests::metadata().unwrap();
    let ec2 = metadata.packages.iter().find(|p| p.name.as_str() == "drums-ec2").unwrap();
    let named: Vec<&str> = metadata
        .workspace_packages()
        .iter()
        .filter(|p| p.dependencies.iter().any(|d| d.name.starts_with("aws-")))
        .map(|p| p.name.as_str())
        .collect();
    assert_eq!(named, ["drums-ec2"], "who names AWS's crates");

    let by_default: BTreeSet<&PackageId> = metadata.workspace_default_members.iter().collect();
    let others: BTreeSet<&PackageId> = metadata.workspace_members.iter().filter(|id| **id != ec2.id).collect();
    assert_eq!(by_default, others, "default-members lists all packages but drums-ec2");

    let nodes = &metadata.resolve.as_ref().unwrap().nodes;
    let mut reached = by_default;
    let mut todo: Vec<&PackageId> = reached.iter().copied().collect();
    while let Some(id) = todo.pop() {
        let node = nodes.iter().find(|n| n.id == *id).unwrap();
        todo.extend(node.dependencies.iter().filter(|d| reached.insert(d)));
    }
    assert!(!reached.contains(&ec2.id), "a package reaches drums-ec2 without a feature being asked for");
}
