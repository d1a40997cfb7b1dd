use drums_ec2::{Ec2, Settings};
use drums_provider::{
    cloud::{Attributes, Cloud as _, InstanceState},
    failure::FailureKind,
    host::KillId,
};
use serde_json::json;

use crate::peer::{HOUR_MS, OURS, Peer, region, run, sdk};

async fn host(peer: &Peer, cloud: &Ec2, number: u32) -> KillId {
    let order = peer.order(&region(), OURS, number, HOUR_MS as i64).await;
    let made = run(cloud, &order).await.unwrap();
    order.host.claim(&made).unwrap().kill_id()
}

#[tokio::test]
async fn each_terminate_names_one_instance_and_only_what_is_seen_is_gone() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let (one, other) = (host(&peer, &cloud, 1).await, host(&peer, &cloud, 2).await);
    peer.post("settings", &json!({ "seconds": { "shutting-down": 300 } }));
    cloud.would_terminate(&region(), one.instance()).await.unwrap();
    assert_eq!(peer.state(one.instance()), "running", "a dry run ends nothing");
    assert_eq!(cloud.terminate(&one).await.unwrap(), InstanceState::ShuttingDown);
    assert_eq!(cloud.terminate(&one).await.unwrap(), InstanceState::ShuttingDown, "again is no failure");
    assert_eq!(cloud.inspect(&region(), one.instance()).await.unwrap().state, InstanceState::ShuttingDown);
    peer.advance_s(300);
    assert_eq!(cloud.inspect(&region(), one.instance()).await.unwrap().state, InstanceState::Terminated);
    assert_eq!(peer.state(other.instance()), "running");
    for call in peer.calls("TerminateInstances") {
        let ids = call["params"].as_object().unwrap().keys().filter(|k| k.starts_with("InstanceId")).count();
        assert_eq!(ids, 1, "{call}");
    }

    // One that hangs is not gone, however long.
    peer.post("settings", &json!({ "seconds": { "shutting-down": null } }));
    cloud.terminate(&other).await.unwrap();
    peer.advance_s(86_400);
    assert_eq!(cloud.inspect(&region(), other.instance()).await.unwrap().state, InstanceState::ShuttingDown);
}

#[tokio::test]
async fn protection_that_somebody_switched_on_is_told_and_switched_off() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let kill = host(&peer, &cloud, 1).await;
    sdk::protect(&peer, &region(), kill.instance().as_str()).await;
    sdk::protect_from_stops(&peer, &region(), kill.instance().as_str()).await;
    let both = Attributes { protected: true, stop_protected: true, ..Attributes::MORTAL };
    let attributes = || async { cloud.inspect(&region(), kill.instance()).await.unwrap().attributes };
    assert_eq!(attributes().await, Some(Ok(both)));
    let refused = cloud.terminate(&kill).await.unwrap_err();
    assert_eq!(refused.kind, FailureKind::Protected, "{refused}");
    cloud.unprotect(&kill).await.unwrap();
    assert_eq!(attributes().await, Some(Ok(Attributes::MORTAL)));
    cloud.terminate(&kill).await.unwrap();
    assert_eq!(peer.state(kill.instance()), "terminated");
    assert_eq!(attributes().await, None, "of what goes they are not asked for");
}

#[tokio::test]
async fn a_shutdown_that_somebody_made_a_stop_is_made_an_end_again_by_a_call_of_its_own() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let kill = host(&peer, &cloud, 1).await;
    let wrong = Attributes { terminate_on_shutdown: false, ..Attributes::MORTAL };
    let attributes = || async { cloud.inspect(&region(), kill.instance()).await.unwrap().attributes };
    peer.post("edit", &json!({ "instance": kill.instance(), "instance_initiated_shutdown_behavior": "stop" }));
    assert_eq!(attributes().await, Some(Ok(wrong)));
    cloud.mend(&kill, wrong).await.unwrap();
    let calls = peer.calls("ModifyInstanceAttribute");
    assert_eq!(calls.len(), 1, "EC2 takes one attribute in each: {calls:?}");
    assert_eq!(calls[0]["params"]["InstanceId"], kill.instance().as_str());
    assert_eq!(calls[0]["params"]["InstanceInitiatedShutdownBehavior.Value"], "terminate");
    assert_eq!(attributes().await, Some(Ok(Attributes::MORTAL)));
}

