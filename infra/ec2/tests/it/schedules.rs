use drums_provider::{
    cloud::{Cloud as _, KillSchedule, ScheduleName},
    failure::FailureKind,
};
use serde_json::json;

use crate::peer::{HOUR_MS, OURS, Peer, region, run, sdk, setup};

async fn with_group() -> Peer {
    let peer = Peer::start();
    sdk::scheduler(&peer, &region()).await.create_schedule_group().name(setup().group).send().await.unwrap();
    let role = format!("drums-schedule-{OURS}");
    peer.bind(&role, "schedule", OURS);
    peer
}

/// A host, and the schedule that ends it.
async fn armed(peer: &Peer, number: u32, in_ms: u64) -> KillSchedule {
    let cloud = peer.ec2("A").await;
    let order = peer.order(&region(), OURS, number, HOUR_MS as i64).await;
    let made = run(&cloud, &order).await.unwrap();
    let schedule = KillSchedule {
        name: ScheduleName::of(&order.token()),
        region: region(),
        setup: setup(),
        instance: made.id,
        at: peer.now().plus_ms(in_ms),
        enabled: true,
    };
    cloud.put_schedule(&schedule).await.unwrap();
    schedule
}

#[tokio::test]
async fn a_schedule_is_made_read_back_and_fires_at_its_time() {
    let peer = with_group().await;
    let cloud = peer.ec2("A").await;
    let made = armed(&peer, 1, 600_000).await;
    let read = || cloud.schedule(&made.region, &made.name, &made.setup);
    assert_eq!(read().await.unwrap(), Some(made.clone()));
    peer.advance_s(599);
    assert_eq!(peer.state(&made.instance), "running");
    peer.advance_s(1);
    assert_eq!(peer.state(&made.instance), "terminated");
    let fired: Vec<_> = peer.calls("TerminateInstances").into_iter().filter(|e| e["by"] == "scheduler").collect();
    assert_eq!(fired.len(), 1);
    assert_eq!(fired[0]["ids"], json!([made.instance.as_str()]), "one id");
    assert_eq!(read().await.unwrap(), Some(made.clone()), "it stays: it is evidence");
    for _ in 0..2 {
        cloud.delete_schedule(&made.region, &made.name, &made.setup).await.unwrap();
        assert_eq!(read().await.unwrap(), None);
    }
}

#[tokio::test]
async fn one_of_the_same_name_becomes_the_one_that_is_wanted() {
    let peer = with_group().await;
    let cloud = peer.ec2("A").await;
    let first = armed(&peer, 1, 600_000).await;
    cloud.put_schedule(&first).await.unwrap();
    let earlier = KillSchedule { at: peer.now().plus_ms(60_000), ..first.clone() };
    cloud.put_schedule(&earlier).await.unwrap();
    assert_eq!(cloud.schedule(&first.region, &first.name, &first.setup).await.unwrap(), Some(earlier));
    peer.advance_s(60);
    assert_eq!(peer.state(&first.instance), "terminated");
}

#[tokio::test]
async fn a_schedule_that_somebody_changed_is_not_taken_for_ours() {
    use aws_sdk_scheduler::types::{FlexibleTimeWindow, FlexibleTimeWindowMode, Target};
    let peer = with_group().await;
    let cloud = peer.ec2("A").await;
    let made = armed(&peer, 1, 600_000).await;
    let read = || cloud.schedule(&made.region, &made.name, &made.setup);
    let scheduler = sdk::scheduler(&peer, &region()).await;
    let off = || FlexibleTimeWindow::builder().mode(FlexibleTimeWindowMode::Off).build().unwrap();
    let late = FlexibleTimeWindow::builder().mode(FlexibleTimeWindowMode::Flexible).maximum_window_in_minutes(900);
    let target = |arn: &str, input: &str| {
        let arn = format!("arn:aws:scheduler:::aws-sdk:{arn}");
        Target::builder().arn(arn).role_arn(setup().role_arn).input(input).build().unwrap()
    };
    let one = format!(r#"{{"InstanceIds": ["{}"]}}"#, made.instance);
    let two = format!(r#"{{"InstanceIds": ["{0}", "{0}"]}}"#, made.instance);
    let terminate = "ec2:terminateInstances";
    for (what, expression, window, target) in [
        ("late", "at(2026-12-01T00:00:00)", late.build().unwrap(), target(terminate, &one)),
        ("again and again", "rate(5 minutes)", off(), target(terminate, &one)),
        ("another call", "at(2026-12-01T00:00:00)", off(), target("ec2:stopInstances", &one)),
        ("two ids", "at(2026-12-01T00:00:00)", off(), target(terminate, &two)),
        ("no input", "at(2026-12-01T00:00:00)", off(), target(terminate, "{}")),
    ] {
        let change = scheduler.update_schedule().name(made.name.as_str()).group_name(&made.setup.group);
        let change = change.schedule_expression(expression).flexible_time_window(window).target(target);
        change.send().await.unwrap();
        let failed = read().await.unwrap_err();
        assert_eq!(failed.kind, FailureKind::Unknown, "{what}: {failed}");
    }
    // Another time alone is a schedule like ours, and shown as it is.
    cloud.put_schedule(&KillSchedule { enabled: false, ..made.clone() }).await.unwrap();
    assert_eq!(read().await.unwrap(), Some(KillSchedule { enabled: false, ..made.clone() }));
}

#[tokio::test]
async fn what_schedules_need_is_proved_beforehand_and_leaves_nothing() {
    let peer = with_group().await;
    let cloud = peer.ec2("A").await;
    let said = cloud.prove_schedules(&region(), &setup()).await.unwrap();
    assert!(said.contains(&setup().group), "{said}");
    let left = sdk::scheduler(&peer, &region()).await.list_schedules().send().await.unwrap();
    assert_eq!(left.schedules().len(), 0);
    assert_eq!(peer.calls("CreateSchedule")[0]["params"]["State"], "DISABLED");

    peer.bind("B", "coordinator", crate::peer::THEIRS);
    let denied = peer.ec2("B").await.prove_schedules(&region(), &setup()).await.unwrap_err();
    assert_eq!(denied.kind, FailureKind::Denied, "{denied}");
}

#[tokio::test]
async fn a_lost_reply_leaves_one_schedule() {
    let peer = with_group().await;
    let cloud = peer.ec2("A").await;
    let made = armed(&peer, 1, 600_000).await;
    cloud.delete_schedule(&made.region, &made.name, &made.setup).await.unwrap();
    peer.fault(&json!({ "action": "CreateSchedule", "lose": true }));
    assert_eq!(cloud.put_schedule(&made).await.unwrap_err().kind, FailureKind::Unknown);
    cloud.put_schedule(&made).await.unwrap();
    assert_eq!(cloud.schedule(&made.region, &made.name, &made.setup).await.unwrap(), Some(made));
}
