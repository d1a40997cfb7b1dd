//! `drumsctl host provision --dry-run`.

use std::{collections::BTreeMap, path::PathBuf};

use drums_provider::cloud::{Canary, Cloud as _, ImageSource};
use serde_json::{Value, json};

use crate::{
    ctl::{changes, drumsctl, ended, json, said, warned},
    peer::{AMI, OURS, Peer, elsewhere, profile, region, sdk, setup},
};

/// An account with everything that a launch needs, and its file.
struct Site {
    peer: Peer,
    canary: String,
    group: String,
    subnets: Vec<String>,
    folder: PathBuf,
}

impl Site {
    async fn new(name: &str) -> Self {
        let peer = Peer::of_today();
        peer.bind("COORDINATOR", "coordinator", OURS);
        peer.bind(&format!("drums-schedule-{OURS}"), "schedule", OURS);
        sdk::scheduler(&peer, &region()).await.create_schedule_group().name(setup().group).send().await.unwrap();
        let image = peer.ec2("TEST").await.image(&region(), &ImageSource::Parameter(AMI.to_owned())).await.unwrap().id;
        let canary = sdk::canary(&peer, &region(), image.as_str(), OURS).await;
        let group = peer.get(&format!("network?region={}", region()))["security_group"].as_str().unwrap().to_owned();
        let subnets = peer.placements(&region()).iter().take(2).map(|p| p.subnet.to_string()).collect();
        let folder = std::env::temp_dir().join(format!("drums-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let site = Self { peer, canary, group, subnets, folder };
        site.swept().await;
        site
    }

    async fn swept(&self) {
        let canary = Canary { region: region(), instance: self.canary.parse().unwrap() };
        self.peer.ec2("TEST").await.note_sweep(&canary, self.peer.now()).await.unwrap();
    }

    fn account(&self) -> String {
        let (s, r, schedules) = (&self.subnets, region(), setup());
        format!(
            r#"[ec2]
installation = "{OURS}"
instance_profile = "{}"
drain_minutes = 15
volume_gib = 30
[ec2.limits]
account = "123456789012"
max_usd_per_day = "20"
max_hosts = 2
longest_life_minutes = 720
least_life_minutes = 10
sweep_age_minutes = 10
[ec2.regions.{r}]
image = "{AMI}"
subnets = ["{}", "{}"]
security_groups = ["{}"]
canary = "{}"
schedules = {{ group = "{}", role_arn = "{}", dead_letter_arn = "{}" }}
"#,
            profile(OURS),
            s[0],
            s[1],
            self.group,
            self.canary,
            schedules.group,
            schedules.role_arn,
            schedules.dead_letter_arn,
        )
    }

    fn provision(&self, account: &str, flags: &str) -> std::process::Output {
        let file = self.folder.join("account.toml");
        std::fs::write(&file, account).unwrap();
        let mut wanted = BTreeMap::from([
            ("--type", "c8i.large"),
            ("--campaign", "c1"),
            ("--deadline", "2h"),
            ("--max-usd", "5"),
            ("--region", "us-east-1"),
        ]);
        let (with_value, alone): (Vec<&str>, Vec<&str>) = flags.split_terminator(',').partition(|f| f.contains('='));
        wanted.extend(with_value.iter().map(|f| f.split_once('=').unwrap()));
        let wanted: Vec<String> = wanted.iter().map(|(flag, value)| format!("{flag} {value}")).collect();
        let line = format!(
            "host provision h1 {} {} --account {} --dry-run",
            wanted.join(" "),
            alone.join(" "),
            file.display()
        );
        drumsctl(&self.peer, "COORDINATOR", &line)
    }

    /// The gates that refuse, each once.
    fn refused(&self, account: &str, flags: &str) -> Vec<String> {
        let output = self.provision(account, &format!("{flags},--json"));
        let plan = json(&output);
        let rows = plan["gates"].as_array().unwrap().iter().filter(|r| r["passed"] == false);
        let mut gates: Vec<String> = rows.map(|r| r["gate"].as_str().unwrap().to_owned()).collect();
        gates.dedup();
        ended(&output, i32::from(!gates.is_empty()));
        assert_eq!(plan["passed"], gates.is_empty());
        for gate in &gates {
            let words = gate.replace("-cap", " cap");
            assert!(warned(&output).contains(&words), "{words}: {}", warned(&output));
        }
        gates
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Nothing that lives on: the schedule that proves schedules is disabled, and goes again.
#[track_caller]
fn changed_nothing(site: &Site) {
    for (action, params) in changes(&site.peer, "COORDINATOR") {
        assert!(["CreateSchedule", "DeleteSchedule"].contains(&action.as_str()), "{action} was carried out");
        assert_eq!(params["Name"], "proof", "{params}");
        assert!(action == "DeleteSchedule" || params["State"] == "DISABLED", "{params}");
    }
    assert_eq!(site.peer.instances().len(), 1, "the canary");
}

fn parameters(call: &Value) -> BTreeMap<String, String> {
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    call["parameters"].as_array().unwrap().iter().map(|p| (text(&p[0]), text(&p[1]))).collect()
}

#[tokio::test]
async fn a_dry_run_shows_every_gate_the_cost_and_the_very_calls_and_makes_none() {
    let site = Site::new("dry-run").await;
    let output = site.provision(&site.account(), "");
    ended(&output, 0);
    let text = said(&output);
    for word in [
        "RunInstances in us-east-1",
        "ClientToken = drums1-0a1b2c3d-",
        "CreateSchedule in us-east-1",
        "Target.Arn = arn:aws:scheduler:::aws-sdk:ec2:terminateInstances",
        "Target.Input = {\"InstanceIds\":[\"i-00000000000000000\"]}",
        "bytes before Base64",
        "at worst to the deadline and 5 minutes beyond, of $5.0000",
        "worst case: $0.",
        "found and spared",
    ] {
        assert!(text.contains(word), "{word:?} is not in\n{text}");
    }
    assert!(!text.contains("\\n"), "a line's end was escaped\n{text}");
    assert!(!text.contains("REFUSED") && warned(&output).contains("nothing was launched"), "{text}");
    changed_nothing(&site);

    // What is shown is what the gate's dry run sent, and user data.
    let plan = json(&site.provision(&site.account(), "--json,--spot,--no-nested"));
    let mut shown = parameters(&plan["calls"][0]);
    assert!(shown.remove("UserData").unwrap().contains("bytes"));
    let tried = site
        .peer
        .calls("RunInstances")
        .into_iter()
        .rev()
        .find(|c| c["params"]["NetworkInterface.1.SubnetId"] == site.subnets[0].as_str());
    let tried = tried.unwrap()["params"].clone();
    let tried = tried.as_object().unwrap().iter().filter(|(name, _)| !["DryRun", "Version"].contains(&name.as_str()));
    let tried: BTreeMap<_, _> = tried.map(|(name, v)| (name.clone(), v.as_str().unwrap().to_owned())).collect();
    assert_eq!(shown, tried);
    assert_eq!((shown["InstanceInitiatedShutdownBehavior"].as_str(), shown["MaxCount"].as_str()), ("terminate", "1"));
    assert_eq!(plan["calls"][1]["call"], "CreateSchedule");
    assert_eq!(parameters(&plan["calls"][1])["Name"], shown["ClientToken"]);
    changed_nothing(&site);
}

#[tokio::test]
async fn a_dry_run_shows_what_each_gate_refuses() {
    let site = Site::new("refusals").await;
    let good = site.account();
    assert_eq!(site.refused(&good, ""), [""; 0]);
    let with = |old: &str, new: &str| {
        assert!(good.contains(old), "{old}");
        good.replacen(old, new, 1)
    };
    let m6i = json!({ "c8i.large": "0.0937", "m6i.large": "0.1", "gp3": "0.08" });
    site.peer.post("settings", &json!({ "prices": { "us-east-1": m6i } }));
    for (account, flags, gates) in [
        (with("123456789012", "210987654321"), "", &["account"][..]),
        (good.clone(), "--deadline=13h", &["deadline"]),
        (good.clone(), "--deadline=5m", &["deadline"]),
        (good.clone(), "--max-usd=0.01", &["run-cap"]),
        (with("max_usd_per_day = \"20\"", "max_usd_per_day = \"0.01\""), "", &["day-cap"]),
        (good.clone(), "--type=m6i.large", &["nested", "launch", "profile"]),
        (good.clone(), "--type=c8i.2xlarge", &["price", "run-cap", "day-cap"]),
        (good.clone(), "--spot", &["launch", "profile"]),
        (with("volume_gib = 30", "volume_gib = 5"), "", &["image"]),
        (
            with(&format!("instance_profile = \"{}\"", profile(OURS)), "instance_profile = \"none-such\""),
            "",
            &["launch", "profile"],
        ),
        (with(&site.canary, "i-0123456789abcdef0"), "", &["terminate", "sweeper"]),
    ] {
        assert_eq!(site.refused(&account, flags), gates, "{flags} {account}");
    }
    let fault = |action: &str, code: &str| {
        let fault = json!({ "action": action, "key_id": "COORDINATOR", "code": code, "status": 403 });
        site.peer.fault(&fault);
    };
    fault("TerminateInstances", "UnauthorizedOperation");
    assert_eq!(site.refused(&good, ""), ["terminate"]);
    fault("CreateSchedule", "AccessDeniedException");
    assert_eq!(site.refused(&good, ""), ["schedule"]);
    fault("DescribeRegions", "UnauthorizedOperation");
    assert_eq!(site.refused(&good, ""), ["hosts"]);
    site.peer.post("settings", &json!({ "quotas": { "L-1216C47A": 1 } }));
    assert_eq!(site.refused(&good, ""), ["quota"]);
    site.peer.post("settings", &json!({ "quotas": { "L-1216C47A": 64 } }));
    // A region that the account's file does not have is no ask at all.
    let output = site.provision(&good, &format!("--region={}", elsewhere()));
    ended(&output, 2);
    assert!(warned(&output).contains("ec2.regions.eu-central-1.subnets"), "{}", warned(&output));
    // Eleven minutes later: no sweep lately, and this machine's clock is not AWS's.
    site.peer.advance_s(660);
    assert_eq!(site.refused(&good, ""), ["clock", "sweeper"]);
    changed_nothing(&site);
}
