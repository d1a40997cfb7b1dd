//! What a call to the cloud may come to, by what follows from it and not by how AWS names it.
//!
//! Two questions decide: may the call have had its effect ([`Effect`]), and what is to be done next ([`Remedy`]). Whoever
//! implements [`Cloud`](crate::cloud::Cloud) classifies; nobody else looks at AWS's codes.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Classes of failed calls. The codes named are examples: what decides is the meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// No such machine is free there now: `InsufficientInstanceCapacity`, `InsufficientHostCapacity`,
    /// `SpotMaxPriceTooLow`, `InsufficientFreeAddressesInSubnet`, and a type that one zone does not have.
    Capacity,
    /// The account may have no more: `VcpuLimitExceeded`, `InstanceLimitExceeded`, `MaxSpotInstanceCountExceeded`.
    Quota,
    /// Too many calls: `RequestLimitExceeded`, `Throttling`, HTTP 429 and 503 with a code that says so.
    Throttled,
    /// Not permitted: `UnauthorizedOperation`, `AccessDenied`.
    Denied,
    /// Credentials that no longer hold, or none: `ExpiredToken`, `RequestExpired` of a token, `AuthFailure`,
    /// `InvalidClientTokenId`.
    Expired,
    /// Our clock and AWS's differ too much for signatures: `RequestTimeTooSkewed`, `SignatureDoesNotMatch` that says
    /// so, `RequestExpired` of a request.
    Skewed,
    /// Not offered: `UnsupportedOperation`, `Unsupported`, `OptInRequired`, spot refused with nested virtualisation.
    Unsupported,
    /// What we asked for is wrong: `InvalidParameterValue`, `InvalidAMIID.NotFound`, `InvalidSubnetID.NotFound`.
    Invalid,
    /// The token was used with other arguments: `IdempotentParameterMismatch`. An instance of it may exist.
    TokenReused,
    /// The thing named is not shown: `InvalidInstanceID.NotFound`, `ResourceNotFoundException`. Soon after it was made
    /// this is no evidence that it is absent.
    NotFound,
    /// The state wanted is there already, or the thing ended: `IncorrectInstanceState` of one that goes,
    /// `IdempotentInstanceTerminated`, `ConflictException` of the same schedule.
    AlreadyDone,
    /// Termination protection is on: `OperationNotPermitted` of a terminate.
    Protected,
    /// The request never left: no name, no route, connection refused, TLS not made.
    NotSent,
    /// It was sent and what became of it is not known: no reply in time, HTTP 5xx without a code that says more, a reply
    /// that cannot be read, and every code that this list does not have.
    Unknown,
}

/// Whether a failed call may have had its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It had none.
    None,
    /// It may have had it, or may still have it.
    Perhaps,
}

/// What to do after a failed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The same call again, later; of a launch: under the same token and with the same arguments.
    Again,
    /// Another place: the next subnet. The same place may have room later.
    Elsewhere,
    /// Nothing that a program can do will help; a person can. What must happen all the same (a terminate) goes on.
    Person,
    /// Look at what is there; it may be as wanted.
    Look,
    /// Switch termination protection off, then the same call.
    Unprotect,
}

impl FailureKind {
    pub fn effect(self) -> Effect {
        match self {
            Self::Unknown | Self::TokenReused | Self::AlreadyDone | Self::NotFound => Effect::Perhaps,
            Self::Capacity
            | Self::Quota
            | Self::Throttled
            | Self::Denied
            | Self::Expired
            | Self::Skewed
            | Self::Unsupported
            | Self::Invalid
            | Self::Protected
            | Self::NotSent => Effect::None,
        }
    }

    pub fn remedy(self) -> Remedy {
        match self {
            Self::Capacity => Remedy::Elsewhere,
            Self::Throttled | Self::NotSent | Self::Unknown => Remedy::Again,
            Self::NotFound | Self::AlreadyDone | Self::TokenReused => Remedy::Look,
            Self::Protected => Remedy::Unprotect,
            Self::Quota | Self::Denied | Self::Expired | Self::Skewed | Self::Unsupported | Self::Invalid => {
                Remedy::Person
            }
        }
    }

    /// What a person can do, for the end of a message.
    pub fn help(self) -> &'static str {
        match self {
            Self::Capacity => "name more subnets or another instance type, or wait",
            Self::Quota => "ask AWS for a higher quota, or launch fewer or smaller hosts",
            Self::Throttled => "it is tried again by itself; other users of the account may be calling too often",
            Self::Denied => "compare the caller's policy with infra/cloud/policies",
            Self::Expired => "renew the credentials; they are read again with the next call",
            Self::Skewed => "set this machine's clock; AWS refuses requests that are minutes off",
            Self::Unsupported => "choose another instance type or region, or leave the option out",
            Self::Invalid => "correct what the message names",
            Self::TokenReused => "nothing is launched under this token again; what exists under it is looked for",
            Self::NotFound => "it is looked for again; AWS shows new things late",
            Self::AlreadyDone => "what is there is looked at",
            Self::Protected => "the protection is switched off by itself; find out who switched it on",
            Self::NotSent => "check this machine's network and name resolution",
            Self::Unknown => "it is tried again by itself, under the same token",
        }
    }
}

/// A failed call: what was attempted, what AWS said.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
pub struct CloudError {
    pub kind: FailureKind,
    /// The API call by AWS's name, as `RunInstances`.
    pub call: String,
    /// AWS's code, empty if there was none.
    pub code: String,
    pub message: String,
    /// What AWS support asks for; empty if there was none.
    pub request_id: String,
}

impl fmt::Display for CloudError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed: {}", self.call, self.message)?;
        if !self.code.is_empty() {
            write!(f, " [{}]", self.code)?;
        }
        if !self.request_id.is_empty() {
            write!(f, " (request {})", self.request_id)?;
        }
        write!(f, "; {}", self.kind.help())
    }
}

impl CloudError {
    /// One without a code or request id of AWS's.
    pub fn new(kind: FailureKind, call: &str, message: impl Into<String>) -> Self {
        Self { kind, call: call.to_owned(), code: String::new(), message: message.into(), request_id: String::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_certainly_had_no_effect_may_be_tried_under_another_token() {
        use FailureKind::{AlreadyDone, Capacity, NotFound, TokenReused, Unknown};
        for kind in [Unknown, TokenReused, AlreadyDone, NotFound] {
            assert_eq!(kind.effect(), Effect::Perhaps, "{kind:?}");
            assert_ne!(kind.remedy(), Remedy::Elsewhere, "{kind:?}: a second instance could come of it");
        }
        assert_eq!((Capacity.effect(), Capacity.remedy()), (Effect::None, Remedy::Elsewhere));
    }

    #[test]
    fn an_error_says_what_was_attempted_why_and_what_next() {
        let mut e = CloudError::new(FailureKind::Denied, "TerminateInstances", "you are not authorized");
        e.code = "UnauthorizedOperation".to_owned();
        e.request_id = "r-1".to_owned();
        assert_eq!(
            e.to_string(),
            "TerminateInstances failed: you are not authorized [UnauthorizedOperation] (request r-1); \
             compare the caller's policy with infra/cloud/policies"
        );
    }
}
