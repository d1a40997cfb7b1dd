//! What must be known before a launch: account, regions, types, images, subnets, quotas.

use std::sync::{Arc, Mutex};

use aws_sdk_ec2::types::{
    self, ArchitectureType, InstanceType as Type, LocationType, SupportedAdditionalProcessorFeature,
};
use aws_sdk_sts::config::{
    ConfigBag, Intercept, RuntimeComponents, interceptors::BeforeDeserializationInterceptorContextRef,
};
use drums_common::clock::Micros;
use drums_provider::{
    cloud::{Account, ImageFacts, ImageSource, Market, Quota, TypeFacts},
    failure::{CloudError, FailureKind},
    money::{Quoted, Source},
    words::{ImageId, InstanceType, Region, SubnetId, Zone},
};

use crate::{
    Ec2, aws,
    failed::{aws_time, failed, unreadable},
};

/// Families that share the quota of standard instances. Others (graphics, memory in terabytes, ...) have quotas of their
/// own, which no host of ours needs.
const STANDARD: &str = "acdhimrtz";
const STANDARD_ON_DEMAND: &str = "L-1216C47A";
const STANDARD_SPOT: &str = "L-34B43A08";

/// Keeps the `Date` of a reply.
#[derive(Clone, Debug, Default)]
struct DateOfReply(Arc<Mutex<Option<String>>>);

impl Intercept for DateOfReply {
    fn name(&self) -> &'static str {
        "DateOfReply"
    }
    fn read_before_deserialization(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), aws_sdk_sts::error::BoxError> {
        let date = context.response().headers().get("date").map(str::to_owned);
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = date;
        Ok(())
    }
}

impl Ec2 {
    pub(crate) async fn who_and_when(&self) -> Result<Account, CloudError> {
        let call = "GetCallerIdentity";
        let date = DateOfReply::default();
        let reply = self.connect.sts().get_caller_identity().customize().interceptor(date.clone()).send().await;
        let reply = reply.map_err(|e| failed(call, e))?;
        let date = date.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        let clock = date.as_deref().and_then(aws_time).and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
        let clock = clock.and_then(|t| i64::try_from(t.as_micros()).ok());
        Ok(Account {
            account: aws::given(call, "account", reply.account())?.to_owned(),
            arn: aws::given(call, "ARN", reply.arn())?.to_owned(),
            clock: Micros(clock.ok_or_else(|| unreadable(call, format!("its date is {date:?}")))?),
        })
    }

    pub(crate) async fn enabled_regions(&self) -> Result<Vec<Region>, CloudError> {
        let call = "DescribeRegions";
        let client = self.connect.ec2(&self.connect.home);
        let reply = client.describe_regions().all_regions(false).send().await.map_err(|e| failed(call, e))?;
        reply.regions().iter().filter_map(types::Region::region_name).map(|name| aws::named(call, name)).collect()
    }

    pub(crate) async fn facts_of_type(&self, region: &Region, kind: &InstanceType) -> Result<TypeFacts, CloudError> {
        let call = "DescribeInstanceTypes";
        let client = self.connect.ec2(region);
        let reply = client.describe_instance_types().instance_types(Type::from(kind.as_str())).send().await;
        let reply = reply.map_err(|e| failed(call, e))?;
        let absent = || CloudError::new(FailureKind::Unsupported, call, format!("{region} has no {kind}"));
        let seen = reply.instance_types().first().ok_or_else(absent)?;
        let zones = self.zones_of_type(region, kind).await?;
        if zones.is_empty() {
            return Err(absent());
        }
        let processor = aws::given(call, "processor", seen.processor_info())?;
        let cpus = seen.v_cpu_info().and_then(types::VCpuInfo::default_v_cpus).and_then(|n| u32::try_from(n).ok());
        let memory = seen.memory_info().and_then(types::MemoryInfo::size_in_mib).and_then(|n| u64::try_from(n).ok());
        Ok(TypeFacts {
            kind: kind.clone(),
            vcpus: *aws::given(call, "number of virtual CPUs", cpus.as_ref())?,
            memory_mib: *aws::given(call, "memory", memory.as_ref())?,
            architectures: processor
                .supported_architectures()
                .iter()
                .map(ArchitectureType::as_str)
                .map(str::to_owned)
                .collect(),
            nested_virtualisation: processor
                .supported_features()
                .contains(&SupportedAdditionalProcessorFeature::NestedVirtualization),
            bare_metal: *aws::given(call, "word on bare metal", seen.bare_metal().as_ref())?,
            burstable: *aws::given(
                call,
                "word on burstable performance",
                seen.burstable_performance_supported().as_ref(),
            )?,
            zones,
        })
    }

