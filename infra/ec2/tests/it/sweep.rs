//! `drumsctl sweep`.

use drums_common::ids::InstallationId;
use drums_ec2::Ec2;
use drums_provider::tags;
use serde_json::json;

use crate::{
    ctl::{changes, drumsctl, ended, json, said, warned},
    peer::{HOUR_MS, OURS, Peer, THEIRS, elsewhere, region, run, sdk},
};

/// An account of two installations: of each an overdue host and a canary; and of ours a young host and an overdue one
/// elsewhere.
struct Site {
    peer: Peer,
    overdue: String,
    far: String,
    young: String,
    theirs: String,
    foreign: String,
    canary: String,
    their_canary: String,
}

impl Site {
    async fn new() -> Self {
        let peer = Peer::of_today();
        peer.bind("SWEEPER", "sweeper", OURS);
        peer.bind("THEIR-SWEEPER", "sweeper", THEIRS);
        let admin = peer.ec2("TEST").await;
        let image = peer.order(&region(), OURS, 0, 1_000).await.recipe.image;
        let launched = |number: u32, at, whose: InstallationId, life_ms: i64| {
            let (peer, admin): (&Peer, &Ec2) = (&peer, &admin);
            async move { run(admin, &peer.order(&at, whose, number, life_ms).await).await.unwrap().id.to_string() }
        };
        let overdue = launched(1, region(), OURS, 1_000).await;
        let far = launched(2, elsewhere(), OURS, 1_000).await;
        let young = launched(3, region(), OURS, HOUR_MS as i64).await;
        let theirs = launched(4, region(), THEIRS, 1_000).await;
        let foreign = sdk::plain(&sdk::ec2(&peer, &region()).await, image.as_str(), &[("Name", "somebody's")]).await;
        let canary = sdk::canary(&peer, &region(), image.as_str(), OURS).await;
        let their_canary = sdk::canary(&peer, &region(), image.as_str(), THEIRS).await;
        peer.advance_s(3);
        Self { peer, overdue, far, young, theirs, foreign, canary, their_canary }
    }

    fn line(&self, more: &str) -> String {
        format!("sweep --installation {OURS} --canary {}/{} {more}", region(), self.canary)
    }

    /// Ids of those that a terminate was called for by this key, one call each.
    fn terminated(&self, key: &str) -> Vec<String> {
        let calls = changes(&self.peer, key).into_iter().filter(|(action, _)| action == "TerminateInstances");
        let mut ids: Vec<String> = calls
            .map(|(_, params)| {
                assert!(params.get("InstanceId.2").is_none(), "{params}");
                params["InstanceId.1"].as_str().unwrap().to_owned()
            })
            .collect();
        ids.sort();
        ids
    }
}

fn sorted(ids: &[&String]) -> Vec<String> {
    let mut ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    ids.sort();
    ids
}

