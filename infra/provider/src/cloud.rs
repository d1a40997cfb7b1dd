//! The port to the cloud: what the decisions of this package need carried out and shown. The EC2 package implements it;
//! nothing here knows an SDK.
//!
//! For whoever implements it:
//! - Each method is one attempt. No retries within (the SDK's are switched off for `run`): what follows from a failure is
//!   decided here, by its [kind](crate::failure::FailureKind). A reply that does not come in time is `Unknown`.
//! - Each listing goes through all of its pages, or fails. A page that failed is a failed call, never a shorter list.
//! - Nothing is guessed: what the cloud does not show is `None`.

use std::{collections::BTreeMap, fmt};

use async_trait::async_trait;
use drums_common::{clock::Micros, ids::InstallationId};
use serde::{Deserialize, Serialize};

use crate::{
    failure::CloudError,
    host::{KillId, OwnedHost},
    money::{Quoted, UsdMicros},
    tags,
    token::ClientToken,
    words::{
        ImageId, InstanceId, InstanceProfile, InstanceType, Region, SecurityGroupId, SubnetId, VolumeId, Zone,
        instant_text,
    },
};

#[async_trait]
pub trait Cloud: Send + Sync {
    /// Whose credentials these are, and what time it is at AWS.
    async fn account(&self) -> Result<Account, CloudError>;

    /// Every region that is enabled for the account.
    async fn regions(&self) -> Result<Vec<Region>, CloudError>;

    /// What a type is in a region. A type that the region does not have is `Unsupported`.
    async fn type_facts(&self, region: &Region, kind: &InstanceType) -> Result<TypeFacts, CloudError>;

    /// Types of a region that offer nested virtualisation.
    async fn nested_types(&self, region: &Region) -> Result<Vec<InstanceType>, CloudError>;

    /// The machine image: an SSM parameter is resolved, then the image is described.
    async fn image(&self, region: &Region, source: &ImageSource) -> Result<ImageFacts, CloudError>;

    /// A subnet that an operator named: which zone it is in.
    async fn subnet(&self, region: &Region, subnet: &SubnetId) -> Result<Zone, CloudError>;

    /// One hour of a type on demand (Linux, shared tenancy): an upper bound of what spot costs.
    async fn hour_price(&self, region: &Region, kind: &InstanceType) -> Result<Quoted<UsdMicros>, CloudError>;

    /// One GiB of volume for a month of 730 hours.
    async fn volume_price(&self, region: &Region, kind: VolumeKind) -> Result<Quoted<UsdMicros>, CloudError>;

    /// Virtual CPUs that the account may run of this type's quota, and runs.
    async fn vcpus(&self, region: &Region, kind: &InstanceType, market: Market) -> Result<Quoted<Quota>, CloudError>;

    /// `RunInstances` of one instance as ordered: token, tags (also of its volumes), terminate on shutdown, volumes that
    /// go with it, IMDSv2 required, nested virtualisation if asked, all in this one call. The same order again gives the
    /// same instance.
    async fn run(&self, order: &LaunchOrder, user_data: &UserData) -> Result<Instance, CloudError>;

    /// The same call with `DryRun` and without user data: `Ok` if it would have succeeded (`DryRunOperation`).
    async fn would_run(&self, order: &LaunchOrder) -> Result<(), CloudError>;

    /// Instances under a client token, in every state, by EC2's filter. An empty list is no evidence of absence.
    async fn by_token(&self, region: &Region, token: &ClientToken) -> Result<Vec<Instance>, CloudError>;

    /// One instance with everything that is read back, [`Attributes`] included.
    async fn inspect(&self, region: &Region, id: &InstanceId) -> Result<Instance, CloudError>;

    /// Every instance of the region that carries the tag [`tags::INSTALLATION`] whatever its value, and every one whose
    /// client token matches [`ClientToken::filter`] of this installation; in every state, each once, all pages.
    async fn owned(&self, region: &Region, installation: InstallationId) -> Result<Vec<Instance>, CloudError>;

    /// `TerminateInstances` of this one id. The state that the reply shows; never the end of the matter.
    async fn terminate(&self, kill: &KillId) -> Result<InstanceState, CloudError>;

    /// `TerminateInstances` with `DryRun`, of any instance: `Ok` if it would have been permitted. It ends nothing.
    async fn would_terminate(&self, region: &Region, id: &InstanceId) -> Result<(), CloudError>;

    /// Termination and stop protection off.
    async fn unprotect(&self, kill: &KillId) -> Result<(), CloudError>;

    /// `InstanceInitiatedShutdownBehavior` = terminate, again.
    async fn end_on_shutdown(&self, kill: &KillId) -> Result<(), CloudError>;

