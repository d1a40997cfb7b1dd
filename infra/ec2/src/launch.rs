//! `RunInstances`: everything that a host is, in one call.

use aws_sdk_ec2::{
    Client,
    error::ProvideErrorMetadata,
    operation::run_instances::builders::RunInstancesFluentBuilder,
    types::{
        BlockDeviceMapping, CpuOptionsRequest, EbsBlockDevice, HttpTokensState, IamInstanceProfileSpecification,
        InstanceInterruptionBehavior, InstanceMarketOptionsRequest, InstanceMetadataEndpointState,
        InstanceMetadataOptionsRequest, InstanceNetworkInterfaceSpecification, InstanceType, MarketType,
        NestedVirtualizationSpecification, ResourceType, ShutdownBehavior, SpotInstanceType, SpotMarketOptions, Tag,
        TagSpecification, VolumeType,
    },
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use drums_provider::{
    cloud::{Instance, LaunchOrder, Market, UserData, VolumeKind},
    failure::CloudError,
};

use crate::{
    Ec2, aws,
    failed::{failed, unreadable},
};

pub(crate) const CALL: &str = "RunInstances";

/// The code that a dry run which would have succeeded ends with.
pub(crate) const DRY_RUN_PASSED: &str = "DryRunOperation";

impl Ec2 {
    pub(crate) async fn launch(&self, order: &LaunchOrder, user_data: &UserData) -> Result<Instance, CloudError> {
        let region = &order.recipe.region;
        let request = request(&self.connect.ec2(region), order).user_data(encoded(user_data));
        let reply = request.send().await.map_err(|e| failed(CALL, e))?;
        match reply.instances() {
            [one] => aws::instance(CALL, region, one),
            several => Err(unreadable(CALL, format!("one instance was ordered and {} came", several.len()))),
        }
    }

    pub(crate) async fn launch_dry(&self, order: &LaunchOrder) -> Result<(), CloudError> {
        match request(&self.connect.ec2(&order.recipe.region), order).dry_run(true).send().await {
            Err(e) if e.code() == Some(DRY_RUN_PASSED) => Ok(()),
            Err(e) => Err(failed(CALL, e)),
            Ok(_) => Err(unreadable(CALL, "a dry run was answered as if it had been carried out")),
        }
    }
}

/// As EC2 takes them.
pub(crate) fn encoded(user_data: &UserData) -> String {
    BASE64_STANDARD.encode(&user_data.0)
}

/// The same order makes the same request to the letter, or EC2 would refuse the token.
pub(crate) fn request(client: &Client, order: &LaunchOrder) -> RunInstancesFluentBuilder {
    let recipe = &order.recipe;
    let request = client
        .run_instances()
        .client_token(order.token().to_string())
        .min_count(1)
        .max_count(1)
        .image_id(recipe.image.as_str())
        .instance_type(InstanceType::from(recipe.kind.as_str()))
        .network_interfaces(
            // Without an address from outside, whatever the subnet gives by itself.
            InstanceNetworkInterfaceSpecification::builder()
                .device_index(0)
                .subnet_id(order.placement.subnet.as_str())
                .set_groups(Some(recipe.security_groups.iter().map(|g| g.as_str().to_owned()).collect()))
                .associate_public_ip_address(false)
                .ipv6_address_count(0)
                .delete_on_termination(true)
                .build(),
        )
        .instance_initiated_shutdown_behavior(ShutdownBehavior::Terminate)
        .disable_api_termination(false)
        .disable_api_stop(false)
        .iam_instance_profile(IamInstanceProfileSpecification::builder().name(recipe.profile.as_str()).build())
        .metadata_options(
            // One hop: the host itself, none of the sessions in it.
            InstanceMetadataOptionsRequest::builder()
                .http_endpoint(InstanceMetadataEndpointState::Enabled)
                .http_tokens(HttpTokensState::Required)
                .http_put_response_hop_limit(1)
                .build(),
        )
        .block_device_mappings(
            BlockDeviceMapping::builder()
                .device_name(&recipe.root_device)
                .ebs(
                    EbsBlockDevice::builder()
                        .volume_type(volume_type(recipe.volume))
                        .volume_size(i32::try_from(recipe.volume_gib).unwrap_or(i32::MAX))
                        .delete_on_termination(true)
                        .build(),
                )
                .build(),
        );
    let request = [ResourceType::Instance, ResourceType::Volume].into_iter().fold(request, |request, what| {
        let tags = order.tags().into_iter().map(|(key, value)| Tag::builder().key(key).value(value).build());
        request
            .tag_specifications(TagSpecification::builder().resource_type(what).set_tags(Some(tags.collect())).build())
    });
    let request = if recipe.nested {
        let nested = NestedVirtualizationSpecification::Enabled;
        request.cpu_options(CpuOptionsRequest::builder().nested_virtualization(nested).build())
    } else {
        request
    };
    match recipe.market {
        Market::OnDemand => request,
        Market::Spot => request.instance_market_options(
            InstanceMarketOptionsRequest::builder()
                .market_type(MarketType::Spot)
                .spot_options(
                    SpotMarketOptions::builder()
                        .spot_instance_type(SpotInstanceType::OneTime)
                        .instance_interruption_behavior(InstanceInterruptionBehavior::Terminate)
                        .build(),
                )
                .build(),
        ),
    }
}

fn volume_type(kind: VolumeKind) -> VolumeType {
    match kind {
        VolumeKind::Gp3 => VolumeType::Gp3,
    }
}
