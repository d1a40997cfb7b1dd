//! The port of `drums_provider` to the simulated AWS, as one of those who call it.

use std::{
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use async_trait::async_trait;
use drums_common::{clock::Micros, ids::InstallationId};
use drums_provider::{
    cloud::{
        Account, Canary, Cloud, ImageFacts, ImageSource, Instance, InstanceState, KillSchedule, LaunchOrder, Market,
        Quota, ScheduleName, ScheduleSetup, TypeFacts, UserData, VolumeKind,
    },
    failure::{CloudError, FailureKind},
    host::KillId,
    money::{Quoted, Source, UsdMicros},
    token::ClientToken,
    words::{InstanceId, InstanceType, Region, SubnetId, VolumeId, Zone, instant_text},
};

use super::aws::{self, Aws, Who};

pub const ACCOUNT: &str = "123456789012";

#[derive(Clone)]
pub struct Client {
    pub aws: Arc<Mutex<Aws>>,
    pub who: Who,
}

/// A future of the simulated AWS, which is ready at once.
pub fn ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => unreachable!("no call of the simulated AWS waits"),
    }
}

impl Client {
    /// One call, if this caller's are answered at all.
    fn called(&self, call: &str) -> Result<MutexGuard<'_, Aws>, CloudError> {
        let aws = self.aws.lock().unwrap_or_else(PoisonError::into_inner);
        if aws.refused.contains(&self.who) {
            let text = "the security token included in the request is invalid";
            return Err(CloudError::new(FailureKind::Expired, call, text));
        }
        Ok(aws)
    }

    fn quoted<T>(&self, call: &str, value: T) -> Result<Quoted<T>, CloudError> {
        let as_of = self.called(call)?.now;
        Ok(Quoted { value, source: Source::Api(call.to_owned()), as_of })
    }
}

fn not_found(call: &str, id: &InstanceId) -> CloudError {
    CloudError::new(FailureKind::NotFound, call, format!("the instance ID '{id}' does not exist"))
}

