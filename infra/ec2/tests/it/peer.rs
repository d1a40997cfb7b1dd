//! A test's own AWS, and what the tests have in it.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use drums_common::{
    clock::Micros,
    ids::{HostId, InstallationId},
};
use drums_ec2::{Ec2, Keys, Settings};
use drums_provider::{
    cloud::{
        Cloud as _, ImageSource, Instance, LaunchOrder, Market, Placement, Recipe, ScheduleSetup, UserData, VolumeKind,
    },
    deadline::Campaign,
    failure::CloudError,
    host::OwnedHost,
    user_data::Guest,
    words::{InstanceProfile, Region},
};
use serde_json::{Value, json};

/// Where the cloud's clock stands at first.
pub const START: Micros = Micros(1_796_000_000_000_000);
pub const HOUR_MS: u64 = 3_600_000;
pub const OURS: InstallationId = InstallationId([0x0a, 0x1b, 0x2c, 0x3d]);
pub const THEIRS: InstallationId = InstallationId([0x99; 4]);
pub const AMI: &str = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64";

/// The emulator; it ends with this value, and with the process that started it, whose end of a pipe closes.
pub struct Peer {
    child: Child,
    address: SocketAddr,
}

fn python() -> PathBuf {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.unwrap_or_else(|| Path::new(&std::env::var_os("HOME").expect("HOME is set")).join(".cache"));
    let path = cache.join("drumsbench/moto/bin/python");
    assert!(path.exists(), "{} is not there; infra/prepare test installs it", path.display());
    path
}

impl Peer {
    /// Its clock stands at [`START`] until it is set.
    pub fn start() -> Self {
        Self::started(&["--now", &(START.0 / 1_000_000).to_string()])
    }
    /// Its clock runs with the machine's until it is set: for programs that read that.
    pub fn of_today() -> Self {
        Self::started(&[])
    }

