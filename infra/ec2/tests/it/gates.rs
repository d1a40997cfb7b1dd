use std::collections::BTreeMap;

use drums_common::clock::Micros;
use drums_ec2::Ec2;
use drums_provider::{
    ask::{Ask, RawAsk, RawHost},
    books::Books,
    cloud::{Canary, Cloud as _, ImageSource, UserData},
    gates::{Clearance, Gate, RegionSetup, Setup, Table, judge, look},
    launch::{Act, Guest, Launch, Patience, Reply, State, View},
    limits::Limits,
    money::UsdMicros,
    words::instant_text,
};
use serde_json::json;

use crate::peer::{AMI, HOUR_MS, OURS, Peer, profile, region, sdk, setup};

/// An account with everything that a launch needs, and the coordinator's credentials in it.
struct Site {
    peer: Peer,
    cloud: Ec2,
    setup: Setup,
}

impl Site {
    async fn new() -> Self {
        let peer = Peer::start();
        peer.bind("COORDINATOR", "coordinator", OURS);
        peer.bind(&format!("drums-schedule-{OURS}"), "schedule", OURS);
        sdk::scheduler(&peer, &region()).await.create_schedule_group().name(setup().group).send().await.unwrap();
        let cloud = peer.ec2("COORDINATOR").await;
        let image = ImageSource::Parameter(AMI.to_owned());
        let id = cloud.image(&region(), &image).await.unwrap().id;
        let canary = sdk::canary(&peer, &region(), id.as_str(), OURS).await;
        let group = peer.get(&format!("network?region={}", region()))["security_group"].as_str().unwrap().to_owned();
        let there = RegionSetup {
            image,
            security_groups: vec![group.parse().unwrap()],
            schedules: setup(),
            canary: Canary { region: region(), instance: canary.parse().unwrap() },
            hours: BTreeMap::new(),
            gib_month: None,
        };
        let setup = Setup { installation: OURS, regions: BTreeMap::from([(region(), there)]) };
        let site = Self { peer, cloud, setup };
        site.swept().await;
        site
    }

    /// A sweep was there just now.
    async fn swept(&self) {
        self.peer.ec2("TEST").await.note_sweep(&self.setup.regions[&region()].canary, self.peer.now()).await.unwrap();
    }

    fn raw(&self) -> RawAsk {
        RawAsk {
            campaign: "c1".to_owned(),
            experiment: Some("EXP-028".to_owned()),
            deadline: instant_text(self.peer.now().plus_ms(2 * HOUR_MS)),
            max_usd: "5".to_owned(),
            drain_minutes: 15,
            instance_profile: profile(OURS).to_string(),
            hosts: vec![RawHost {
                name: "h1".to_owned(),
                kind: "c8i.large".to_owned(),
                region: region().to_string(),
                subnets: self.peer.placements(&region()).iter().take(2).map(|p| p.subnet.to_string()).collect(),
                volume_gib: 30,
                spot: false,
                nested: true,
            }],
        }
    }

    async fn judge(&self, ask: &Ask) -> (Table, Option<Clearance>) {
        let limits = Limits {
            account: "123456789012".to_owned(),
            day_usd: UsdMicros(20_000_000),
            max_hosts: 2,
            longest_life_ms: 24 * HOUR_MS,
            least_life_ms: 600_000,
            sweep_age_ms: 600_000,
        };
        let facts = look(&self.cloud, ask, &self.setup, Books::default(), self.peer.now()).await;
        judge(ask, &limits, &facts)
    }

    async fn refused(&self, raw: &RawAsk) -> Vec<Gate> {
        let (table, _) = self.judge(&raw.read().unwrap()).await;
        let mut gates: Vec<_> = table.refusals().map(|r| r.gate).collect();
        gates.dedup();
        gates
    }
}

