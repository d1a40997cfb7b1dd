use drums_ec2::{Ec2, Settings};
use drums_provider::{
    cloud::{Attributes, Cloud as _, InstanceState, Market},
    failure::FailureKind,
};
use serde_json::json;

use crate::peer::{HOUR_MS, OURS, Peer, region, run, user_data};

const LIFE_MS: i64 = HOUR_MS as i64;

#[tokio::test]
async fn one_call_launches_a_host_with_everything() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let order = peer.order(&region(), OURS, 1, LIFE_MS).await;
    let made = run(&cloud, &order).await.unwrap();
    let changes: Vec<_> = peer.get("journal").as_array().unwrap().iter().map(|e| e["action"].clone()).collect();
    let changes: Vec<_> = changes.iter().filter(|a| !a.as_str().unwrap().starts_with(['D', 'G'])).collect();
    assert_eq!(changes, ["RunInstances"], "all of it in this one call");

    let seen = &peer.instances()[0];
    assert_eq!(seen["id"], made.id.as_str());
    assert_eq!(seen["tags"], json!(order.tags()));
    assert_eq!(seen["client_token"], order.token().to_string());
    assert_eq!(seen["shutdown_behavior"], "terminate");
    assert_eq!(seen["http_tokens"], "required");
    assert_eq!(seen["cpu_options"]["NestedVirtualization"], "enabled");
    assert_eq!(seen["user_data"], user_data(&order).0);
    assert_eq!(seen["protected"], false);
    let volumes: Vec<_> = seen["volumes"].as_object().unwrap().values().collect();
    assert_eq!(volumes, [true], "its volume goes with it");

    // And read back.
    let back = cloud.inspect(&region(), &made.id).await.unwrap();
    assert_eq!(back.attributes, Some(Ok(Attributes::MORTAL)));
    assert_eq!((back.nested, back.imds_v2), (Some(true), Some(true)));
    assert_eq!(back.tags, order.tags());
    assert_eq!(back.token, Some(order.token().to_string()));
    assert_eq!((back.state, back.launched), (InstanceState::Running, peer.now()));
    assert_eq!(back.subnet.as_ref(), Some(&order.placement.subnet));
    assert_eq!(back.zone.as_ref(), Some(&order.placement.zone));
    assert_eq!(back.kind.as_ref(), Some(&order.recipe.kind));
    assert_eq!(back.image.as_ref(), Some(&order.recipe.image));
    assert_eq!(back.security_groups, order.recipe.security_groups);
    assert!(!back.public_address, "although its subnet gives one by itself");
    assert_eq!(back.profile.as_ref(), Some(&order.recipe.profile));
    let volumes: Vec<_> = back.volumes.iter().map(|v| (v.id.clone(), v.delete_on_termination)).collect();
    assert_eq!(volumes.len(), 1);
    assert!(volumes[0].1);
    assert_eq!(cloud.volumes(&region(), &order.token()).await.unwrap(), [volumes[0].0.clone()], "by its tag");
    assert!(order.host.claim(&back).is_some(), "ours by its token");
}

#[tokio::test]
async fn a_lost_reply_and_a_retry_give_one_instance() {
    let peer = Peer::start();
    let cloud = Ec2::new(Settings { call_timeout_ms: 2_000, ..peer.settings("A") }).await;
    let lost = [
        ("the connection ends", json!({ "action": "RunInstances", "lose": true })),
        (
            "an error after the fact",
            json!({ "action": "RunInstances", "code": "InternalError", "status": 500, "after": true }),
        ),
        ("too late", json!({ "action": "RunInstances", "delay_s": 4 })),
    ];
    for (number, (how, fault)) in (1..).zip(lost) {
        let order = peer.order(&region(), OURS, number, LIFE_MS).await;
        peer.fault(&fault);
        let failed = run(&cloud, &order).await.unwrap_err();
        assert_eq!(failed.kind, FailureKind::Unknown, "{how}: {failed}");
        let again = run(&cloud, &order).await.unwrap();
        let found = cloud.by_token(&region(), &order.token()).await.unwrap();
        assert_eq!(found.iter().map(|i| &i.id).collect::<Vec<_>>(), [&again.id], "{how}");
    }
    // And a packet that arrives twice.
    let order = peer.order(&region(), OURS, 9, LIFE_MS).await;
    peer.fault(&json!({ "action": "RunInstances", "twice": true }));
    let made = run(&cloud, &order).await.unwrap();
    assert_eq!(cloud.by_token(&region(), &order.token()).await.unwrap(), [made]);
    assert_eq!(peer.instances().len(), 4);
}

