//! Calls as they would be sent: the SDK writes each request, and is stopped before it sends it.

use std::{
    error::Error,
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use async_trait::async_trait;
use aws_sdk_ec2::{
    config::{ConfigBag, Intercept, RuntimeComponents, interceptors::BeforeTransmitInterceptorContextRef},
    error::BoxError,
};
use drums_provider::{
    cloud::{Call, KillSchedule, LaunchOrder, Shows},
    failure::{CloudError, FailureKind},
    user_data::Guest,
};
use serde_json::Value;

use crate::{Ec2, failed::unreadable, launch, schedules};

/// As long as what a host is given: an enrolment token, and a presigned URL with the token of a session in it.
const TOKEN_CHARS: usize = 400;
const URL_CHARS: usize = 1_600;
const DAY_MS: u64 = 86_400_000;

/// Keeps what was written, and lets nothing be sent.
#[derive(Clone, Debug, Default)]
struct Stopped(Arc<Mutex<Option<Written>>>);

#[derive(Clone, Debug)]
struct Written {
    uri: String,
    body: String,
}

#[derive(Debug)]
struct OnPurpose;

impl fmt::Display for OnPurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it was only to be shown")
    }
}

impl Error for OnPurpose {}

impl Intercept for Stopped {
    fn name(&self) -> &'static str {
        "Stopped"
    }
    // Comes before the first attempt: nothing is signed, resolved or connected to yet.
    fn read_after_serialization(
        &self,
        context: &BeforeTransmitInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let request = context.request();
        let body = request.body().bytes().unwrap_or_default();
        let written = Written { uri: request.uri().to_owned(), body: String::from_utf8_lossy(body).into_owned() };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(written);
        Err(OnPurpose.into())
    }
}

impl Stopped {
    /// What was written in place of `call`, whose outcome cannot have been a success.
    fn written<T, E: fmt::Debug>(&self, call: &str, outcome: Result<T, E>) -> Result<Written, CloudError> {
        let why = match outcome {
            Ok(_) => return Err(unreadable(call, "it was only to be shown, and was answered")),
            Err(e) => e,
        };
        let written = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        written.ok_or_else(|| {
            CloudError::new(FailureKind::Invalid, call, format!("the request cannot be written: {why:?}"))
        })
    }
}

#[async_trait]
impl Shows for Ec2 {
    async fn shown_run(&self, order: &LaunchOrder) -> Result<Call, CloudError> {
        let (call, region) = (launch::CALL, &order.recipe.region);
        let guest = Guest {
            deadline: order.due,
            lifetime_ms: DAY_MS,
            agent_url: "u".repeat(URL_CHARS),
            agent_sha256: "0".repeat(64),
            token: "t".repeat(TOKEN_CHARS),
        };
        let data = guest.user_data().map_err(|e| CloudError::new(FailureKind::Invalid, call, e.to_string()))?;
        let bytes = data.0.len();
        let stopped = Stopped::default();
        let request = launch::request(&self.connect.ec2(region), order).user_data(launch::encoded(&data));
        let written = stopped.written(call, request.customize().interceptor(stopped.clone()).send().await)?;
        let mut parameters = pairs(&written.body);
        for (name, value) in &mut parameters {
            if name == "UserData" {
                *value = format!(
                    "({bytes} bytes before Base64, with {TOKEN_CHARS} of a token and {URL_CHARS} of a URL that each \
                     attempt gets of its own)"
                );
            }
        }
        Ok(Call { call: call.to_owned(), region: region.clone(), parameters })
    }

    async fn shown_schedule(&self, schedule: &KillSchedule) -> Result<Call, CloudError> {
        let call = "CreateSchedule";
        let (stopped, region) = (Stopped::default(), schedule.region.clone());
        let request = schedules::creation(&self.connect.scheduler(&region), schedule.name.as_str(), schedule)?;
        let written = stopped.written(call, request.customize().interceptor(stopped.clone()).send().await)?;
        let mut parameters = vec![("Name".to_owned(), last_part(&written.uri))];
        let Value::Object(body) = serde_json::from_str(&written.body).map_err(|e| unreadable(call, e))? else {
            return Err(unreadable(call, "its body is no object"));
        };
        for (name, value) in body {
            // The SDK makes up another one for each call.
            let value = if name == "ClientToken" { Value::String("(random)".to_owned()) } else { value };
            flat(&name, &value, &mut parameters);
        }
        Ok(Call { call: call.to_owned(), region, parameters })
    }
}

/// Of a form: `Name=value&Other.1=value`.
fn pairs(body: &str) -> Vec<(String, String)> {
    let pairs = body.split('&').filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (plain(name), plain(value))).filter(|(name, _)| name != "Version").collect()
}

/// Without what a form escapes.
fn plain(text: &str) -> String {
    let (mut out, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..2).and_then(|d| std::str::from_utf8(d).ok());
        let escaped = digits.filter(|_| *first == b'%').and_then(|d| u8::from_str_radix(d, 16).ok());
        out.push(escaped.unwrap_or(if *first == b'+' { b' ' } else { *first }));
        rest = if escaped.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// `Target.RetryPolicy.MaximumRetryAttempts`, as EC2 names its own.
fn flat(name: &str, value: &Value, into: &mut Vec<(String, String)>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(field, value)| flat(&format!("{name}.{field}"), value, into)),
        Value::String(text) => into.push((name.to_owned(), text.clone())),
        other => into.push((name.to_owned(), other.to_string())),
    }
}

fn last_part(uri: &str) -> String {
    let path = uri.split('?').next().unwrap_or_default();
    plain(path.rsplit('/').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_and_a_body_are_read_as_they_are_meant() {
        let two = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(
            pairs("Action=Run&Version=1&Tag.1.Key=drums%3Ahost&Tag.1.Value=a%20b+c%e2%82%ac%2"),
            [two("Action", "Run"), two("Tag.1.Key", "drums:host"), two("Tag.1.Value", "a b c€%2")]
        );
        let mut flattened = Vec::new();
        flat("A", &serde_json::json!({ "b": { "c": 1 }, "d": "{\"x\":[]}" }), &mut flattened);
        assert_eq!(flattened, [two("A.b.c", "1"), two("A.d", "{\"x\":[]}")]);
        assert_eq!(last_part("/schedules/drums1%2D0a?x=1"), "drums1-0a");
    }
}