#[tokio::test]
async fn every_gate_is_asked_of_aws_with_the_coordinators_permissions_and_changes_nothing() {
    let site = Site::new().await;
    let changes = |site: &Site| {
        let journal = site.peer.get("journal");
        let reads = ["Describe", "Get", "List"];
        let all = journal.as_array().unwrap().iter().filter(|e| e["by"] == "COORDINATOR");
        let all = all.filter(|e| !reads.iter().any(|r| e["action"].as_str().unwrap().starts_with(r)));
        all.map(|e| (e["action"].as_str().unwrap().to_owned(), e["params"]["DryRun"] == "true")).collect::<Vec<_>>()
    };
    let (table, cleared) = site.judge(&site.raw().read().unwrap()).await;
    let text = table.to_string();
    let cleared = cleared.unwrap_or_else(|| panic!("{text}"));
    for evidence in [
        "arn:aws:",
        "0 s off AWS's",
        "c8i.large, 2 CPUs, 4096 MiB",
        "offered; read back after the launch",
        "0 of 64 virtual CPUs used, 2 needed, by service quota",
        "$0.0937 an hour by AWS price list (GetProducts) of 2026-11-01",
        "DryRun in 2 subnets",
        &format!("{}, given to a host by DryRun", profile(OURS)),
        "permitted, by DryRun",
        &format!("a disabled schedule was made in group {}", setup().group),
        "found and spared 0 s ago",
        "0 alive and 1 more, of 2 allowed",
    ] {
        assert!(text.contains(evidence), "{evidence} is missing in\n{text}");
    }
    let schedules = ["CreateSchedule", "DeleteSchedule"];
    for (action, dry) in changes(&site) {
        assert!(dry || schedules.contains(&action.as_str()), "{action} was carried out");
    }
    assert_eq!(site.peer.instances().len(), 1, "the canary");

    // And what is cleared is what is launched.
    let now = site.peer.now();
    let mut launch = cleared.confirm(&Books::default(), now).unwrap().remove(0);
    let patience = Patience::default();
    let nothing = nothing_seen(now);
    let prepare = launch.decide(&nothing, now, &patience);
    assert!(matches!(prepare.act, Some(Act::Prepare { .. })));
    let user_data = UserData("#cloud-boothook\n".to_owned());
    launch = prepare.launch.heard(&Reply::Prepared(Ok(user_data)), now, &patience).launch;
    let run = launch.decide(&nothing, now, &patience);
    let Some(Act::Run(order, user_data)) = run.act else { panic!("{:?}", run.act) };
    let made = site.cloud.run(&order, &user_data).await;
    launch = run.launch.heard(&Reply::Ran(made.map(Box::new)), now, &patience).launch;
    assert!(matches!(launch.state(), State::Launched { .. }), "{:?}", launch.state());
    let id = launch.instance().unwrap().clone();
    let look = |launch: Launch| {
        let (cloud, id) = (&site.cloud, id.clone());
        async move {
            let schedule = launch.schedule(&id);
            let seen = cloud.inspect(id.region(), id.id()).await.map(|i| vec![i]);
            let shown = cloud.schedule(id.region(), &schedule.name, &schedule.setup).await;
            View { instances: seen, schedule: shown, ..nothing_seen(now) }
        }
    };
    let d = launch.decide(&look(launch.clone()).await, now, &patience);
    let Some(Act::PutSchedule(schedule)) = d.act else { panic!("{:?} in {:?}", d.act, d.launch.state()) };
    site.cloud.put_schedule(&schedule).await.unwrap();
    let d = d.launch.decide(&look(d.launch.clone()).await, now, &patience);
    assert!(matches!(d.launch.state(), State::Armed { .. }), "{:?}", d.launch.state());
}

fn nothing_seen(now: Micros) -> View {
    View {
        instances: Ok(Vec::new()),
        schedule: Ok(None),
        enrolled: false,
        guest: Guest::NotYet,
        attentive_since: now,
        unwanted: None,
        unaffordable: None,
    }
}

#[tokio::test]
async fn what_aws_refuses_or_does_not_have_is_refused_by_its_gate() {
    use Gate::{Hosts, Image, Launch, Nested, Price, Profile, Quota, Schedule, Sweeper, Terminate, Type};
    let mut site = Site::new().await;
    let raw = site.raw();
    let of = |change: &dyn Fn(&mut RawAsk)| {
        let mut raw = site.raw();
        change(&mut raw);
        raw
    };
    let prices = |region: serde_json::Value| {
        site.peer.post("settings", &json!({ "prices": { "us-east-1": region } }));
    };
    prices(json!({ "c8i.large": "0.0937", "m6i.large": "0.1", "gp3": "0.08" }));
    let (m6i, unknown) = (of(&|a| a.hosts[0].kind = "m6i.large".into()), of(&|a| a.hosts[0].kind = "z9.large".into()));
    let (spot, small) = (of(&|a| a.hosts[0].spot = true), of(&|a| a.hosts[0].volume_gib = 5));
    let (stranger, own) =
        (of(&|a| a.instance_profile = "drums-host-99999999".into()), of(&|a| a.instance_profile = "none-such".into()));
    assert_eq!(site.refused(&m6i).await, [Nested, Launch, Profile]);
    assert!(site.refused(&unknown).await.starts_with(&[Type, Nested]));
    assert_eq!(site.refused(&spot).await, [Launch, Profile], "nested virtualisation is not for spot");
    assert_eq!(site.refused(&small).await[0], Image, "the image needs more");
    assert_eq!(site.refused(&stranger).await, [Launch, Profile], "another installation's");
    assert_eq!(site.refused(&own).await, [Launch, Profile], "one that is not there");

    let fault = |action: &str, code: &str| {
        site.peer.fault(&json!({ "action": action, "key_id": "COORDINATOR", "code": code, "status": 403 }));
    };
    fault("TerminateInstances", "UnauthorizedOperation");
    assert_eq!(site.refused(&raw).await, [Terminate]);
    fault("CreateSchedule", "AccessDeniedException");
    assert_eq!(site.refused(&raw).await, [Schedule]);
    fault("DescribeRegions", "UnauthorizedOperation");
    assert_eq!(site.refused(&raw).await, [Hosts]);

    site.peer.post("settings", &json!({ "quotas": { "L-1216C47A": 1 } }));
    assert_eq!(site.refused(&raw).await, [Quota]);
    site.peer.post("settings", &json!({ "quotas": { "L-1216C47A": 64 } }));
    prices(json!({ "c8i.large": "0.0937" }));
    assert_eq!(site.refused(&raw).await[0], Price, "a volume has none");
    prices(json!({ "c8i.large": "0.0937", "gp3": "0.08" }));
    let there = site.setup.regions.get_mut(&region()).unwrap();
    let image = std::mem::replace(&mut there.image, ImageSource::Parameter("/aws/service/none-such".to_owned()));
    assert_eq!(site.refused(&raw).await, [Image, Launch, Profile]);
    site.setup.regions.get_mut(&region()).unwrap().image = image;

    site.peer.advance_s(660);
    assert_eq!(site.refused(&raw).await, [Sweeper], "eleven minutes ago");
    site.swept().await;
    assert_eq!(site.refused(&raw).await, []);
}
