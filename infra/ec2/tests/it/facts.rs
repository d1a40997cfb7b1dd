use drums_provider::{
    cloud::{Cloud as _, ImageSource, Market, Quota, VolumeKind},
    failure::FailureKind,
    money::{Source, UsdMicros},
};
use serde_json::json;

use crate::peer::{HOUR_MS, OURS, Peer, START, elsewhere, region, run};

#[tokio::test]
async fn what_must_be_known_before_a_launch_is_asked_of_aws() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let account = cloud.account().await.unwrap();
    assert_eq!((account.account.as_str(), account.clock), ("123456789012", START), "by AWS's clock");
    let regions = cloud.regions().await.unwrap();
    assert_eq!(regions.iter().map(|r| r.as_str()).collect::<Vec<_>>(), ["eu-central-1", "us-east-1", "us-west-2"]);

    let facts = cloud.type_facts(&region(), &"c8i.large".parse().unwrap()).await.unwrap();
    assert_eq!((facts.vcpus, facts.memory_mib), (2, 4_096));
    assert!(facts.nested_virtualisation && !facts.bare_metal && !facts.burstable);
    assert_eq!(facts.architectures, ["x86_64"]);
    assert!(!facts.zones.is_empty());
    let burstable = cloud.type_facts(&region(), &"t3.large".parse().unwrap()).await.unwrap();
    assert!(burstable.burstable && !burstable.nested_virtualisation);
    let metal = cloud.type_facts(&region(), &"m7i.metal-24xl".parse().unwrap()).await.unwrap();
    assert!(metal.bare_metal);
    let unknown = cloud.type_facts(&region(), &"z9.large".parse().unwrap()).await.unwrap_err();
    assert_eq!(unknown.kind, FailureKind::Unsupported, "{unknown}");
    let nested = cloud.nested_types(&region()).await.unwrap();
    assert!(nested.contains(&"c8i.large".parse().unwrap()) && !nested.contains(&"t3.large".parse().unwrap()));

    let name = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64".to_owned();
    let image = cloud.image(&region(), &ImageSource::Parameter(name)).await.unwrap();
    assert_eq!((image.architecture.as_str(), image.state.as_str()), ("x86_64", "available"));
    assert_eq!((image.root_device.as_str(), image.root_gib), ("/dev/xvda", 15));
    assert_eq!(cloud.image(&region(), &ImageSource::Id(image.id.clone())).await.unwrap(), image);
    for gone in [
        ImageSource::Id("ami-0123456789abcdef0".parse().unwrap()),
        ImageSource::Parameter("/aws/service/none-such".to_owned()),
    ] {
        assert_eq!(cloud.image(&region(), &gone).await.unwrap_err().kind, FailureKind::Invalid, "{gone:?}");
    }

    let placement = &peer.placements(&region())[1];
    assert_eq!(cloud.subnet(&region(), &placement.subnet).await.unwrap(), placement.zone);
    let unknown = cloud.subnet(&elsewhere(), &placement.subnet).await.unwrap_err();
    assert_eq!(unknown.kind, FailureKind::Invalid, "a subnet of another region: {unknown}");
}

#[tokio::test]
async fn a_price_has_its_source_and_date_and_an_unknown_one_is_refused() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let kind = "c8i.large".parse().unwrap();
    let price = cloud.hour_price(&region(), &kind).await.unwrap();
    assert_eq!(price.value, UsdMicros(93_700));
    assert!(matches!(&price.source, Source::Api(api) if api.contains("price list")));
    assert_eq!(drums_provider::words::instant_text(price.as_of), "2026-11-01T00:00:00Z");
    assert_eq!(cloud.hour_price(&elsewhere(), &kind).await.unwrap().value, UsdMicros(106_600));
    assert_eq!(cloud.volume_price(&region(), VolumeKind::Gp3).await.unwrap().value, UsdMicros(80_000));

    let unlisted = cloud.hour_price(&region(), &"c8i.metal-48xl".parse().unwrap()).await.unwrap_err();
    assert!(unlisted.kind == FailureKind::NotFound && unlisted.message.contains("unknown"), "{unlisted}");
    peer.post("settings", &json!({ "prices": { "us-east-1": { "c8i.large": "0.0000" } } }));
    let nothing = cloud.hour_price(&region(), &kind).await.unwrap_err();
    assert!(nothing.message.contains("listed as nothing"), "{nothing}");
    assert!(cloud.volume_price(&region(), VolumeKind::Gp3).await.is_err());
}

#[tokio::test]
async fn a_quota_counts_what_runs() {
    let peer = Peer::start();
    let cloud = peer.ec2("A").await;
    let kind = "c8i.large".parse().unwrap();
    let at = region();
    let quota = |market| cloud.vcpus(&at, &kind, market);
    assert_eq!(quota(Market::OnDemand).await.unwrap().value, Quota { limit: 64, used: 0 });
    let made = run(&cloud, &peer.order(&region(), OURS, 1, HOUR_MS as i64).await).await.unwrap();
    let order = peer.order(&region(), OURS, 2, HOUR_MS as i64).await;
    let other = run(&cloud, &order).await.unwrap();
    assert_ne!(made.id, other.id);
    assert_eq!(quota(Market::OnDemand).await.unwrap().value, Quota { limit: 64, used: 4 });
    assert_eq!(quota(Market::Spot).await.unwrap().value, Quota { limit: 32, used: 0 });
    cloud.terminate(&order.host.claim(&other).unwrap().kill_id()).await.unwrap();
    assert_eq!(quota(Market::OnDemand).await.unwrap().value.used, 2);
    let own = cloud.vcpus(&region(), &"p5.48xlarge".parse().unwrap(), Market::OnDemand).await.unwrap_err();
    assert_eq!(own.kind, FailureKind::Unsupported, "{own}");
}
