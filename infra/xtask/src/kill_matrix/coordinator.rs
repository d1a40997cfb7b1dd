//! The coordinator as its callers of `drums_provider` are to be: looks, decides, stores, acts, stores; for the launch, for
//! each reap, and for strays. Its store outlives its process.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, Result, bail};
use drums_common::{
    clock::{Micros, MonoMicros},
    ids::{Generation, HostId},
    lease::{Health, HostLeases, LeaseTimes},
    wire::latest::{Beat, BeatAck, Welcome},
};
use drums_provider::{
    ask::{RawAsk, RawHost},
    books::{Books, Registered},
    cloud::{Cloud as _, ImageSource, Instance},
    failure::{CloudError, FailureKind},
    gates::{self, RegionSetup, Setup},
    host::OwnedInstance,
    launch::{Act, Guest, Launch, Look, Patience, Reply, View, Why},
    limits::Limits,
    money::UsdMicros,
    reap::{self, Reap, strays},
    sweep::{Mode, Regions, Scope},
    words::{InstanceId, Region, instant_text},
};

use super::{
    aws::{self, Aws, OURS, Who},
    client::{ACCOUNT, Client, ready},
    timer,
};

/// Between two passes; in each, one act of the launch and one of each reap.
pub const PASS_S: u64 = 10;
const STRAYS_S: u64 = 60;
/// From enrolled to a guest that has booted on the host.
const PROBE_S: u64 = 30;
const LONGEST_LIFE_MS: u64 = 24 * 3_600_000;
const HOST: &str = "h1";

pub struct Coordinator {
    client: Client,
    patience: Patience,
    // Its store.
    launch: Launch,
    campaign: Registered,
    reaps: BTreeMap<OwnedInstance, Reap>,
    /// Attempts that enrolled, and when.
    enrolled: BTreeMap<u16, Micros>,
    /// Its process, if it runs.
    process: Option<Process>,
    lives: u32,
    /// Whether it ends what it gives up.
    pub may_end: bool,
    armed: bool,
}

struct Process {
    leases: HostLeases,
    up_since: Micros,
}

/// The clock of the coordinator's machine, which was started long before.
fn boottime(now: Micros) -> MonoMicros {
    MonoMicros(now.0.unsigned_abs())
}

fn host() -> HostId {
    HOST.parse().expect("it is a host's name")
}

fn ask(deadline: Micros) -> RawAsk {
    let host = RawHost {
        name: HOST.to_owned(),
        kind: "c8i.2xlarge".to_owned(),
        region: aws::region().to_string(),
        subnets: aws::placements().iter().map(|p| p.subnet.to_string()).collect(),
        volume_gib: 30,
        spot: false,
        nested: true,
    };
    RawAsk {
        campaign: "c1".to_owned(),
        experiment: None,
        deadline: instant_text(deadline),
        max_usd: "50".to_owned(),
        drain_minutes: 15,
        instance_profile: format!("drums-host-{OURS}"),
        hosts: vec![host],
    }
}

fn setup() -> Setup {
    let there = RegionSetup {
        image: ImageSource::Id("ami-0123456789abcdef0".parse().expect("it is an image's id")),
        security_groups: vec!["sg-00000001".parse().expect("it is a group's id")],
        schedules: aws::setup(),
        canary: aws::canary(aws::region()),
        hours: BTreeMap::new(),
        gib_month: None,
    };
    Setup { installation: OURS, regions: BTreeMap::from([(aws::region(), there)]) }
}

/// What sweeps and strays are told; as deployed, every region.
pub fn scope(regions: Regions) -> Result<Scope> {
    let all = [aws::region(), aws::other_region()];
    let swept = |r: &Region| !matches!(&regions, Regions::Only(only) if !only.contains(r));
    let canaries = all.into_iter().filter(swept).map(aws::canary).collect();
    Ok(Scope::new(OURS, regions, canaries, Mode::Armed, LONGEST_LIFE_MS)?)
}

