use std::collections::BTreeSet;

use drums_provider::{
    cloud::{Canary, Cloud as _},
    failure::FailureKind,
    sweep::{self, Mode, Regions, Scope},
    tags,
};
use serde_json::json;

use crate::peer::{HOUR_MS, OURS, Peer, THEIRS, another, elsewhere, region, run, sdk};

/// More than one page of moto's, which are of a hundred launches.
const MANY: u32 = 105;

#[tokio::test]
async fn a_sweep_goes_over_pages_and_regions_and_spares_whom_it_must() {
    let peer = Peer::start();
    let admin = peer.ec2("TEST").await;
    peer.bind("SWEEPER", "sweeper", OURS);
    let cloud = peer.ec2("SWEEPER").await;
    let template = peer.order(&region(), OURS, 0, 1_000).await;
    let image = template.recipe.image.as_str();
    let mut overdue = BTreeSet::new();
    for number in 1..=MANY {
        overdue.insert(run(&admin, &another(&template, number)).await.unwrap().id.to_string());
    }
    let far = run(&admin, &peer.order(&elsewhere(), OURS, 500, 1_000).await).await.unwrap();
    overdue.insert(far.id.to_string());
    let early = run(&admin, &peer.order(&region(), OURS, 501, HOUR_MS as i64).await).await.unwrap().id.to_string();
    let theirs = run(&admin, &peer.order(&region(), THEIRS, 502, 1_000).await).await.unwrap().id.to_string();
    let canary = sdk::canary(&peer, &region(), image, OURS).await;
    let sdk = sdk::ec2(&peer, &region()).await;
    let foreign = sdk::plain(&sdk, image, &[("Name", "somebody's")]).await;
    let adopted = sdk::plain(&sdk, image, &[(tags::HOST, "h9")]).await;
    // Somebody edits a tag to make one live for ever.
    let edited = overdue.first().unwrap();
    sdk::tag(&peer, &region(), edited, tags::DEADLINE, "2999-01-01T00:00:00Z").await;
    peer.advance_s(2);

    let named = Canary { region: region(), instance: canary.parse().unwrap() };
    let scope = Scope::new(OURS, Regions::All, BTreeSet::from([named]), Mode::Armed, 24 * HOUR_MS).unwrap();
    let view = sweep::look(&cloud, &scope, peer.now()).await;
    assert_eq!(view.regions.len(), 3);
    let decided = sweep::decide(&scope, &view);
    assert!(decided.is_complete(), "{:?}", decided.alarms);
    let done = sweep::carry_out(&cloud, &decided).await;
    let ended: BTreeSet<_> = done.iter().filter(|(_, r)| r.is_ok()).map(|(k, _)| k.instance().to_string()).collect();
    assert_eq!(ended, overdue);
    assert_eq!(done.len(), overdue.len());
    for (id, state) in
        [(&early, "running"), (&theirs, "running"), (&foreign, "running"), (&adopted, "running"), (&canary, "stopped")]
    {
        assert_eq!(&peer.state(id), state);
    }
    let canary = admin.inspect(&region(), &canary.parse().unwrap()).await.unwrap();
    assert_eq!(canary.tags[tags::SWEPT], drums_provider::words::instant_text(decided.now));
}

#[tokio::test]
async fn a_page_that_fails_is_a_failed_list_and_never_a_shorter_one() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let image = peer.order(&region(), OURS, 0, 1_000).await.recipe.image;
    let installation = OURS.to_string();
    let sdk = sdk::ec2(&peer, &region()).await;
    for _ in 0..MANY {
        sdk::plain(&sdk, image.as_str(), &[(tags::INSTALLATION, &installation)]).await;
    }
    assert_eq!(cloud.owned(&region(), OURS).await.unwrap().len(), usize::try_from(MANY).unwrap());
    let fault = json!({ "action": "DescribeInstances", "skip": 1, "code": "InternalError", "status": 500 });
    peer.fault(&fault);
    let failed = cloud.owned(&region(), OURS).await.unwrap_err();
    assert_eq!(failed.kind, FailureKind::Unknown);
}

#[tokio::test]
async fn what_is_owned_is_found_by_its_token_when_its_tags_are_gone() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let order = peer.order(&region(), OURS, 1, HOUR_MS as i64).await;
    let made = run(&cloud, &order).await.unwrap();
    let all = order.tags().into_keys().map(|k| aws_sdk_ec2::types::Tag::builder().key(k).build()).collect();
    let request = sdk::ec2(&peer, &region()).await.delete_tags().resources(made.id.as_str()).set_tags(Some(all));
    request.send().await.unwrap();
    let found = cloud.owned(&region(), OURS).await.unwrap();
    assert_eq!(found.iter().map(|i| (&i.id, i.tags.len())).collect::<Vec<_>>(), [(&made.id, 0)]);
    assert_eq!(cloud.owned(&region(), THEIRS).await.unwrap(), []);
    assert_eq!(cloud.owned(&elsewhere(), OURS).await.unwrap(), []);
}