    async fn zones_of_type(&self, region: &Region, kind: &InstanceType) -> Result<Vec<Zone>, CloudError> {
        let call = "DescribeInstanceTypeOfferings";
        let request = self.connect.ec2(region).describe_instance_type_offerings();
        let request = request.location_type(LocationType::AvailabilityZone);
        let mut pages = request.filters(aws::filter("instance-type", kind.as_str())).into_paginator().send();
        let mut zones = Vec::new();
        while let Some(page) = pages.next().await {
            for offer in page.map_err(|e| failed(call, e))?.instance_type_offerings() {
                zones.push(aws::named(call, aws::given(call, "location", offer.location())?)?);
            }
        }
        zones.sort();
        Ok(zones)
    }

    pub(crate) async fn types_with_nested(&self, region: &Region) -> Result<Vec<InstanceType>, CloudError> {
        let call = "DescribeInstanceTypes";
        let filter = aws::filter("processor-info.supported-features", "nested-virtualization");
        let mut pages = self.connect.ec2(region).describe_instance_types().filters(filter).into_paginator().send();
        let mut found = Vec::new();
        while let Some(page) = pages.next().await {
            for seen in page.map_err(|e| failed(call, e))?.instance_types() {
                found.push(aws::named(call, aws::given(call, "type", seen.instance_type())?.as_str())?);
            }
        }
        found.sort();
        Ok(found)
    }

    pub(crate) async fn facts_of_image(&self, region: &Region, source: &ImageSource) -> Result<ImageFacts, CloudError> {
        let id: ImageId = match source {
            ImageSource::Id(id) => id.clone(),
            ImageSource::Parameter(name) => {
                let call = "GetParameter";
                let reply = self.connect.ssm(region).get_parameter().name(name).send().await;
                let reply = reply.map_err(|e| failed(call, e))?;
                let value = reply.parameter().and_then(|p| p.value());
                aws::named(call, aws::given(call, "value", value)?)?
            }
        };
        let call = "DescribeImages";
        let reply = self.connect.ec2(region).describe_images().image_ids(id.as_str()).send().await;
        let reply = reply.map_err(|e| failed(call, e))?;
        let seen = reply.images().first().ok_or_else(|| {
            CloudError::new(FailureKind::Invalid, call, format!("there is no image {id} in {region}"))
        })?;
        let device = aws::given(call, "root device", seen.root_device_name())?;
        let root = seen.block_device_mappings().iter().find(|m| m.device_name() == Some(device)).and_then(|m| m.ebs());
        let gib = root.and_then(types::EbsBlockDevice::volume_size).and_then(|n| u32::try_from(n).ok());
        Ok(ImageFacts {
            name: seen.name().unwrap_or_default().to_owned(),
            architecture: aws::given(call, "architecture", seen.architecture())?.as_str().to_owned(),
            state: aws::given(call, "state", seen.state())?.as_str().to_owned(),
            root_device: device.to_owned(),
            root_gib: *aws::given(call, "size of its root volume", gib.as_ref())?,
            id,
        })
    }