    fn started(more: &[&str]) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../emulator");
        let mut child = Command::new(python())
            .args(["-m", "emulator", "--with-parent"])
            .args(more)
            .current_dir(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("it is a pipe")).read_line(&mut line).expect("it prints its address");
        let said: Value = serde_json::from_str(&line).expect("one line of JSON");
        let endpoint = said["endpoint"].as_str().expect("its endpoint");
        let address = endpoint.strip_prefix("http://").and_then(|a| a.parse().ok()).expect("an address on loopback");
        let peer = Self { child, address };
        for installation in [OURS, THEIRS] {
            peer.post("role", &json!({ "profile": profile(installation) }));
        }
        peer
    }

    fn ask(&self, method: &str, name: &str, body: &str) -> Value {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} /_emulator/{name} HTTP/1.1\r\nHost: emulator\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(" 200 "), "{name}: {answer}");
        serde_json::from_str(body).unwrap()
    }
    pub fn get(&self, name: &str) -> Value {
        self.ask("GET", name, "")
    }
    pub fn post(&self, name: &str, what: &Value) -> Value {
        self.ask("POST", name, &what.to_string())
    }
    pub fn fault(&self, fault: &Value) {
        self.post("faults", fault);
    }
    pub fn advance_s(&self, s: u64) {
        self.post("clock", &json!({ "advance_s": s }));
    }
    pub fn now(&self) -> Micros {
        #[allow(clippy::cast_possible_truncation)]
        Micros((self.get("clock")["now"].as_f64().unwrap() * 1e6) as i64)
    }

    /// Calls of that name so far, each with its parameters.
    pub fn calls(&self, action: &str) -> Vec<Value> {
        let journal = self.get("journal");
        journal.as_array().unwrap().iter().filter(|e| e["action"] == action).cloned().collect()
    }
    pub fn instances(&self) -> Vec<Value> {
        self.get("instances").as_array().unwrap().clone()
    }
    pub fn state(&self, id: impl ToString) -> String {
        let id = id.to_string();
        let found = self.instances().into_iter().find(|i| i["id"] == id.as_str());
        found.map_or("forgotten".to_owned(), |i| i["state"].as_str().unwrap().to_owned())
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }
    pub fn settings(&self, key: &str) -> Settings {
        Settings {
            keys: Some(Keys { access_key_id: key.to_owned(), secret_access_key: "a-secret-of-the-test".to_owned() }),
            endpoint: Some(self.endpoint()),
            ..Settings::of(region())
        }
    }
    /// Whoever owns this key; keys that no policy is given to may do all.
    pub async fn ec2(&self, key: &str) -> Ec2 {
        Ec2::new(self.settings(key)).await
    }
    /// From now on, the key's owner is one whom this policy of `infra/cloud` binds.
    pub fn bind(&self, key: &str, policy: &str, installation: InstallationId) {
        let tags = json!({ "drums:installation": installation.to_string() });
        self.post("principals", &json!({ key: { "policy": policy, "tags": tags } }));
    }

    pub fn placements(&self, region: &Region) -> Vec<Placement> {
        let network = self.get(&format!("network?region={region}"));
        let read = |s: &Value| Placement {
            subnet: s[0].as_str().unwrap().parse().unwrap(),
            zone: s[1].as_str().unwrap().parse().unwrap(),
        };
        network["subnets"].as_array().unwrap().iter().map(read).collect()
    }

    /// An order of a c8i host of this number, with all that a host has.
    pub async fn order(&self, at: &Region, installation: InstallationId, number: u32, life_ms: i64) -> LaunchOrder {
        let cloud = self.ec2("TEST").await;
        let image = cloud.image(at, &ImageSource::Parameter(AMI.to_owned())).await.unwrap();
        let group = self.get(&format!("network?region={at}"))["security_group"].as_str().unwrap().parse().unwrap();
        let deadline = Micros(self.now().0 + life_ms * 1_000);
        let campaign = Campaign::new("c1".parse().unwrap(), deadline, Some("EXP-028".parse().unwrap())).unwrap();
        let host: HostId = format!("h{number}").parse().unwrap();
        let placements = self.placements(at);
        LaunchOrder {
            host: OwnedHost::first(installation, host, campaign),
            placement: placements[0].clone(),
            recipe: Recipe {
                region: at.clone(),
                kind: "c8i.large".parse().unwrap(),
                image: image.id,
                root_device: image.root_device,
                volume: VolumeKind::Gp3,
                volume_gib: 30,
                market: Market::OnDemand,
                nested: true,
                prove_guest: false,
                security_groups: vec![group],
                profile: profile(installation),
                placements,
            },
            due: Micros(deadline.0.div_euclid(1_000_000) * 1_000_000),
        }
    }
}

/// The one whose role and name the policies know.
pub fn profile(installation: InstallationId) -> InstanceProfile {
    format!("drums-host-{installation}").parse().unwrap()
}

/// What an order is called with.
pub fn user_data(order: &LaunchOrder) -> UserData {
    let guest = Guest {
        deadline: order.due,
        lifetime_ms: HOUR_MS,
        agent_url: "https://bucket.example/agent?signed".to_owned(),
        agent_sha256: "5".repeat(64),
        token: "a-token".to_owned(),
    };
    guest.user_data().unwrap()
}

pub async fn run(cloud: &Ec2, order: &LaunchOrder) -> Result<Instance, CloudError> {
    cloud.run(order, &user_data(order)).await
}

