//! What AWS's errors mean: the only place that looks at codes.

use std::{
    error::Error,
    io::ErrorKind,
    time::{Duration, SystemTime},
};

use aws_sdk_ec2::{
    config::http::HttpResponse,
    error::{ProvideErrorMetadata, SdkError},
    primitives::{DateTime, DateTimeFormat},
};
use drums_provider::failure::{CloudError, FailureKind};

/// AWS refuses signatures whose time is further off than this.
const SKEW: Duration = Duration::from_secs(5 * 60);

/// The failed call, by what follows from it.
pub(crate) fn failed<E>(call: &str, error: SdkError<E, HttpResponse>) -> CloudError
where
    E: ProvideErrorMetadata + Error + 'static,
{
    let code = error.as_service_error().and_then(ProvideErrorMetadata::code).unwrap_or_default().to_owned();
    let told = error.as_service_error().and_then(ProvideErrorMetadata::message).map(str::to_owned);
    let reply = error.raw_response();
    let request_id = reply
        .and_then(|r| r.headers().get("x-amzn-requestid").or_else(|| r.headers().get("x-amz-request-id")))
        .unwrap_or_default()
        .to_owned();
    let kind = match &error {
        SdkError::ConstructionFailure(_) | SdkError::DispatchFailure(_) => not_answered(&error),
        SdkError::ServiceError(_) => {
            let status = reply.map_or(0, |r| r.status().as_u16());
            let skewed = reply.and_then(|r| r.headers().get("date")).is_some_and(is_far);
            of_code(&code, told.as_deref().unwrap_or_default(), status, skewed)
        }
        // No reply in time, or one that cannot be read.
        _ => FailureKind::Unknown,
    };
    let message = told.unwrap_or_else(|| chain(&error));
    CloudError { kind, call: call.to_owned(), code, message, request_id }
}

/// A reply that lacks what it must have.
pub(crate) fn unreadable(call: &str, what: impl std::fmt::Display) -> CloudError {
    CloudError::new(FailureKind::Unknown, call, format!("the reply cannot be read: {what}"))
}

/// By AWS's code; the message and the HTTP status decide where a code has two meanings. `skewed`: AWS's clock and ours,
/// at this reply, are too far apart for signatures.
pub(crate) fn of_code(code: &str, message: &str, status: u16, skewed: bool) -> FailureKind {
    use FailureKind as Kind;
    let expired = if skewed { Kind::Skewed } else { Kind::Expired };
    match code {
        "Unsupported" if message.contains("Availability Zone") => Kind::Capacity,
        "InsufficientInstanceCapacity"
        | "InsufficientHostCapacity"
        | "InsufficientCapacity"
        | "InsufficientFreeAddressesInSubnet"
        | "SpotMaxPriceTooLow" => Kind::Capacity,
        "VcpuLimitExceeded"
        | "InstanceLimitExceeded"
        | "MaxSpotInstanceCountExceeded"
        | "VolumeLimitExceeded"
        | "MaxIOPSLimitExceeded"
        | "ServiceQuotaExceededException"
        | "AddressLimitExceeded" => Kind::Quota,
        "RequestLimitExceeded"
        | "RequestThrottled"
        | "RequestThrottledException"
        | "Throttling"
        | "ThrottlingException"
        | "ThrottledException"
        | "TooManyRequestsException"
        | "SlowDown"
        | "EC2ThrottledException"
        | "BandwidthLimitExceeded" => Kind::Throttled,
        "UnauthorizedOperation" | "AccessDenied" | "AccessDeniedException" | "NotAuthorized" => Kind::Denied,
        "RequestTimeTooSkewed" | "RequestInTheFuture" => Kind::Skewed,
        // EC2 says this of a request that is too old and of a session whose credentials are; the clocks tell which.
        "RequestExpired" => expired,
        "SignatureDoesNotMatch" | "InvalidSignatureException"
            if message.contains("expired") || message.contains("not yet current") =>
        {
            Kind::Skewed
        }
        "ExpiredToken"
        | "ExpiredTokenException"
        | "AuthFailure"
        | "InvalidClientTokenId"
        | "UnrecognizedClientException"
        | "InvalidSignatureException"
        | "SignatureDoesNotMatch"
        | "MissingAuthenticationToken"
        | "IncompleteSignature" => expired,
        "UnsupportedOperation"
        | "UnsupportedOperationException"
        | "Unsupported"
        | "OptInRequired"
        | "InvalidInstanceType"
        | "UnsupportedInstanceTypeOnHost" => Kind::Unsupported,
        "IdempotentParameterMismatch" => Kind::TokenReused,
        "InvalidInstanceID.NotFound" | "InvalidVolume.NotFound" | "ResourceNotFoundException" | "NotFoundException" => {
            Kind::NotFound
        }
        "IncorrectInstanceState" | "IncorrectState" | "IdempotentInstanceTerminated" | "ConflictException" => {
            Kind::AlreadyDone
        }
        "OperationNotPermitted" => Kind::Protected,
        "ParameterNotFound" | "NoSuchResourceException" | "ValidationException" | "ValidationError" => Kind::Invalid,
        _ if ["Invalid", "Missing", "Malformed", "Unknown"].iter().any(|p| code.starts_with(p)) && status < 500 => {
            Kind::Invalid
        }
        _ if status == 429 => Kind::Throttled,
        _ => Kind::Unknown,
    }
}