#[tokio::test]
async fn drumsctl_ends_what_is_overdue_in_every_region_and_spares_the_rest() {
    let site = Site::new().await;
    let shadow = drumsctl(&site.peer, "SWEEPER", &site.line("--shadow"));
    ended(&shadow, 0);
    assert!(said(&shadow).contains("2 would be ended"), "{}", said(&shadow));
    assert_eq!(changes(&site.peer, "SWEEPER"), [], "a shadow changes nothing");

    let output = drumsctl(&site.peer, "SWEEPER", &site.line("--json"));
    ended(&output, 0);
    assert_eq!(site.terminated("SWEEPER"), sorted(&[&site.overdue, &site.far]));
    let swept = json(&output);
    assert_eq!((&swept["complete"], &swept["mode"]), (&json!(true), &json!("armed")));
    assert_eq!(swept["canaries"], json!([{ "region": region(), "instance": site.canary }]));
    let rows = swept["rows"].as_array().unwrap();
    let row = |id: &String| rows.iter().find(|r| r["instance"] == id.as_str()).unwrap_or_else(|| panic!("{id}"));
    assert_eq!(row(&site.overdue)["done"], json!({ "ended": "shutting-down" }));
    assert_eq!((&row(&site.far)["region"], &row(&site.far)["whose"]), (&json!(elsewhere()), &json!("ours")));
    for (id, why) in [
        (&site.canary, "canary"),
        (&site.young, "not due"),
        (&site.theirs, "another installation's"),
        (&site.their_canary, "another installation's"),
    ] {
        assert_eq!((&row(id)["why"], &row(id)["done"]), (&json!(why), &json!("spared")));
    }
    assert!(row(&site.young)["due"].as_str().is_some() && !rows.iter().any(|r| r["instance"] == site.foreign.as_str()));
    for id in [&site.young, &site.theirs, &site.foreign] {
        assert_eq!(site.peer.state(id), "running");
    }
    let canary = site.peer.instances().into_iter().find(|i| i["id"] == site.canary.as_str()).unwrap();
    assert_eq!(canary["state"], "stopped");

    // The other installation's sweep ends its own, and nothing of ours.
    let line = format!("sweep --installation {THEIRS} --region {} --canary {}", region(), site.their_canary);
    let theirs = drumsctl(&site.peer, "THEIR-SWEEPER", &line);
    ended(&theirs, 0);
    assert_eq!(site.terminated("THEIR-SWEEPER"), sorted(&[&site.theirs]));
    assert!(said(&theirs).contains("1 ended"), "{}", said(&theirs));
    let again = drumsctl(&site.peer, "SWEEPER", &site.line("--shadow"));
    ended(&again, 0);
    assert!(said(&again).contains("0 would be ended") && said(&again).contains("ended before"), "{}", said(&again));
}

#[tokio::test]
async fn drumsctl_without_its_canary_fails_and_ends_what_it_did_find() {
    let site = Site::new().await;
    let gone = "i-0123456789abcdef0";
    let output = drumsctl(&site.peer, "SWEEPER", &site.line(&format!("--canary {}/{gone}", elsewhere())));
    ended(&output, 20);
    let told = warned(&output);
    assert!(told.contains(gone) && told.contains("was not found") && told.contains("help:"), "{told}");
    assert_eq!(site.terminated("SWEEPER"), sorted(&[&site.overdue, &site.far]));
    let noted = changes(&site.peer, "SWEEPER").into_iter().any(|(action, _)| action == "CreateTags");
    assert!(!noted, "launches must not be told of it");
}

#[tokio::test]
async fn drumsctl_with_a_dark_region_or_a_host_that_resists_fails_and_names_it() {
    let site = Site::new().await;
    let dark = json!({
        "action": "DescribeInstances", "region": elsewhere(), "key_id": "SWEEPER", "code": "UnauthorizedOperation",
        "status": 403, "count": null,
    });
    site.peer.fault(&dark);
    let output = drumsctl(&site.peer, "SWEEPER", &site.line(""));
    ended(&output, 1);
    let told = warned(&output);
    assert!(told.contains("eu-central-1 was not seen") && told.contains("compare the caller's policy"), "{told}");
    assert!(told.contains("runbooks/clean-an-account.md"), "{told}");
    assert_eq!(site.terminated("SWEEPER"), sorted(&[&site.overdue]));
    assert_eq!(site.peer.state(&site.far), "running");

    site.peer.fault(&json!({ "action": "TerminateInstances", "code": "InternalError", "status": 500 }));
    let only = format!("sweep --installation {OURS} --region {} --canary {}", region(), site.canary);
    site.peer.post("edit", &json!({ "instance": site.young, "tags": { (tags::DEADLINE): "2020-01-01T00:00:00Z" } }));
    let output = drumsctl(&site.peer, "SWEEPER", &only);
    ended(&output, 1);
    assert!(said(&output).contains("NOT ENDED") && warned(&output).contains(&site.young), "{}", said(&output));
    ended(&drumsctl(&site.peer, "SWEEPER", &only), 0);
    assert_ne!(site.peer.state(&site.young), "running");
}
