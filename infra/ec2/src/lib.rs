//! Paid hosts on EC2: [`Cloud`](drums_provider::cloud::Cloud) carried out with AWS's SDK.
//!
//! Owns requests, replies and what AWS's codes mean. Decides nothing: each method is one attempt (the SDK's own retries are
//! off), and what follows from its outcome is decided in drums-provider. The only package that names aws-sdk-*.

mod aws;
mod connect;
mod facts;
mod failed;
mod instances;
mod launch;
mod prices;
mod schedules;
mod shown;

use async_trait::async_trait;
use drums_common::{clock::Micros, ids::InstallationId};
use drums_provider::{
    cloud::{
        Account, Canary, Cloud, ImageFacts, ImageSource, Instance, InstanceState, KillSchedule, LaunchOrder, Market,
        Quota, ScheduleName, ScheduleSetup, TypeFacts, UserData, VolumeKind,
    },
    failure::CloudError,
    host::KillId,
    money::{Quoted, UsdMicros},
    token::ClientToken,
    words::{InstanceId, InstanceType, Region, SubnetId, VolumeId, Zone},
};

pub use connect::{Keys, Settings};

/// AWS with one identity, in every region.
#[derive(Debug)]
pub struct Ec2 {
    connect: connect::Connect,
}

impl Ec2 {
    /// Reads credentials and configuration; asks AWS nothing yet.
    pub async fn new(settings: Settings) -> Self {
        Self { connect: connect::Connect::new(settings).await }
    }
}

#[async_trait]
impl Cloud for Ec2 {
    async fn account(&self) -> Result<Account, CloudError> {
        self.who_and_when().await
    }
    async fn regions(&self) -> Result<Vec<Region>, CloudError> {
        self.enabled_regions().await
    }
    async fn type_facts(&self, region: &Region, kind: &InstanceType) -> Result<TypeFacts, CloudError> {
        self.facts_of_type(region, kind).await
    }
    async fn nested_types(&self, region: &Region) -> Result<Vec<InstanceType>, CloudError> {
        self.types_with_nested(region).await
    }
    async fn image(&self, region: &Region, source: &ImageSource) -> Result<ImageFacts, CloudError> {
        self.facts_of_image(region, source).await
    }
    async fn subnet(&self, region: &Region, subnet: &SubnetId) -> Result<Zone, CloudError> {
        self.zone_of_subnet(region, subnet).await
    }
    async fn hour_price(&self, region: &Region, kind: &InstanceType) -> Result<Quoted<UsdMicros>, CloudError> {
        self.price_of_hour(region, kind).await
    }
    async fn volume_price(&self, region: &Region, kind: VolumeKind) -> Result<Quoted<UsdMicros>, CloudError> {
        self.price_of_volume(region, kind).await
    }
    async fn vcpus(&self, region: &Region, kind: &InstanceType, market: Market) -> Result<Quoted<Quota>, CloudError> {
        self.quota_of_vcpus(region, kind, market).await
    }
    async fn run(&self, order: &LaunchOrder, user_data: &UserData) -> Result<Instance, CloudError> {
        self.launch(order, user_data).await
    }
    async fn would_run(&self, order: &LaunchOrder) -> Result<(), CloudError> {
        self.launch_dry(order).await
    }
    async fn by_token(&self, region: &Region, token: &ClientToken) -> Result<Vec<Instance>, CloudError> {
        self.under_token(region, &token.to_string()).await
    }
    async fn inspect(&self, region: &Region, id: &InstanceId) -> Result<Instance, CloudError> {
        self.look_at(region, id).await
    }
    async fn owned(&self, region: &Region, installation: InstallationId) -> Result<Vec<Instance>, CloudError> {
        self.all_owned(region, installation).await
    }
    async fn terminate(&self, kill: &KillId) -> Result<InstanceState, CloudError> {
        self.end(kill).await
    }
    async fn would_terminate(&self, region: &Region, id: &InstanceId) -> Result<(), CloudError> {
        self.end_dry(region, id).await
    }
    async fn unprotect(&self, kill: &KillId) -> Result<(), CloudError> {
        self.open_to_end(kill).await
    }
    async fn end_on_shutdown(&self, kill: &KillId) -> Result<(), CloudError> {
        self.terminate_on_shutdown(kill).await
    }
    async fn volumes(&self, region: &Region, token: &ClientToken) -> Result<Vec<VolumeId>, CloudError> {
        self.volumes_of(region, token).await
    }
    async fn put_schedule(&self, schedule: &KillSchedule) -> Result<(), CloudError> {
        self.make_schedule(schedule).await
    }
    async fn schedule(
        &self,
        region: &Region,
        name: &ScheduleName,
        setup: &ScheduleSetup,
    ) -> Result<Option<KillSchedule>, CloudError> {
        self.read_schedule(region, name, setup).await
    }
    async fn delete_schedule(
        &self,
        region: &Region,
        name: &ScheduleName,
        setup: &ScheduleSetup,
    ) -> Result<(), CloudError> {
        self.remove_schedule(region, name.as_str(), &setup.group).await
    }
    async fn prove_schedules(&self, region: &Region, setup: &ScheduleSetup) -> Result<String, CloudError> {
        self.try_schedules(region, setup).await
    }
    async fn note_sweep(&self, canary: &Canary, at: Micros) -> Result<(), CloudError> {
        self.tag_swept(canary, at).await
    }
}
