use drums_provider::{
    cloud::{Canary, Cloud, ImageSource, KillSchedule, Market, ScheduleName, VolumeKind},
    failure::FailureKind,
    host::{Belongs, OwnedInstance},
    tags,
    words::InstanceId,
};
use serde_json::Value;

use crate::peer::{AMI, HOUR_MS, OURS, Peer, THEIRS, region, run, sdk, setup};

/// Everything that the port has, by one whom the coordinator's policy binds, and what its schedules do later: no call is
/// refused, and of what the policies of both grant nothing is unused.
#[tokio::test]
async fn every_call_is_allowed_and_nothing_wider_is_granted() {
    let peer = Peer::start();
    peer.bind("COORDINATOR", "coordinator", OURS);
    peer.bind(&format!("drums-schedule-{OURS}"), "schedule", OURS);
    sdk::scheduler(&peer, &region()).await.create_schedule_group().name(setup().group).send().await.unwrap();
    let cloud = peer.ec2("COORDINATOR").await;

    cloud.account().await.unwrap();
    cloud.regions().await.unwrap();
    let image = cloud.image(&region(), &ImageSource::Parameter(AMI.to_owned())).await.unwrap();
    let order = peer.order(&region(), OURS, 1, HOUR_MS as i64).await;
    let kind = order.recipe.kind.clone();
    cloud.type_facts(&region(), &kind).await.unwrap();
    cloud.nested_types(&region()).await.unwrap();
    cloud.subnet(&region(), &order.placement.subnet).await.unwrap();
    cloud.hour_price(&region(), &kind).await.unwrap();
    cloud.volume_price(&region(), VolumeKind::Gp3).await.unwrap();
    cloud.vcpus(&region(), &kind, Market::OnDemand).await.unwrap();
    cloud.prove_schedules(&region(), &setup()).await.unwrap();
    cloud.would_run(&order).await.unwrap();
    let made = run(&cloud, &order).await.unwrap();
    let owned = order.host.claim(&made).unwrap();
    cloud.by_token(&region(), &order.token()).await.unwrap();
    cloud.inspect(&region(), &made.id).await.unwrap();
    cloud.owned(&region(), OURS).await.unwrap();
    cloud.volumes(&region(), &order.token()).await.unwrap();
    let mut schedule = KillSchedule {
        name: ScheduleName::of(&order.token()),
        region: region(),
        setup: setup(),
        instance: made.id.clone(),
        at: peer.now().plus_ms(60_000),
        enabled: true,
    };
    cloud.put_schedule(&schedule).await.unwrap();
    schedule.at = peer.now().plus_ms(120_000);
    cloud.put_schedule(&schedule).await.unwrap();
    cloud.schedule(&region(), &schedule.name, &setup()).await.unwrap();
    cloud.delete_schedule(&region(), &schedule.name, &setup()).await.unwrap();
    cloud.would_terminate(&region(), &made.id).await.unwrap();
    cloud.unprotect(&owned.kill_id()).await.unwrap();
    cloud.end_on_shutdown(&owned.kill_id()).await.unwrap();
    cloud.terminate(&owned.kill_id()).await.unwrap();

    // Launched by somebody, with our tag and no profile: it is known, and ended, by its tag.
    let ec2 = sdk::ec2(&peer, &region()).await;
    let installation = OURS.to_string();
    let by_hand = [(tags::INSTALLATION, installation.as_str())];
    let id: InstanceId = sdk::plain(&ec2, image.id.as_str(), &by_hand).await.parse().unwrap();
    let seen = cloud.inspect(&region(), &id).await.unwrap();
    let Belongs::Ours(tagged) = OwnedInstance::read(OURS, &seen, HOUR_MS) else { panic!("{seen:?}") };
    cloud.would_terminate(&region(), &id).await.unwrap();
    cloud.unprotect(&tagged.kill_id()).await.unwrap();
    cloud.terminate(&tagged.kill_id()).await.unwrap();

    // What a schedule ends: one by its tag, and one by its profile, whose tags are gone; and what it may not end, it tells.
    for (number, tagged) in [(2, true), (3, false)] {
        let order = peer.order(&region(), OURS, number, HOUR_MS as i64).await;
        let id: InstanceId = if tagged {
            sdk::plain(&ec2, image.id.as_str(), &by_hand).await.parse().unwrap()
        } else {
            let made = run(&cloud, &order).await.unwrap();
            let tag = aws_sdk_ec2::types::Tag::builder().key(tags::INSTALLATION).build();
            ec2.delete_tags().resources(made.id.as_str()).tags(tag).send().await.unwrap();
            made.id
        };
        let name = ScheduleName::of(&order.token());
        let at = peer.now().plus_ms(60_000);
        cloud.put_schedule(&KillSchedule { name, instance: id.clone(), at, ..schedule.clone() }).await.unwrap();
        peer.advance_s(60);
        assert_eq!(peer.state(&id), "terminated", "tagged: {tagged}");
    }
    let foreign = sdk::plain(&ec2, image.id.as_str(), &[]).await;
    let at = peer.now().plus_ms(60_000);
    cloud.put_schedule(&KillSchedule { instance: foreign.parse().unwrap(), at, ..schedule.clone() }).await.unwrap();
    peer.advance_s(60);
    assert_eq!(peer.state(&foreign), "running");

    let grants = peer.get("grants");
    for policy in ["coordinator", "schedule"] {
        let unused: Vec<&Value> = grants[policy]["unused"].as_array().unwrap().iter().collect();
        assert_eq!(unused, Vec::<&Value>::new(), "granted by {policy} and used by nothing");
    }
}

#[tokio::test]
async fn nothing_of_another_installation_is_reached() {
    let peer = Peer::start();
    peer.bind("OTHER", "coordinator", THEIRS);
    peer.bind("SWEEPER", "sweeper", THEIRS);
    let (admin, other) = (peer.ec2("TEST").await, peer.ec2("OTHER").await);
    let order = peer.order(&region(), OURS, 1, HOUR_MS as i64).await;
    let launched = run(&other, &order).await.unwrap_err();
    assert_eq!(launched.kind, FailureKind::Denied, "a host of ours launched by theirs: {launched}");
    let made = run(&admin, &order).await.unwrap();
    let kill = order.host.claim(&made).unwrap().kill_id();
    for cloud in [&other, &peer.ec2("SWEEPER").await] {
        assert_eq!(cloud.terminate(&kill).await.unwrap_err().kind, FailureKind::Denied);
        assert_eq!(cloud.unprotect(&kill).await.unwrap_err().kind, FailureKind::Denied);
        assert_eq!(cloud.would_terminate(&region(), &made.id).await.unwrap_err().kind, FailureKind::Denied);
        let canary = Canary { region: region(), instance: made.id.clone() };
        assert_eq!(cloud.note_sweep(&canary, peer.now()).await.unwrap_err().kind, FailureKind::Denied);
    }
    let name = ScheduleName::of(&order.token());
    assert_eq!(other.schedule(&region(), &name, &setup()).await.unwrap_err().kind, FailureKind::Denied);
    assert_eq!(peer.state(&made.id), "running");
    assert_eq!(made.tags, order.tags());
}