#[tokio::test]
async fn another_order_under_the_same_token_launches_nothing() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let mut order = peer.order(&region(), OURS, 1, LIFE_MS).await;
    run(&cloud, &order).await.unwrap();
    order.recipe.volume_gib += 1;
    let refused = run(&cloud, &order).await.unwrap_err();
    assert_eq!(refused.kind, FailureKind::TokenReused, "{refused}");
    assert_eq!(peer.instances().len(), 1);
}

#[tokio::test]
async fn where_there_is_no_capacity_the_next_subnet_takes_the_same_token() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let mut order = peer.order(&region(), OURS, 1, LIFE_MS).await;
    let (full, next) = (order.placement.clone(), order.recipe.placements[1].clone());
    let place = json!({ "NetworkInterface.1.SubnetId": full.subnet.as_str() });
    for code in ["InsufficientInstanceCapacity", "InsufficientFreeAddressesInSubnet"] {
        peer.fault(&json!({ "action": "RunInstances", "where": place, "code": code, "status": 500 }));
        let failed = run(&cloud, &order).await.unwrap_err();
        assert_eq!((failed.kind, failed.code.as_str()), (FailureKind::Capacity, code));
    }
    assert_eq!(peer.calls("RunInstances").len(), 2, "each was one attempt: the SDK would repeat a 500 by itself");
    order.placement = next.clone();
    let made = run(&cloud, &order).await.unwrap();
    assert_eq!((made.subnet, made.zone), (Some(next.subnet), Some(next.zone)));
    assert_eq!(peer.instances().len(), 1);
}

#[tokio::test]
async fn a_dry_run_makes_nothing_and_says_what_would_be_refused() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let order = peer.order(&region(), OURS, 1, LIFE_MS).await;
    cloud.would_run(&order).await.unwrap();

    let with = |change: &dyn Fn(&mut drums_provider::cloud::Recipe)| {
        let mut order = order.clone();
        change(&mut order.recipe);
        order
    };
    let table = [
        (
            "a type without nested virtualisation",
            with(&|r| r.kind = "m6i.large".parse().unwrap()),
            FailureKind::Unsupported,
        ),
        ("spot with nested virtualisation", with(&|r| r.market = Market::Spot), FailureKind::Unsupported),
        ("an image that is gone", with(&|r| r.image = "ami-0123456789abcdef0".parse().unwrap()), FailureKind::Invalid),
        ("no such type", with(&|r| r.kind = "z9.large".parse().unwrap()), FailureKind::Invalid),
    ];
    for (what, order, kind) in table {
        if kind != FailureKind::Invalid {
            let refused = cloud.would_run(&order).await.unwrap_err();
            assert_eq!(refused.kind, kind, "{what}: {refused}");
        }
        let refused = run(&cloud, &order).await.unwrap_err();
        assert_eq!(refused.kind, kind, "{what}: {refused}");
    }
    assert_eq!(peer.instances().len(), 0);
    assert!(run(&cloud, &with(&|r| (r.market, r.nested) = (Market::Spot, false))).await.is_ok(), "spot without it");
}

#[tokio::test]
async fn each_call_is_one_attempt_and_throttling_is_told() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let order = peer.order(&region(), OURS, 1, LIFE_MS).await;
    peer.fault(&json!({ "key_id": "A", "throttle": true, "count": null }));
    let setup = crate::peer::setup();
    let name = drums_provider::cloud::ScheduleName::of(&order.token());
    let failed = [
        run(&cloud, &order).await.unwrap_err(),
        cloud.by_token(&region(), &order.token()).await.unwrap_err(),
        cloud.schedule(&region(), &name, &setup).await.unwrap_err(),
        cloud.hour_price(&region(), &order.recipe.kind).await.unwrap_err(),
        cloud.account().await.unwrap_err(),
    ];
    for error in &failed {
        assert_eq!(error.kind, FailureKind::Throttled, "{error}");
    }
    let journal = peer.get("journal");
    let ours = journal.as_array().unwrap().iter().filter(|e| e["by"] == "A").count();
    assert_eq!(ours, failed.len(), "none was repeated");
}
