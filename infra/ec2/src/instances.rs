//! What there is, and how it ends.

use std::collections::BTreeMap;

use aws_sdk_ec2::{
    error::ProvideErrorMetadata,
    types::{AttributeBooleanValue, AttributeValue, Filter, InstanceAttributeName, Tag},
};
use drums_common::{clock::Micros, ids::InstallationId};
use drums_provider::{
    cloud::{Attributes, Canary, Instance, InstanceState},
    failure::{CloudError, FailureKind},
    host::KillId,
    tags,
    token::ClientToken,
    words::{InstanceId, Region, VolumeId, instant_text},
};

use crate::{
    Ec2, aws,
    failed::{failed, unreadable},
    launch::DRY_RUN_PASSED,
};

const DESCRIBE: &str = "DescribeInstances";
const TERMINATE: &str = "TerminateInstances";

impl Ec2 {
    /// All pages, or an error.
    async fn instances(&self, region: &Region, filter: Filter) -> Result<Vec<Instance>, CloudError> {
        let mut pages = self.connect.ec2(region).describe_instances().filters(filter).into_paginator().send();
        let mut found = Vec::new();
        while let Some(page) = pages.next().await {
            let page = page.map_err(|e| failed(DESCRIBE, e))?;
            for seen in page.reservations().iter().flat_map(|r| r.instances()) {
                found.push(aws::instance(DESCRIBE, region, seen)?);
            }
        }
        Ok(found)
    }

    pub(crate) async fn under_token(&self, region: &Region, token: &str) -> Result<Vec<Instance>, CloudError> {
        self.instances(region, aws::filter("client-token", token)).await
    }

    /// By tag and by token: who takes the tags away hides nothing.
    pub(crate) async fn all_owned(
        &self,
        region: &Region,
        installation: InstallationId,
    ) -> Result<Vec<Instance>, CloudError> {
        let tagged = self.instances(region, aws::filter("tag-key", tags::INSTALLATION)).await?;
        let launched = self.under_token(region, &ClientToken::filter(installation)).await?;
        let each_once: BTreeMap<_, _> = tagged.into_iter().chain(launched).map(|i| (i.id.clone(), i)).collect();
        Ok(each_once.into_values().collect())
    }

    pub(crate) async fn look_at(&self, region: &Region, id: &InstanceId) -> Result<Instance, CloudError> {
        let client = self.connect.ec2(region);
        let reply =
            client.describe_instances().instance_ids(id.as_str()).send().await.map_err(|e| failed(DESCRIBE, e))?;
        let seen = reply.reservations().iter().flat_map(|r| r.instances()).next().ok_or_else(|| {
            CloudError::new(FailureKind::NotFound, DESCRIBE, format!("{id} in {region} is not shown"))
        })?;
        let mut instance = aws::instance(DESCRIBE, region, seen)?;
        // What was seen is told whatever becomes of the rest: a state that is not told ends no reap, and EC2 need not answer
        // about the attributes of what is gone. Without them a launch is not read back yet, and why is told.
        if !instance.state.is_going() {
            instance.attributes = Some(self.attributes(region, id).await);
        }
        Ok(instance)
    }

    async fn attributes(&self, region: &Region, id: &InstanceId) -> Result<Attributes, CloudError> {
        let (client, call) = (self.connect.ec2(region), "DescribeInstanceAttribute");
        let ask = |name: InstanceAttributeName| {
            client.describe_instance_attribute().instance_id(id.as_str()).attribute(name).send()
        };
        let behaviour =
            ask(InstanceAttributeName::InstanceInitiatedShutdownBehavior).await.map_err(|e| failed(call, e))?;
        let behaviour = behaviour.instance_initiated_shutdown_behavior().and_then(|v| v.value());
        let protected = ask(InstanceAttributeName::DisableApiTermination).await.map_err(|e| failed(call, e))?;
        let protected = protected.disable_api_termination().and_then(AttributeBooleanValue::value);
        let stops = ask(InstanceAttributeName::DisableApiStop).await.map_err(|e| failed(call, e))?;
        let stops = stops.disable_api_stop().and_then(AttributeBooleanValue::value);
        Ok(Attributes {
            terminate_on_shutdown: aws::given(call, "shutdown behaviour", behaviour)? == "terminate",
            protected: *aws::given(call, "termination protection", protected.as_ref())?,
            stop_protected: *aws::given(call, "stop protection", stops.as_ref())?,
        })
    }

    pub(crate) async fn end(&self, kill: &KillId) -> Result<InstanceState, CloudError> {
        let request = self.connect.ec2(kill.region()).terminate_instances().instance_ids(kill.instance().as_str());
        let reply = request.send().await.map_err(|e| failed(TERMINATE, e))?;
        match reply.terminating_instances() {
            [one] => aws::state(TERMINATE, one.current_state()),
            several => Err(unreadable(TERMINATE, format!("one id was named and {} were answered", several.len()))),
        }
    }

    pub(crate) async fn end_dry(&self, region: &Region, id: &InstanceId) -> Result<(), CloudError> {
        match self.connect.ec2(region).terminate_instances().instance_ids(id.as_str()).dry_run(true).send().await {
            Err(e) if e.code() == Some(DRY_RUN_PASSED) => Ok(()),
            Err(e) => Err(failed(TERMINATE, e)),
            Ok(_) => Err(unreadable(TERMINATE, "a dry run was answered as if it had been carried out")),
        }
    }

    /// Two calls, since EC2 changes one attribute in each. Either protection forbids a termination, so each is tried whatever
    /// becomes of the other.
    pub(crate) async fn open_to_end(&self, kill: &KillId) -> Result<(), CloudError> {
        let off = || AttributeBooleanValue::builder().value(false).build();
        let client = self.connect.ec2(kill.region());
        let change = || client.modify_instance_attribute().instance_id(kill.instance().as_str());
        let call = "ModifyInstanceAttribute";
        let terminations = change().disable_api_termination(off()).send().await.map_err(|e| failed(call, e));
        let stops = change().disable_api_stop(off()).send().await.map_err(|e| failed(call, e));
        terminations.map(drop).and(stops.map(drop))
    }

    pub(crate) async fn terminate_on_shutdown(&self, kill: &KillId) -> Result<(), CloudError> {
        let behaviour = AttributeValue::builder().value("terminate").build();
        let change = self.connect.ec2(kill.region()).modify_instance_attribute().instance_id(kill.instance().as_str());
        let changed = change.instance_initiated_shutdown_behavior(behaviour).send().await;
        changed.map(drop).map_err(|e| failed("ModifyInstanceAttribute", e))
    }

    pub(crate) async fn volumes_of(&self, region: &Region, token: &ClientToken) -> Result<Vec<VolumeId>, CloudError> {
        let call = "DescribeVolumes";
        let filter = aws::filter(&format!("tag:{}", tags::TOKEN), token.to_string());
        let mut pages = self.connect.ec2(region).describe_volumes().filters(filter).into_paginator().send();
        let mut found = Vec::new();
        while let Some(page) = pages.next().await {
            for volume in page.map_err(|e| failed(call, e))?.volumes() {
                found.push(aws::named(call, aws::given(call, "volume id", volume.volume_id())?)?);
            }
        }
        Ok(found)
    }

    pub(crate) async fn tag_swept(&self, canary: &Canary, at: Micros) -> Result<(), CloudError> {
        let tag = Tag::builder().key(tags::SWEPT).value(instant_text(at)).build();
        let request = self.connect.ec2(&canary.region).create_tags().resources(canary.instance.as_str()).tags(tag);
        request.send().await.map_err(|e| failed("CreateTags", e))?;
        Ok(())
    }
}