    /// Makes it [`Attributes::MORTAL`] again, by what is wrong with it; each call whatever becomes of the other.
    async fn mend(&self, kill: &KillId, wrong: Attributes) -> Result<(), CloudError> {
        let off = if wrong.protected || wrong.stop_protected { self.unprotect(kill).await } else { Ok(()) };
        let ends = if wrong.terminate_on_shutdown { Ok(()) } else { self.end_on_shutdown(kill).await };
        off.and(ends)
    }

    /// Volumes that exist, in whatever state, and carry this token's tag ([`tags::TOKEN`]).
    async fn volumes(&self, region: &Region, token: &ClientToken) -> Result<Vec<VolumeId>, CloudError>;

    /// Makes the one-time schedule, or makes the one of that name be this one. The schedule stays after it has fired
    /// (`ActionAfterCompletion` = NONE): it is evidence.
    async fn put_schedule(&self, schedule: &KillSchedule) -> Result<(), CloudError>;

    /// The schedule of that name as it is; `None` if there is none.
    async fn schedule(
        &self,
        region: &Region,
        name: &ScheduleName,
        setup: &ScheduleSetup,
    ) -> Result<Option<KillSchedule>, CloudError>;

    /// Removes it; one that is not there is as wanted.
    async fn delete_schedule(
        &self,
        region: &Region,
        name: &ScheduleName,
        setup: &ScheduleSetup,
    ) -> Result<(), CloudError>;

    /// Proves what can be proved beforehand of the schedule's group, role and dead-letter queue (a disabled schedule
    /// made, read back and deleted does: AWS refuses a role that Scheduler cannot assume). Says what was tried.
    async fn prove_schedules(&self, region: &Region, setup: &ScheduleSetup) -> Result<String, CloudError>;

    /// Notes on a canary that a sweep found and spared it: [`tags::SWEPT`].
    async fn note_sweep(&self, canary: &Canary, at: Micros) -> Result<(), CloudError>;
}

/// A cloud that also tells what it would call, for a person to read before anything is made. Nothing is sent.
#[async_trait]
pub trait Shows: Cloud {
    /// [`Cloud::run`], with user data as long as a host's are.
    async fn shown_run(&self, order: &LaunchOrder) -> Result<Call, CloudError>;

    /// [`Cloud::put_schedule`] of one that is not there yet.
    async fn shown_schedule(&self, schedule: &KillSchedule) -> Result<Call, CloudError>;
}

/// One call, as it would be sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Call {
    /// By AWS's name, as `RunInstances`.
    pub call: String,
    pub region: Region,
    /// Every parameter by AWS's name, in the request's order.
    pub parameters: Vec<(String, String)>,
}

/// Whose credentials, and AWS's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// 12 digits.
    pub account: String,
    pub arn: String,
    /// AWS's time when it answered (the reply's `Date`, to the second).
    pub clock: Micros,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TypeFacts {
    pub kind: InstanceType,
    pub vcpus: u32,
    pub memory_mib: u64,
    /// `x86_64`, `arm64`, as EC2 says it.
    pub architectures: Vec<String>,
    pub nested_virtualisation: bool,
    pub bare_metal: bool,
    /// CPU credits: as little use for timing as flex.
    pub burstable: bool,
    /// Zones of the region that have it.
    pub zones: Vec<Zone>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageSource {
    Id(ImageId),
    /// An SSM parameter whose value is an image's id.
    Parameter(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageFacts {
    pub id: ImageId,
    pub name: String,
    pub architecture: String,
    /// `available`, and nothing else, can be launched.
    pub state: String,
    /// Device of the root volume, as `/dev/xvda`.
    pub root_device: String,
    pub root_gib: u32,
}

/// Virtual CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    pub limit: u32,
    pub used: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Market {
    OnDemand,
    /// One-time, ended by EC2 when it wants the capacity back.
    Spot,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeKind {
    Gp3,
}

/// Where an instance is put.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    pub subnet: SubnetId,
    pub zone: Zone,
}

/// Cloud-init's user data; it holds the host's enrolment token, so it is never printed.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UserData(pub String);

impl fmt::Debug for UserData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[user data, {} bytes]", self.0.len())
    }
}

/// What every attempt of one host's launch shares.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    pub region: Region,
    pub kind: InstanceType,
    pub image: ImageId,
    /// Device of the root volume, as the image names it.
    pub root_device: String,
    pub volume: VolumeKind,
    pub volume_gib: u32,
    pub market: Market,
    /// `CpuOptions.NestedVirtualization` = enabled. Not for bare metal, which needs none.
    pub nested: bool,
    /// Whether a probe guest must have booted on it, with hardware support, before it is ready.
    pub prove_guest: bool,
    pub security_groups: Vec<SecurityGroupId>,
    /// A host without its tags is ended by this.
    pub profile: InstanceProfile,
    /// Where it may be put, in order of preference.
    pub placements: Vec<Placement>,
}

