//! The cloud in memory behind the port.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard},
};

use async_trait::async_trait;
use drums_common::{clock::Micros, ids::InstallationId};
use drums_provider::{
    cloud::{
        Account, Canary, Cloud, ImageFacts, ImageSource, Instance, InstanceState, KillSchedule, LaunchOrder, Market,
        Quota, ScheduleName, ScheduleSetup, TypeFacts, UserData, VolumeKind,
    },
    failure::{CloudError, FailureKind},
    gates::HostFacts,
    host::KillId,
    money::{Quoted, UsdMicros},
    token::ClientToken,
    words::{InstanceId, InstanceType, Region, SubnetId, VolumeId, Zone},
};

use super::support::{self, World, error};

/// A world, and what an account in it shows.
pub struct Memory {
    world: Mutex<World>,
    /// What is known of the host that [`support::raw_ask`] asks for.
    host: HostFacts,
    pub regions: Vec<Region>,
    /// Calls that fail, by AWS's name.
    pub fails: BTreeMap<&'static str, FailureKind>,
    calls: Mutex<Vec<&'static str>>,
    noted: Mutex<Vec<Canary>>,
}

impl Memory {
    pub fn new(world: World) -> Self {
        let ask = support::raw_ask(support::MINUTE_MS).read().unwrap();
        Self {
            world: Mutex::new(world),
            host: support::facts(&ask).hosts.into_values().next().unwrap(),
            regions: vec![support::region()],
            fails: BTreeMap::new(),
            calls: Mutex::new(Vec::new()),
            noted: Mutex::new(Vec::new()),
        }
    }

    pub fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }
    /// Canaries that were noted on since this was asked last.
    pub fn noted(&self) -> Vec<Canary> {
        std::mem::take(&mut *self.noted.lock().unwrap())
    }
    pub fn count(&self, call: &str) -> usize {
        self.calls.lock().unwrap().iter().filter(|c| **c == call).count()
    }

    fn called(&self, call: &'static str) -> Result<MutexGuard<'_, World>, CloudError> {
        self.calls.lock().unwrap().push(call);
        match self.fails.get(call) {
            Some(kind) => Err(error(*kind, call)),
            None => Ok(self.world()),
        }
    }
}