impl Coordinator {
    /// Asked for one host until `deadline`: gates, clearance, and the launch as it is stored.
    pub fn begin(aws: &Arc<Mutex<Aws>>, deadline: Micros, patience: Patience) -> Result<Self> {
        let client = Client { aws: aws.clone(), who: Who::Coordinator };
        let now = aws.lock().unwrap_or_else(PoisonError::into_inner).now;
        let ask = ask(deadline).read()?;
        let limits = Limits {
            account: ACCOUNT.to_owned(),
            day_usd: UsdMicros(100_000_000),
            max_hosts: 2,
            longest_life_ms: LONGEST_LIFE_MS,
            least_life_ms: patience.least_life_ms,
            sweep_age_ms: 10 * 60_000,
        };
        let facts = ready(gates::look(&client, &ask, &setup(), Books::default(), now));
        let (table, clearance) = gates::judge(&ask, &limits, &facts);
        let Some(clearance) = clearance else { bail!("the gates refuse the simulated launch:\n{table}") };
        let campaign = Registered { campaign: clearance.campaign().clone(), caps: clearance.caps() };
        let launches = clearance.confirm(&Books::default(), now);
        let launches = launches.map_err(|table| anyhow::anyhow!("the clearance is not confirmed:\n{table}"))?;
        let mut this = Self {
            client,
            patience,
            launch: launches.into_iter().next().context("one host was asked for")?,
            campaign,
            reaps: BTreeMap::new(),
            enrolled: BTreeMap::new(),
            process: None,
            lives: 0,
            may_end: true,
            armed: false,
        };
        this.start(now);
        Ok(this)
    }

    pub fn start(&mut self, now: Micros) {
        let mut leases = HostLeases::new(LeaseTimes::default(), boottime(now));
        let attempt = self.launch.host().attempt();
        if self.enrolled.contains_key(&attempt) {
            leases.expect(host(), Generation(u32::from(attempt)));
        }
        self.lives += 1;
        self.process = Some(Process { leases, up_since: now });
    }

    pub fn kill(&mut self) {
        self.process = None;
    }

    pub fn is_up(&self) -> bool {
        self.process.is_some()
    }
    /// Which of its lives this is, for agents that find another one; none while it is dead.
    pub fn life(&self) -> Option<u32> {
        self.process.as_ref().map(|_| self.lives)
    }
    /// The schedule was read back, of whichever attempt.
    pub fn was_armed(&self) -> bool {
        self.armed
    }
    pub fn ready_since(&self) -> Option<Micros> {
        self.enrolled.values().next().map(|at| at.plus_ms(PROBE_S * 1_000))
    }
    pub fn is_closed(&self) -> bool {
        self.launch.is_closed()
    }
    pub fn attempt(&self) -> u16 {
        self.launch.host().attempt()
    }

    /// An agent of this attempt is welcomed, if it may be; the first time it enrols.
    pub fn welcome(&mut self, attempt: u16) -> Option<Welcome> {
        let process = self.process.as_mut()?;
        if attempt != self.launch.host().attempt() || !self.launch.may_enrol() {
            return None;
        }
        let now = self.client.aws.lock().unwrap_or_else(PoisonError::into_inner).now;
        let generation = Generation(u32::from(attempt));
        process.leases.welcomed(host(), generation, boottime(now)).ok()?;
        self.enrolled.entry(attempt).or_insert(now);
        let times = process.leases.times();
        Some(Welcome {
            host: host(),
            generation,
            beat_ms: times.beat_ms,
            dispatch_lease_ms: times.dispatch_ms,
            life_lease_ms: times.life_ms,
        })
    }

    pub fn beat(&mut self, beat: &Beat) -> Option<BeatAck> {
        let now = self.client.aws.lock().unwrap_or_else(PoisonError::into_inner).now;
        self.process.as_mut()?.leases.beat(&host(), beat, boottime(now))
    }

    /// It pays attention, also between two passes.
    pub fn looked(&mut self, now: Micros) {
        if let Some(process) = &mut self.process {
            process.leases.looked(boottime(now));
        }
    }

    pub fn pass(&mut self, local: Micros) -> Result<()> {
        if self.process.is_none() {
            return Ok(());
        }
        // AWS's time wherever it is to be had.
        let now = ready(self.client.account()).map_or(local, |a| a.clock);
        self.launch(now)?;
        if self.may_end {
            for instance in self.reaps.keys().cloned().collect::<Vec<_>>() {
                self.reap(&instance, now);
            }
            if (local.0 / 1_000_000).unsigned_abs() % STRAYS_S < PASS_S {
                self.strays(now)?;
            }
        }
        Ok(())
    }