#[async_trait]
impl Cloud for Client {
    async fn account(&self) -> Result<Account, CloudError> {
        let clock = self.called("GetCallerIdentity")?.now;
        let arn = format!("arn:aws:sts::{ACCOUNT}:assumed-role/drums-{:?}/s", self.who);
        Ok(Account { account: ACCOUNT.to_owned(), arn, clock })
    }
    async fn regions(&self) -> Result<Vec<Region>, CloudError> {
        self.called("DescribeRegions").map(|_| vec![aws::region(), aws::other_region()])
    }
    async fn type_facts(&self, _: &Region, kind: &InstanceType) -> Result<TypeFacts, CloudError> {
        drop(self.called("DescribeInstanceTypes")?);
        Ok(TypeFacts {
            kind: kind.clone(),
            vcpus: 8,
            memory_mib: 16_384,
            architectures: vec!["x86_64".to_owned()],
            nested_virtualisation: true,
            bare_metal: false,
            burstable: false,
            zones: aws::placements().into_iter().map(|p| p.zone).collect(),
        })
    }
    async fn nested_types(&self, _: &Region) -> Result<Vec<InstanceType>, CloudError> {
        self.called("DescribeInstanceTypes").map(|_| Vec::new())
    }
    async fn image(&self, _: &Region, source: &ImageSource) -> Result<ImageFacts, CloudError> {
        drop(self.called("DescribeImages")?);
        let ImageSource::Id(id) = source else {
            return Err(CloudError::new(FailureKind::Invalid, "GetParameter", "there are no parameters"));
        };
        Ok(ImageFacts {
            id: id.clone(),
            name: "debian-12".to_owned(),
            architecture: "x86_64".to_owned(),
            state: "available".to_owned(),
            root_device: "/dev/xvda".to_owned(),
            root_gib: 8,
        })
    }
    async fn subnet(&self, _: &Region, subnet: &SubnetId) -> Result<Zone, CloudError> {
        drop(self.called("DescribeSubnets")?);
        let there = aws::placements().into_iter().find(|p| p.subnet == *subnet);
        let absent = || CloudError::new(FailureKind::Invalid, "DescribeSubnets", format!("there is no {subnet}"));
        there.map(|p| p.zone).ok_or_else(absent)
    }
    async fn hour_price(&self, _: &Region, _: &InstanceType) -> Result<Quoted<UsdMicros>, CloudError> {
        self.quoted("Pricing GetProducts", UsdMicros(400_000))
    }
    async fn volume_price(&self, _: &Region, _: VolumeKind) -> Result<Quoted<UsdMicros>, CloudError> {
        self.quoted("Pricing GetProducts", UsdMicros(95_200))
    }
    async fn vcpus(&self, _: &Region, _: &InstanceType, _: Market) -> Result<Quoted<Quota>, CloudError> {
        self.quoted("GetServiceQuota", Quota { limit: 64, used: 0 })
    }
    async fn run(&self, order: &LaunchOrder, user_data: &UserData) -> Result<Instance, CloudError> {
        Ok(self.called("RunInstances")?.run(order, user_data))
    }
    async fn would_run(&self, _: &LaunchOrder) -> Result<(), CloudError> {
        self.called("RunInstances").map(drop)
    }
    async fn by_token(&self, region: &Region, token: &ClientToken) -> Result<Vec<Instance>, CloudError> {
        let mut shown = self.called("DescribeInstances")?.shown(region);
        shown.retain(|i| i.token == Some(token.to_string()));
        Ok(shown)
    }
    async fn inspect(&self, region: &Region, id: &InstanceId) -> Result<Instance, CloudError> {
        let shown = self.called("DescribeInstances")?.shown(region).into_iter().find(|i| i.id == *id);
        shown.ok_or_else(|| not_found("DescribeInstances", id))
    }
    async fn owned(&self, region: &Region, _: InstallationId) -> Result<Vec<Instance>, CloudError> {
        Ok(self.called("DescribeInstances")?.shown(region))
    }
    async fn terminate(&self, kill: &KillId) -> Result<InstanceState, CloudError> {
        self.called("TerminateInstances")?.terminate(kill, self.who)
    }
    async fn would_terminate(&self, _: &Region, _: &InstanceId) -> Result<(), CloudError> {
        self.called("TerminateInstances").map(drop)
    }
    // No fault of the matrix edits attributes: those are the model's and the tests' of drums-provider.
    async fn unprotect(&self, _: &KillId) -> Result<(), CloudError> {
        self.called("ModifyInstanceAttribute").map(drop)
    }
    async fn end_on_shutdown(&self, _: &KillId) -> Result<(), CloudError> {
        self.called("ModifyInstanceAttribute").map(drop)
    }
    async fn volumes(&self, _: &Region, _: &ClientToken) -> Result<Vec<VolumeId>, CloudError> {
        self.called("DescribeVolumes").map(|_| Vec::new())
    }
    async fn put_schedule(&self, schedule: &KillSchedule) -> Result<(), CloudError> {
        self.called("CreateSchedule")?.put_schedule(schedule);
        Ok(())
    }
    async fn schedule(
        &self,
        _: &Region,
        name: &ScheduleName,
        _: &ScheduleSetup,
    ) -> Result<Option<KillSchedule>, CloudError> {
        Ok(self.called("GetSchedule")?.schedule(name.as_str()).cloned())
    }
    async fn delete_schedule(&self, _: &Region, name: &ScheduleName, _: &ScheduleSetup) -> Result<(), CloudError> {
        self.called("DeleteSchedule")?.delete_schedule(name.as_str());
        Ok(())
    }
    async fn prove_schedules(&self, _: &Region, _: &ScheduleSetup) -> Result<String, CloudError> {
        self.called("CreateSchedule").map(|_| "made, read back, deleted".to_owned())
    }
    async fn note_sweep(&self, canary: &Canary, at: Micros) -> Result<(), CloudError> {
        self.called("CreateTags")?.note_sweep(canary, instant_text(at));
        Ok(())
    }
}
