//! What the gates must know, asked of the cloud.

use std::collections::{BTreeMap, BTreeSet};

use drums_common::{clock::Micros, ids::InstallationId};

use super::{Facts, HostFacts};
use crate::{
    ask::{Ask, AskedHost},
    books::Books,
    cloud::{
        Canary, Cloud, ImageFacts, ImageSource, InstanceState, LaunchOrder, Market, Placement, Quota, Recipe,
        ScheduleSetup, TypeFacts, VolumeKind,
    },
    failure::{CloudError, FailureKind},
    host::{Belongs, OwnedHost, OwnedInstance},
    money::{Quoted, UsdMicros},
    words::{InstanceType, Region, SecurityGroupId},
};

/// What the operator has in a region that hosts are launched in; from the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionSetup {
    pub image: ImageSource,
    /// Of every host: nobody gets in.
    pub security_groups: Vec<SecurityGroupId>,
    pub schedules: ScheduleSetup,
    /// What the sweep must find there.
    pub canary: Canary,
    /// The operator's own prices, instead of AWS's list: of an hour by type, and of a GiB for a month.
    pub hours: BTreeMap<InstanceType, Quoted<UsdMicros>>,
    pub gib_month: Option<Quoted<UsdMicros>>,
}

/// What the operator has; from the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    pub installation: InstallationId,
    pub regions: BTreeMap<Region, RegionSetup>,
}

/// Everything that the gates of an ask need to see. Nothing is launched, ended or left behind; what could not be found out
/// is kept as its failure. `books` are from the store, `local` is this machine's clock.
pub async fn look(cloud: &dyn Cloud, ask: &Ask, setup: &Setup, books: Books, local: Micros) -> Facts {
    let account = cloud.account().await;
    let (mut canaries, mut terminate, mut schedules) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
    for region in ask.hosts.iter().map(|h| &h.region).collect::<BTreeSet<_>>() {
        // Where there is no setup the gates of the region say that nothing was tried.
        let Some(there) = setup.regions.get(region) else { continue };
        let canary = &there.canary;
        canaries.push((canary.clone(), cloud.inspect(&canary.region, &canary.instance).await));
        terminate.insert(region.clone(), cloud.would_terminate(region, &canary.instance).await);
        let proven = cloud.prove_schedules(region, &there.schedules).await;
        schedules.insert(region.clone(), (there.schedules.clone(), proven));
    }
    let mut found = Found { cloud, setup, ask, known: BTreeMap::new(), tried: Vec::new() };
    let mut hosts = BTreeMap::new();
    for host in &ask.hosts {
        hosts.insert(host.host.clone(), found.host(host).await);
    }
    let alive = alive(cloud, setup).await;
    Facts { installation: setup.installation, account, local, canaries, terminate, schedules, hosts, alive, books }
}

/// Instances of this installation in every region that the account has, but for those that are terminated and the canaries.
async fn alive(cloud: &dyn Cloud, setup: &Setup) -> Result<u32, CloudError> {
    let canaries: BTreeSet<_> = setup.regions.values().map(|r| &r.canary.instance).collect();
    let mut alive = 0u32;
    for region in cloud.regions().await? {
        for seen in cloud.owned(&region, setup.installation).await? {
            // What bears our tag counts, whatever its deadline.
            let ours = matches!(OwnedInstance::read(setup.installation, &seen, 0), Belongs::Ours(_));
            if ours && seen.state != InstanceState::Terminated && !canaries.contains(&seen.id) {
                alive = alive.saturating_add(1);
            }
        }
    }
    Ok(alive)
}

/// What hosts of the same kind share.
#[derive(Clone)]
struct OfKind {
    kind: Result<TypeFacts, CloudError>,
    image: Result<ImageFacts, CloudError>,
    hour: Result<Quoted<UsdMicros>, CloudError>,
    gib_month: Result<Quoted<UsdMicros>, CloudError>,
    quota: Result<Quoted<Quota>, CloudError>,
}

type Tried = Vec<(Placement, Result<(), CloudError>)>;

struct Found<'a> {
    cloud: &'a dyn Cloud,
    setup: &'a Setup,
    ask: &'a Ask,
    known: BTreeMap<(Region, InstanceType, Market), OfKind>,
    /// Hosts that differ by name alone are tried once.
    tried: Vec<(Recipe, Tried)>,
}

impl Found<'_> {
    async fn host(&mut self, host: &AskedHost) -> HostFacts {
        let OfKind { kind, image, hour, gib_month, quota } = self.of_kind(host).await;
        let recipe = match (&kind, &image) {
            (Ok(kind), Ok(image)) => self.recipe(host, kind, image).await,
            (Err(e), _) | (_, Err(e)) => Err(e.clone()),
        };
        let launches = match &recipe {
            Ok(recipe) => self.launches(host, recipe).await,
            Err(_) => Vec::new(),
        };
        HostFacts { kind, image, hour, gib_month, quota, recipe, launches }
    }

    async fn of_kind(&mut self, host: &AskedHost) -> OfKind {
        let AskedHost { region, kind, market, .. } = host;
        let key = (region.clone(), kind.clone(), *market);
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let there = self.setup.regions.get(region);
        let found = OfKind {
            kind: self.cloud.type_facts(region, kind).await,
            image: match there {
                Some(there) => self.cloud.image(region, &there.image).await,
                None => Err(no_setup(region)),
            },
            hour: match there.and_then(|t| t.hours.get(kind)) {
                Some(own) => Ok(own.clone()),
                None => self.cloud.hour_price(region, kind).await,
            },
            gib_month: match there.and_then(|t| t.gib_month.clone()) {
                Some(own) => Ok(own),
                None => self.cloud.volume_price(region, VolumeKind::Gp3).await,
            },
            quota: self.cloud.vcpus(region, kind, *market).await,
        };
        self.known.entry(key).or_insert(found).clone()
    }

    async fn recipe(&self, host: &AskedHost, kind: &TypeFacts, image: &ImageFacts) -> Result<Recipe, CloudError> {
        let there = self.setup.regions.get(&host.region).ok_or_else(|| no_setup(&host.region))?;
        let mut placements = Vec::new();
        for subnet in &host.subnets {
            let zone = self.cloud.subnet(&host.region, subnet).await?;
            placements.push(Placement { subnet: subnet.clone(), zone });
        }
        Ok(host.recipe(kind, image, there.security_groups.clone(), placements))
    }

    async fn launches(&mut self, host: &AskedHost, recipe: &Recipe) -> Tried {
        if let Some((_, tried)) = self.tried.iter().find(|(r, _)| r == recipe) {
            return tried.clone();
        }
        let campaign = &self.ask.campaign;
        let owned = OwnedHost::first(self.setup.installation, host.host.clone(), campaign.clone());
        let mut tried = Vec::new();
        for placement in &recipe.placements {
            let order = LaunchOrder {
                host: owned.clone(),
                recipe: recipe.clone(),
                placement: placement.clone(),
                due: campaign.deadline(),
            };
            tried.push((placement.clone(), self.cloud.would_run(&order).await));
        }
        self.tried.push((recipe.clone(), tried.clone()));
        tried
    }
}

fn no_setup(region: &Region) -> CloudError {
    let text = format!("the configuration has no image, security groups, schedules and canary for {region}");
    CloudError::new(FailureKind::Invalid, "the look at a region", text)
}