#[tokio::test]
async fn why_attributes_could_not_be_asked_for_is_told_with_what_was_seen() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let kill = host(&peer, &cloud, 1).await;
    for skip in 0..3 {
        let call = "DescribeInstanceAttribute";
        peer.fault(&json!({ "action": call, "skip": skip, "code": "UnauthorizedOperation", "status": 403 }));
        let seen = cloud.inspect(&region(), kill.instance()).await.unwrap();
        let denied = seen.attributes.unwrap().unwrap_err();
        assert_eq!((seen.state, denied.kind), (InstanceState::Running, FailureKind::Denied), "call {skip}");
    }
}

#[tokio::test]
async fn volumes_are_gone_with_their_host() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let order = peer.order(&region(), OURS, 1, HOUR_MS as i64).await;
    let made = run(&cloud, &order).await.unwrap();
    assert_eq!(cloud.volumes(&region(), &order.token()).await.unwrap().len(), 1);
    cloud.terminate(&order.host.claim(&made).unwrap().kill_id()).await.unwrap();
    assert_eq!(cloud.volumes(&region(), &order.token()).await.unwrap(), []);
}

#[tokio::test]
async fn whatever_becomes_of_a_terminate_is_told_as_it_is() {
    let peer = Peer::start();
    let cloud = Ec2::new(Settings { call_timeout_ms: 1_500, ..peer.settings("A") }).await;
    let kill = host(&peer, &cloud, 1).await;
    let about = |more: serde_json::Value| {
        let mut fault = json!({ "action": "TerminateInstances" });
        fault.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fault
    };
    for (fault, kind) in [
        (json!({ "code": "InternalError", "status": 500 }), FailureKind::Unknown),
        (json!({ "code": "Unavailable", "status": 503 }), FailureKind::Unknown),
        (json!({ "throttle": true }), FailureKind::Throttled),
        (json!({ "code": "InvalidInstanceID.NotFound" }), FailureKind::NotFound),
        (json!({ "code": "UnauthorizedOperation", "status": 403 }), FailureKind::Denied),
        (json!({ "code": "InternalError", "status": 500, "delay_s": 3 }), FailureKind::Unknown),
    ] {
        peer.fault(&about(fault));
        let failed = cloud.terminate(&kill).await.unwrap_err();
        assert_eq!(failed.kind, kind, "{failed}");
        assert_eq!(peer.state(kill.instance()), "running");
    }
    peer.fault(&about(json!({ "lose": true })));
    assert_eq!(cloud.terminate(&kill).await.unwrap_err().kind, FailureKind::Unknown);
    assert_eq!(peer.state(kill.instance()), "terminated", "it was carried out all the same");
}

#[tokio::test]
async fn credentials_and_connections_that_fail_are_told_apart() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    for state in ["revoked", "expired"] {
        peer.post("principals", &json!({ "A": { "policy": "coordinator", "state": state } }));
        // The clocks agree, or what expired would be the request.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        if now > peer.get("clock")["now"].as_f64().unwrap() as u64 {
            peer.post("clock", &json!({ "now": now }));
        }
        for failed in [cloud.regions().await.unwrap_err(), cloud.account().await.unwrap_err()] {
            let skewed = failed.kind == FailureKind::Skewed && now < 1_796_000_000 - 300;
            assert!(failed.kind == FailureKind::Expired || skewed, "{state}: {failed}");
        }
    }
    let settings = Settings { endpoint: Some("http://127.0.0.1:1".to_owned()), ..peer.settings("A") };
    let failed = Ec2::new(settings).await.regions().await.unwrap_err();
    assert_eq!(failed.kind, FailureKind::NotSent, "{failed}");
}