    fn inspect(&self, region: &Region, id: &InstanceId) -> Result<Option<Instance>, CloudError> {
        match ready(self.client.inspect(region, id)) {
            Ok(seen) => Ok(Some(seen)),
            Err(e) if e.kind == FailureKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn books(&self) -> Books {
        let campaigns = BTreeMap::from([(self.campaign.campaign.id().clone(), self.campaign.clone())]);
        let meters = self.launch.meter().into_iter().chain(self.reaps.values().map(Reap::meter)).collect();
        Books { campaigns, meters }
    }

    fn view(&self, now: Micros) -> Result<View> {
        let process = self.process.as_ref().context("a coordinator that is dead looks at nothing")?;
        let launch = &self.launch;
        let instances = match launch.look() {
            Look::Token(region, token) => ready(self.client.by_token(&region, &token)),
            Look::Instance(region, id) => self.inspect(&region, &id).map(|i| i.into_iter().collect()),
            Look::Nothing => Ok(Vec::new()),
        };
        let schedule = match launch.instance() {
            Some(instance) => {
                let wanted = launch.schedule(instance);
                ready(self.client.schedule(&wanted.region, &wanted.name, &wanted.setup))
            }
            None => Ok(None),
        };
        let enrolled = self.enrolled.get(&launch.host().attempt());
        let books = self.books();
        let campaign = self.campaign.campaign.id();
        let demanded = books.demands(now).remove(campaign).map(|(_, why)| why);
        let lost = match process.leases.health(&host(), boottime(now)) {
            Some(Health::Lost { for_ms }) => Some(format!("it was not heard of for {} s", for_ms / 1_000)),
            _ => None,
        };
        Ok(View {
            instances,
            schedule,
            enrolled: enrolled.is_some(),
            guest: if enrolled.is_some_and(|at| now >= at.plus_ms(PROBE_S * 1_000)) {
                Guest::Booted
            } else {
                Guest::NotYet
            },
            attentive_since: process.up_since,
            unwanted: lost.filter(|_| enrolled.is_some()).or(demanded),
            unaffordable: books.unaffordable(campaign, now),
        })
    }

    fn launch(&mut self, now: Micros) -> Result<()> {
        let decision = self.launch.decide(&self.view(now)?, now, &self.patience);
        self.store(decision.launch, decision.reap, now);
        let Some(act) = decision.act else { return Ok(()) };
        let reply = match act {
            Act::Prepare { due, .. } => Reply::Prepared(Ok(timer::user_data(due, due.ms_since(now)))),
            Act::Run(order, user_data) => Reply::Ran(ready(self.client.run(&order, &user_data)).map(Box::new)),
            Act::PutSchedule(schedule) => Reply::Scheduled(ready(self.client.put_schedule(&schedule))),
            Act::Mend(kill, wrong) => Reply::Mended(ready(self.client.mend(&kill, wrong))),
        };
        let decision = self.launch.heard(&reply, now, &self.patience);
        self.store(decision.launch, decision.reap, now);
        Ok(())
    }

    fn store(&mut self, launch: Launch, given_up: Vec<(OwnedInstance, Why)>, now: Micros) {
        // What was silent is another instance than the next one.
        if launch.host().attempt() != self.launch.host().attempt()
            && let Some(process) = &mut self.process
        {
            process.leases.forget(&host());
        }
        let account = self.launch.account();
        self.launch = launch;
        self.armed |= self.launch.may_enrol();
        for (instance, why) in given_up {
            let begin = || Reap::begin(instance.clone(), account.clone(), why, now);
            self.reaps.entry(instance.clone()).or_insert_with(begin);
        }
    }

    fn reap(&mut self, instance: &OwnedInstance, now: Micros) {
        let Some(reap) = self.reaps.get(instance).filter(|r| !r.is_closed()) else { return };
        let volumes = match instance.token() {
            Some(token) => ready(self.client.volumes(instance.region(), &token)),
            None => Ok(Vec::new()),
        };
        let view = reap::View { instance: self.inspect(instance.region(), instance.id()), volumes };
        let decision = reap.decide(&view, now);
        let mut reap = decision.reap;
        if let Some(act) = decision.act {
            let reply = match &act {
                reap::Act::Terminate(kill) => ready(self.client.terminate(kill)).map(drop),
                reap::Act::Unprotect(kill) => ready(self.client.unprotect(kill)),
                reap::Act::DeleteSchedule(name) => {
                    ready(self.client.delete_schedule(instance.region(), name, &aws::setup()))
                }
            };
            reap = reap.heard(&act, &reply, now).0;
        }
        self.reaps.insert(instance.clone(), reap);
    }

    fn strays(&mut self, now: Micros) -> Result<()> {
        let scope = scope(Regions::All)?;
        for region in [aws::region(), aws::other_region()] {
            let Ok(shown) = ready(self.client.owned(&region, OURS)) else { continue };
            // Read after the listing.
            let tokens: BTreeSet<_> =
                Some(self.launch.host().token()).filter(|_| !self.launch.is_closed()).into_iter().collect();
            let known = self.reaps.keys().cloned().collect();
            for (instance, alarm) in strays(&scope, &shown, &tokens, &known) {
                let account = self.launch.account();
                let begin = || Reap::begin(instance.clone(), account, Why::Unwanted(alarm.message), now);
                self.reaps.entry(instance.clone()).or_insert_with(begin);
            }
        }
        Ok(())
    }
}