/// One `RunInstances`, but for its user data. What is sent again under the same token is the same to the letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchOrder {
    pub host: OwnedHost,
    pub recipe: Recipe,
    pub placement: Placement,
    /// The deadline that its tag says: the registered one, or an earlier one that counts by now.
    pub due: Micros,
}

impl LaunchOrder {
    pub fn token(&self) -> ClientToken {
        self.host.token()
    }
    /// Tags of the instance and of its volumes.
    pub fn tags(&self) -> BTreeMap<String, String> {
        let mut tags = tags::of(&self.host);
        tags.insert(tags::DEADLINE.to_owned(), instant_text(self.due));
        tags
    }
}

/// EC2's states of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InstanceState {
    Pending,
    Running,
    /// Goes on to `Stopped`, which is not gone.
    Stopping,
    Stopped,
    /// No longer charged; may hang here for hours.
    ShuttingDown,
    Terminated,
}

impl InstanceState {
    /// Whether it is ended or certain to end.
    pub fn is_going(self) -> bool {
        matches!(self, Self::ShuttingDown | Self::Terminated)
    }
}

/// An instance as the cloud shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    pub id: InstanceId,
    pub region: Region,
    pub zone: Option<Zone>,
    pub subnet: Option<SubnetId>,
    pub kind: Option<InstanceType>,
    pub image: Option<ImageId>,
    pub state: InstanceState,
    /// EC2's `LaunchTime`; moves if a stopped instance is started.
    pub launched: Micros,
    /// As EC2 shows it, whoever made it.
    pub token: Option<String>,
    pub tags: BTreeMap<String, String>,
    /// `CpuOptions.NestedVirtualization` read back.
    pub nested: Option<bool>,
    /// `MetadataOptions.HttpTokens` is `required`.
    pub imds_v2: Option<bool>,
    /// A public address or an address of IPv6 that is reachable from outside as far as security groups let it.
    pub public_address: bool,
    pub security_groups: Vec<SecurityGroupId>,
    pub profile: Option<InstanceProfile>,
    pub volumes: Vec<AttachedVolume>,
    /// Only [`Cloud::inspect`] asks for these: what they are, or why they could not be asked for.
    pub attributes: Option<Result<Attributes, CloudError>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachedVolume {
    pub id: VolumeId,
    pub delete_on_termination: bool,
}

/// What `DescribeInstanceAttribute` shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// `InstanceInitiatedShutdownBehavior` is `terminate`.
    pub terminate_on_shutdown: bool,
    /// `DisableApiTermination`.
    pub protected: bool,
    /// `DisableApiStop`, which forbids a termination as well.
    pub stop_protected: bool,
}

impl Attributes {
    /// As every host is launched.
    pub const MORTAL: Self = Self { terminate_on_shutdown: true, protected: false, stop_protected: false };

    /// What of it keeps a host alive that should end, in words.
    pub fn undying(self) -> Vec<&'static str> {
        let all = [
            (!self.terminate_on_shutdown, "shutdown behaviour is stop"),
            (self.protected, "termination protection is on"),
            (self.stop_protected, "stop protection is on"),
        ];
        all.into_iter().filter(|(is, _)| *is).map(|(_, what)| what).collect()
    }
}

/// What one-time schedules need; from the operator's configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleSetup {
    pub group: String,
    /// The role that EventBridge Scheduler assumes to terminate.
    pub role_arn: String,
    /// The queue that gets what could not be done.
    pub dead_letter_arn: String,
}

/// A schedule's name within its group: the client token of the attempt that it ends.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ScheduleName(String);

impl ScheduleName {
    pub fn of(token: &ClientToken) -> Self {
        Self(token.to_string())
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The one-time schedule that ends one instance: universal target `aws-sdk:ec2:terminateInstances`, one id.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KillSchedule {
    pub name: ScheduleName,
    pub region: Region,
    pub setup: ScheduleSetup,
    pub instance: InstanceId,
    /// UTC, whole seconds: `at(...)`. No flexible window. Scheduler fires within the minute after it.
    pub at: Micros,
    pub enabled: bool,
}

/// An instance (the smallest type, stopped) that carries our installation's tag and [`tags::ROLE`] = [`tags::CANARY`],
/// which each sweep must find and spare.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Canary {
    pub region: Region,
    pub instance: InstanceId,
}