/// Of a call without any reply: only what certainly never left is `NotSent`.
fn not_answered(error: &(dyn Error + 'static)) -> FailureKind {
    let mut cause = Some(error);
    while let Some(e) = cause {
        if let Some(io) = e.downcast_ref::<std::io::Error>() {
            return match io.kind() {
                ErrorKind::ConnectionRefused
                | ErrorKind::HostUnreachable
                | ErrorKind::NetworkUnreachable
                | ErrorKind::AddrNotAvailable => FailureKind::NotSent,
                _ => FailureKind::Unknown,
            };
        }
        let text = e.to_string();
        // What the HTTP client says before it has a connection, and the SDK before it has a signature.
        if text.starts_with("dns error") {
            return FailureKind::NotSent;
        }
        if text.contains("credential") || text.contains("identity") {
            return FailureKind::Expired;
        }
        cause = e.source();
    }
    FailureKind::Unknown
}

fn is_far(date: &str) -> bool {
    let Some(aws) = aws_time(date) else { return false };
    let now = SystemTime::now();
    now.duration_since(aws).or_else(|_| aws.duration_since(now)).is_ok_and(|apart| apart > SKEW)
}

/// The `Date` of a reply.
pub(crate) fn aws_time(date: &str) -> Option<SystemTime> {
    DateTime::from_str(date, DateTimeFormat::HttpDate).ok()?.try_into().ok()
}

fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(e) = cause {
        let next = e.to_string();
        if !text.ends_with(&next) {
            text = format!("{text}: {next}");
        }
        cause = e.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_mean_what_follows_from_them() {
        use FailureKind as Kind;
        let table = [
            ("InsufficientInstanceCapacity", 500, Kind::Capacity),
            ("VcpuLimitExceeded", 400, Kind::Quota),
            ("RequestLimitExceeded", 503, Kind::Throttled),
            ("SomethingNew", 429, Kind::Throttled),
            ("UnauthorizedOperation", 403, Kind::Denied),
            ("AuthFailure", 401, Kind::Expired),
            ("ExpiredTokenException", 403, Kind::Expired),
            ("RequestTimeTooSkewed", 403, Kind::Skewed),
            ("UnsupportedOperation", 400, Kind::Unsupported),
            ("InvalidAMIID.NotFound", 400, Kind::Invalid),
            ("InvalidSubnetID.NotFound", 400, Kind::Invalid),
            ("ParameterNotFound", 400, Kind::Invalid),
            ("IdempotentParameterMismatch", 400, Kind::TokenReused),
            ("InvalidInstanceID.NotFound", 400, Kind::NotFound),
            ("ConflictException", 409, Kind::AlreadyDone),
            ("OperationNotPermitted", 400, Kind::Protected),
            ("InternalError", 500, Kind::Unknown),
            ("Unavailable", 503, Kind::Unknown),
            ("UnknownFailure", 500, Kind::Unknown),
            ("", 502, Kind::Unknown),
        ];
        for (code, status, kind) in table {
            assert_eq!(of_code(code, "", status, false), kind, "{code} {status}");
        }
    }

    #[test]
    fn a_code_with_two_meanings_is_told_apart() {
        use FailureKind as Kind;
        let zone = "Your requested instance type is not supported in your requested Availability Zone (us-east-1e).";
        assert_eq!(of_code("Unsupported", zone, 400, false), Kind::Capacity);
        assert_eq!(
            of_code("Unsupported", "The requested configuration is not supported.", 400, false),
            Kind::Unsupported
        );
        assert_eq!(of_code("RequestExpired", "Request has expired.", 400, false), Kind::Expired);
        assert_eq!(of_code("RequestExpired", "Request has expired.", 400, true), Kind::Skewed);
        let late = "Signature expired: 20261130T000000Z is now earlier than 20261130T001000Z";
        assert_eq!(of_code("InvalidSignatureException", late, 400, false), Kind::Skewed);
        assert_eq!(of_code("SignatureDoesNotMatch", "The signature does not match.", 403, false), Kind::Expired);
        assert!(is_far("Tue, 01 Jan 2019 00:00:00 GMT") && !is_far("no date"));
    }

    #[test]
    fn only_what_never_left_is_not_sent() {
        let refused = std::io::Error::from(ErrorKind::ConnectionRefused);
        let reset = std::io::Error::from(ErrorKind::ConnectionReset);
        assert_eq!(not_answered(&refused), FailureKind::NotSent);
        assert_eq!(not_answered(&reset), FailureKind::Unknown);
    }
}
