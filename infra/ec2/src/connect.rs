//! Clients: whose credentials, which endpoint, how long a call may take, and no retries.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use aws_config::{BehaviorVersion, SdkConfig, retry::RetryConfig, timeout::TimeoutConfig};
use aws_sdk_ec2::config::Credentials;
use aws_smithy_http_client::{Builder, tls};
use drums_provider::words::Region;

/// The price list is served in few regions and covers all.
const PRICES_IN: &str = "us-east-1";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// An access key. Its secret is not printed.
#[derive(Clone)]
pub struct Keys {
    pub access_key_id: String,
    pub secret_access_key: String,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[key {}]", self.access_key_id)
    }
}

#[derive(Clone, Debug)]
pub struct Settings {
    /// Where calls go that are of no region: whose credentials these are, which regions there are.
    pub home: Region,
    /// A profile of AWS's configuration files; `None` takes what the environment says.
    pub profile: Option<String>,
    /// Given keys; `None` looks where AWS's tools look (environment, profile, SSO, instance role).
    pub keys: Option<Keys>,
    /// Instead of AWS's own endpoints: the tests' AWS.
    pub endpoint: Option<String>,
    /// A call whose reply has not come by then is given up, and whether it had its effect is not known.
    pub call_timeout_ms: u64,
}

impl Settings {
    /// AWS itself, with what the environment says. A reply that takes half a minute will not come: EC2's slowest calls
    /// of those made here take a few seconds.
    pub fn of(home: Region) -> Self {
        Self { home, profile: None, keys: None, endpoint: None, call_timeout_ms: 30_000 }
    }
}

/// A client for each region, made when it is first asked for: making one reads the machine's certificates.
#[derive(Debug)]
struct Clients<C>(Mutex<BTreeMap<String, C>>);

impl<C: Clone> Clients<C> {
    fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }
    fn get(&self, base: &SdkConfig, region: &str, make: impl FnOnce(&SdkConfig) -> C) -> C {
        // Nothing in there can be half changed.
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let there = || make(&base.to_builder().region(aws_config::Region::new(region.to_owned())).build());
        made.entry(region.to_owned()).or_insert_with(there).clone()
    }
}

#[derive(Debug)]
pub(crate) struct Connect {
    pub(crate) home: Region,
    base: SdkConfig,
    ec2: Clients<aws_sdk_ec2::Client>,
    ssm: Clients<aws_sdk_ssm::Client>,
    scheduler: Clients<aws_sdk_scheduler::Client>,
    quotas: Clients<aws_sdk_servicequotas::Client>,
    prices: Clients<aws_sdk_pricing::Client>,
    sts: Clients<aws_sdk_sts::Client>,
}

impl Connect {
    pub(crate) async fn new(settings: Settings) -> Self {
        let http =
            Builder::new().tls_provider(tls::Provider::Rustls(tls::rustls_provider::CryptoMode::Ring)).build_https();
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .operation_timeout(Duration::from_millis(settings.call_timeout_ms))
            .build();
        let mut loader = aws_config::defaults(BehaviorVersion::latest())
            .http_client(http)
            .region(aws_config::Region::new(settings.home.as_str().to_owned()))
            .retry_config(RetryConfig::disabled())
            .timeout_config(timeouts);
        if let Some(profile) = settings.profile {
            loader = loader.profile_name(profile);
        }
        if let Some(Keys { access_key_id, secret_access_key }) = settings.keys {
            loader =
                loader.credentials_provider(Credentials::new(access_key_id, secret_access_key, None, None, "given"));
        }
        if let Some(endpoint) = settings.endpoint {
            loader = loader.endpoint_url(endpoint);
        }
        Self {
            home: settings.home,
            base: loader.load().await,
            ec2: Clients::new(),
            ssm: Clients::new(),
            scheduler: Clients::new(),
            quotas: Clients::new(),
            prices: Clients::new(),
            sts: Clients::new(),
        }
    }

    pub(crate) fn ec2(&self, at: &Region) -> aws_sdk_ec2::Client {
        self.ec2.get(&self.base, at.as_str(), aws_sdk_ec2::Client::new)
    }
    pub(crate) fn ssm(&self, at: &Region) -> aws_sdk_ssm::Client {
        self.ssm.get(&self.base, at.as_str(), aws_sdk_ssm::Client::new)
    }
    pub(crate) fn scheduler(&self, at: &Region) -> aws_sdk_scheduler::Client {
        self.scheduler.get(&self.base, at.as_str(), aws_sdk_scheduler::Client::new)
    }
    pub(crate) fn quotas(&self, at: &Region) -> aws_sdk_servicequotas::Client {
        self.quotas.get(&self.base, at.as_str(), aws_sdk_servicequotas::Client::new)
    }
    pub(crate) fn prices(&self) -> aws_sdk_pricing::Client {
        self.prices.get(&self.base, PRICES_IN, aws_sdk_pricing::Client::new)
    }
    pub(crate) fn sts(&self) -> aws_sdk_sts::Client {
        self.sts.get(&self.base, self.home.as_str(), aws_sdk_sts::Client::new)
    }
}
