//! AWS's shapes and ours.

use std::collections::BTreeSet;

use aws_sdk_ec2::{
    primitives::DateTime,
    types::{self, Filter, HttpTokensState, InstanceStateName, NestedVirtualizationSpecification},
};
use drums_common::clock::Micros;
use drums_provider::{
    cloud::{AttachedVolume, Instance, InstanceState},
    failure::CloudError,
    words::Region,
};

use crate::failed::unreadable;

pub(crate) fn filter(name: &str, value: impl Into<String>) -> Filter {
    Filter::builder().name(name).values(value).build()
}

pub(crate) fn micros(at: &DateTime) -> Micros {
    Micros(i64::try_from(at.as_nanos() / 1_000).unwrap_or(i64::MAX))
}

/// An id or a name that AWS gave.
pub(crate) fn named<T: std::str::FromStr>(call: &str, text: &str) -> Result<T, CloudError>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|e| unreadable(call, e))
}

pub(crate) fn given<'a, T: ?Sized>(call: &str, what: &str, value: Option<&'a T>) -> Result<&'a T, CloudError> {
    value.ok_or_else(|| unreadable(call, format!("it has no {what}")))
}

pub(crate) fn state(call: &str, state: Option<&types::InstanceState>) -> Result<InstanceState, CloudError> {
    match state.and_then(types::InstanceState::name) {
        Some(InstanceStateName::Pending) => Ok(InstanceState::Pending),
        Some(InstanceStateName::Running) => Ok(InstanceState::Running),
        Some(InstanceStateName::Stopping) => Ok(InstanceState::Stopping),
        Some(InstanceStateName::Stopped) => Ok(InstanceState::Stopped),
        Some(InstanceStateName::ShuttingDown) => Ok(InstanceState::ShuttingDown),
        Some(InstanceStateName::Terminated) => Ok(InstanceState::Terminated),
        other => Err(unreadable(call, format!("no state of an instance is {other:?}"))),
    }
}

pub(crate) fn instance(call: &str, region: &Region, seen: &types::Instance) -> Result<Instance, CloudError> {
    let optional = |text: Option<&str>| text.filter(|t| !t.is_empty()).map(str::to_owned);
    let volumes = seen.block_device_mappings().iter().filter_map(|m| {
        let ebs = m.ebs()?;
        Some((ebs.volume_id()?, ebs.delete_on_termination().unwrap_or(false)))
    });
    let volumes: Result<_, CloudError> = volumes
        .map(|(id, delete_on_termination)| Ok(AttachedVolume { id: named(call, id)?, delete_on_termination }))
        .collect();
    // Of every interface: each of them lets in what its own groups let in.
    let interfaces = seen.network_interfaces().iter().flat_map(types::InstanceNetworkInterface::groups);
    let groups = seen.security_groups().iter().chain(interfaces).filter_map(types::GroupIdentifier::group_id);
    let groups: BTreeSet<&str> = groups.collect();
    let v6 = seen.network_interfaces().iter().any(|n| !n.ipv6_addresses().is_empty());
    let nested = seen.cpu_options().and_then(types::CpuOptions::nested_virtualization);
    let tags = seen.tags().iter().filter_map(|t| Some((t.key()?.to_owned(), t.value().unwrap_or_default().to_owned())));
    Ok(Instance {
        id: named(call, given(call, "instance id", seen.instance_id())?)?,
        region: region.clone(),
        zone: seen.placement().and_then(types::Placement::availability_zone).map(|z| named(call, z)).transpose()?,
        subnet: optional(seen.subnet_id()).map(|s| named(call, &s)).transpose()?,
        kind: seen.instance_type().map(|t| named(call, t.as_str())).transpose()?,
        image: optional(seen.image_id()).map(|i| named(call, &i)).transpose()?,
        state: state(call, seen.state())?,
        launched: micros(given(call, "launch time", seen.launch_time())?),
        token: optional(seen.client_token()),
        tags: tags.collect(),
        nested: nested.map(|n| *n == NestedVirtualizationSpecification::Enabled),
        imds_v2: seen
            .metadata_options()
            .and_then(types::InstanceMetadataOptionsResponse::http_tokens)
            .map(|t| *t == HttpTokensState::Required),
        public_address: optional(seen.public_ip_address()).is_some() || v6,
        // arn:aws:iam::123456789012:instance-profile/path/name
        profile: seen
            .iam_instance_profile()
            .and_then(types::IamInstanceProfile::arn)
            .and_then(|arn| arn.rsplit('/').next())
            .map(|name| named(call, name))
            .transpose()?,
        security_groups: groups.into_iter().map(|g| named(call, g)).collect::<Result<_, _>>()?,
        volumes: volumes?,
        attributes: None,
    })
}