    pub(crate) async fn zone_of_subnet(&self, region: &Region, subnet: &SubnetId) -> Result<Zone, CloudError> {
        let call = "DescribeSubnets";
        let reply = self.connect.ec2(region).describe_subnets().subnet_ids(subnet.as_str()).send().await;
        let reply = reply.map_err(|e| failed(call, e))?;
        let zone = reply.subnets().first().and_then(types::Subnet::availability_zone);
        aws::named(call, aws::given(call, "availability zone", zone)?)
    }

    pub(crate) async fn quota_of_vcpus(
        &self,
        region: &Region,
        kind: &InstanceType,
        market: Market,
    ) -> Result<Quoted<Quota>, CloudError> {
        let call = "GetServiceQuota";
        if !is_standard(kind.as_str()) {
            let text = format!("{kind} has a quota of its own, which is not known here; standard families only");
            return Err(CloudError::new(FailureKind::Unsupported, call, text));
        }
        let code = match market {
            Market::OnDemand => STANDARD_ON_DEMAND,
            Market::Spot => STANDARD_SPOT,
        };
        let reply = self.connect.quotas(region).get_service_quota().service_code("ec2").quota_code(code).send().await;
        let reply = reply.map_err(|e| failed(call, e))?;
        let limit = reply.quota().and_then(|q| q.value()).filter(|v| v.is_finite() && *v >= 0.0);
        let limit = *aws::given(call, "value", limit.as_ref())?;
        let used = self.vcpus_in_use(region, market).await?;
        // Limits are whole numbers far below 2^32; what is above counts as that.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let limit = limit.floor() as u32;
        let source = Source::Api(format!("service quota {code} in {region}"));
        let as_of = Micros(jiff::Timestamp::now().as_microsecond());
        Ok(Quoted { value: Quota { limit, used }, source, as_of })
    }

    /// Of everything in the account that counts against the quota, ours or not.
    async fn vcpus_in_use(&self, region: &Region, market: Market) -> Result<u32, CloudError> {
        let call = "DescribeInstances";
        let states = types::Filter::builder().name("instance-state-name").values("pending").values("running").build();
        let mut pages = self.connect.ec2(region).describe_instances().filters(states).into_paginator().send();
        let mut used = 0u32;
        while let Some(page) = pages.next().await {
            let page = page.map_err(|e| failed(call, e))?;
            for seen in page.reservations().iter().flat_map(types::Reservation::instances) {
                let spot = seen.instance_lifecycle() == Some(&types::InstanceLifecycleType::Spot);
                let standard = seen.instance_type().is_some_and(|t| is_standard(t.as_str()));
                if spot != (market == Market::Spot) || !standard {
                    continue;
                }
                let options = seen.cpu_options();
                let cores = options.and_then(types::CpuOptions::core_count).and_then(|n| u32::try_from(n).ok());
                let threads = options.and_then(types::CpuOptions::threads_per_core).and_then(|n| u32::try_from(n).ok());
                // Each has at least one.
                used = used.saturating_add(cores.unwrap_or(1).saturating_mul(threads.unwrap_or(1)));
            }
        }
        Ok(used)
    }
}

/// The family's letters are before its generation's number: `c` of c8i, `inf` of inf2.
fn is_standard(kind: &str) -> bool {
    let letters: String = kind.chars().take_while(char::is_ascii_alphabetic).collect();
    letters.len() == 1 && STANDARD.contains(&letters)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_with_quotas_of_their_own_are_told_apart() {
        for kind in ["c8i.large", "m7i.metal-24xl", "t4g.nano", "r8i.xlarge"] {
            assert!(is_standard(kind), "{kind}");
        }
        for kind in ["inf2.xlarge", "p5.48xlarge", "g6.xlarge", "trn1.2xlarge", "mac2.metal", "hpc7a.12xlarge"] {
            assert!(!is_standard(kind), "{kind}");
        }
    }
}