/// The same order for another host.
pub fn another(order: &LaunchOrder, number: u32) -> LaunchOrder {
    let host: HostId = format!("h{number}").parse().unwrap();
    let host = OwnedHost::first(order.host.installation(), host, order.host.campaign().clone());
    LaunchOrder { host, ..order.clone() }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Both fail only for a child that has been reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn region() -> Region {
    "us-east-1".parse().unwrap()
}
pub fn elsewhere() -> Region {
    "eu-central-1".parse().unwrap()
}

pub fn setup() -> ScheduleSetup {
    ScheduleSetup {
        group: format!("drums-{OURS}"),
        role_arn: format!("arn:aws:iam::123456789012:role/drums-schedule-{OURS}"),
        dead_letter_arn: format!("arn:aws:sqs:us-east-1:123456789012:drums-dead-letters-{OURS}"),
    }
}

/// AWS's SDK itself, for what the tests do to the account behind our back.
pub mod sdk {
    use aws_config::{BehaviorVersion, SdkConfig};
    use aws_smithy_http_client::{
        Builder,
        tls::{self, rustls_provider::CryptoMode},
    };

    use drums_provider::tags;

    use super::{InstallationId, Peer, Region};

    async fn config(peer: &Peer, at: &Region) -> SdkConfig {
        let keys = aws_sdk_ec2::config::Credentials::new("TEST", "secret", None, None, "test");
        aws_config::defaults(BehaviorVersion::latest())
            .region(aws_config::Region::new(at.as_str().to_owned()))
            .endpoint_url(peer.endpoint())
            .credentials_provider(keys)
            .http_client(Builder::new().tls_provider(tls::Provider::Rustls(CryptoMode::Ring)).build_https())
            .load()
            .await
    }
    pub async fn ec2(peer: &Peer, at: &Region) -> aws_sdk_ec2::Client {
        aws_sdk_ec2::Client::new(&config(peer, at).await)
    }
    pub async fn scheduler(peer: &Peer, at: &Region) -> aws_sdk_scheduler::Client {
        aws_sdk_scheduler::Client::new(&config(peer, at).await)
    }

    pub async fn protect(peer: &Peer, at: &Region, id: &str) {
        let on = aws_sdk_ec2::types::AttributeBooleanValue::builder().value(true).build();
        let request = ec2(peer, at).await.modify_instance_attribute().instance_id(id).disable_api_termination(on);
        request.send().await.unwrap();
    }
    pub async fn protect_from_stops(peer: &Peer, at: &Region, id: &str) {
        let on = aws_sdk_ec2::types::AttributeBooleanValue::builder().value(true).build();
        ec2(peer, at).await.modify_instance_attribute().instance_id(id).disable_api_stop(on).send().await.unwrap();
    }
    pub async fn tag(peer: &Peer, at: &Region, id: &str, key: &str, value: &str) {
        let tag = aws_sdk_ec2::types::Tag::builder().key(key).value(value).build();
        ec2(peer, at).await.create_tags().resources(id).tags(tag).send().await.unwrap();
    }
    /// A stopped instance that sweeps must find.
    pub async fn canary(peer: &Peer, at: &Region, image: &str, installation: InstallationId) -> String {
        let installation = installation.to_string();
        let tags = [(tags::INSTALLATION, installation.as_str()), (tags::ROLE, tags::CANARY)];
        let ec2 = ec2(peer, at).await;
        let canary = plain(&ec2, image, &tags).await;
        ec2.stop_instances().instance_ids(&canary).send().await.unwrap();
        canary
    }
    /// An instance that nobody of ours launched, with these tags.
    pub async fn plain(ec2: &aws_sdk_ec2::Client, image: &str, tags: &[(&str, &str)]) -> String {
        use aws_sdk_ec2::types::{InstanceType, ResourceType, Tag, TagSpecification};
        let pairs = tags.iter().map(|(k, v)| Tag::builder().key(*k).value(*v).build()).collect();
        let spec = TagSpecification::builder().resource_type(ResourceType::Instance).set_tags(Some(pairs)).build();
        let specs = (!tags.is_empty()).then(|| vec![spec]);
        let request = ec2.run_instances().image_id(image).instance_type(InstanceType::from("c8i.large"));
        let reply = request.min_count(1).max_count(1).set_tag_specifications(specs).send().await.unwrap();
        reply.instances()[0].instance_id().unwrap().to_owned()
    }
}