#[async_trait]
impl Cloud for Memory {
    async fn account(&self) -> Result<Account, CloudError> {
        let clock = self.called("GetCallerIdentity")?.now;
        Ok(Account { account: "123456789012".to_owned(), arn: "arn:aws:iam::123456789012:user/me".to_owned(), clock })
    }
    async fn regions(&self) -> Result<Vec<Region>, CloudError> {
        self.called("DescribeRegions").map(|_| self.regions.clone())
    }
    async fn type_facts(&self, _: &Region, kind: &InstanceType) -> Result<TypeFacts, CloudError> {
        drop(self.called("DescribeInstanceTypes")?);
        self.host.kind.clone().map(|k| TypeFacts { kind: kind.clone(), ..k })
    }
    async fn nested_types(&self, _: &Region) -> Result<Vec<InstanceType>, CloudError> {
        drop(self.called("DescribeInstanceTypes")?);
        self.host.kind.clone().map(|k| vec![k.kind])
    }
    async fn image(&self, _: &Region, _: &ImageSource) -> Result<ImageFacts, CloudError> {
        drop(self.called("DescribeImages")?);
        self.host.image.clone()
    }
    async fn subnet(&self, _: &Region, subnet: &SubnetId) -> Result<Zone, CloudError> {
        drop(self.called("DescribeSubnets")?);
        let there = support::placements().into_iter().find(|p| p.subnet == *subnet);
        there.map(|p| p.zone).ok_or_else(|| error(FailureKind::Invalid, "DescribeSubnets"))
    }
    async fn hour_price(&self, _: &Region, _: &InstanceType) -> Result<Quoted<UsdMicros>, CloudError> {
        drop(self.called("GetProducts of an hour")?);
        self.host.hour.clone()
    }
    async fn volume_price(&self, _: &Region, _: VolumeKind) -> Result<Quoted<UsdMicros>, CloudError> {
        drop(self.called("GetProducts of a volume")?);
        self.host.gib_month.clone()
    }
    async fn vcpus(&self, _: &Region, _: &InstanceType, _: Market) -> Result<Quoted<Quota>, CloudError> {
        drop(self.called("GetServiceQuota")?);
        self.host.quota.clone()
    }
    async fn run(&self, order: &LaunchOrder, user_data: &UserData) -> Result<Instance, CloudError> {
        self.called("RunInstances")?.run(order, user_data)
    }
    async fn would_run(&self, _: &LaunchOrder) -> Result<(), CloudError> {
        self.called("RunInstances").map(drop)
    }
    async fn by_token(&self, _: &Region, token: &ClientToken) -> Result<Vec<Instance>, CloudError> {
        let mut shown = self.called("DescribeInstances")?.shown();
        shown.retain(|i| i.token == Some(token.to_string()));
        Ok(shown)
    }
    async fn inspect(&self, _: &Region, id: &InstanceId) -> Result<Instance, CloudError> {
        let shown = self.called("DescribeInstances")?.shown().into_iter().find(|i| i.id == *id);
        shown.ok_or_else(|| error(FailureKind::NotFound, "DescribeInstances"))
    }
    async fn owned(&self, region: &Region, _: InstallationId) -> Result<Vec<Instance>, CloudError> {
        let world = self.called("DescribeInstances of a region")?;
        Ok(world.instances.iter().filter(|i| i.region == *region).cloned().collect())
    }
    async fn terminate(&self, kill: &KillId) -> Result<InstanceState, CloudError> {
        let id = kill.instance().as_str();
        self.called("TerminateInstances")?.terminate(id).map(|()| InstanceState::ShuttingDown)
    }
    async fn would_terminate(&self, _: &Region, _: &InstanceId) -> Result<(), CloudError> {
        self.called("TerminateInstances").map(drop)
    }
    async fn unprotect(&self, kill: &KillId) -> Result<(), CloudError> {
        self.called("ModifyInstanceAttribute of protection")?.unprotect(kill.instance().as_str());
        Ok(())
    }
    async fn end_on_shutdown(&self, kill: &KillId) -> Result<(), CloudError> {
        let mut world = self.called("ModifyInstanceAttribute of shutdown")?;
        world.attributes(kill.instance().as_str(), |a| a.terminate_on_shutdown = true);
        Ok(())
    }
    async fn volumes(&self, _: &Region, _: &ClientToken) -> Result<Vec<VolumeId>, CloudError> {
        self.called("DescribeVolumes").map(|_| Vec::new())
    }
    async fn put_schedule(&self, schedule: &KillSchedule) -> Result<(), CloudError> {
        self.called("CreateSchedule")?.put_schedule(schedule)
    }
    async fn schedule(
        &self,
        _: &Region,
        name: &ScheduleName,
        _: &ScheduleSetup,
    ) -> Result<Option<KillSchedule>, CloudError> {
        Ok(self.called("GetSchedule")?.schedules.get(name.as_str()).cloned())
    }
    async fn delete_schedule(&self, _: &Region, name: &ScheduleName, _: &ScheduleSetup) -> Result<(), CloudError> {
        self.called("DeleteSchedule")?.schedules.remove(name.as_str());
        Ok(())
    }
    async fn prove_schedules(&self, _: &Region, setup: &ScheduleSetup) -> Result<String, CloudError> {
        self.called("CreateSchedule").map(|_| format!("tried in {}", setup.group))
    }
    async fn note_sweep(&self, canary: &Canary, at: Micros) -> Result<(), CloudError> {
        let mut world = self.called("CreateTags")?;
        for it in world.instances.iter_mut().filter(|i| i.id == canary.instance) {
            it.tags.insert(drums_provider::tags::SWEPT.to_owned(), drums_provider::words::instant_text(at));
        }
        self.noted.lock().unwrap().push(canary.clone());
        Ok(())
    }
}

#[test]
fn a_mend_is_made_of_what_is_wrong_and_of_nothing_else_and_each_part_whatever_becomes_of_the_other() {
    use drums_provider::cloud::Attributes;
    use support::ready;
    let (protection, shutdown) = ("ModifyInstanceAttribute of protection", "ModifyInstanceAttribute of shutdown");
    let launch = support::launch(support::MINUTE_MS);
    let seen = support::instance_of(&launch.order(), 1, support::START);
    let kill = launch.host().claim(&seen).unwrap().kill_id();
    for (stops, protected, stop_protected) in
        [(true, false, false), (false, true, false), (false, false, true), (true, true, true)]
    {
        let wrong = Attributes { terminate_on_shutdown: !stops, protected, stop_protected };
        for fails in [None, Some(protection), Some(shutdown)] {
            let mut world = World::new();
            world.instances = vec![Instance { attributes: Some(Ok(wrong)), ..seen.clone() }];
            let mut cloud = Memory::new(world);
            cloud.fails.extend(fails.map(|call| (call, FailureKind::Denied)));
            let done = ready(cloud.mend(&kill, wrong));
            let tried = [usize::from(protected || stop_protected), usize::from(stops)];
            assert_eq!([cloud.count(protection), cloud.count(shutdown)], tried, "{wrong:?}, {fails:?}");
            assert_eq!(done.is_err(), fails.is_some_and(|f| cloud.count(f) > 0));
            if fails.is_none() {
                assert_eq!(cloud.world().instances[0].attributes, Some(Ok(Attributes::MORTAL)));
            }
        }
    }
}
