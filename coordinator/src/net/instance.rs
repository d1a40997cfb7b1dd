//! Whether a host that enrols is the instance that its token was made for (docs/decisions/0030-instances-that-enrol.md).
//!
//! Pure: what the token is bound to comes from the store, certificates from the configuration. A refusal is for the agent's
//! operator and for the audit trail; it is `Transient` where it will be otherwise without anything done on the host.

use drums_common::{
    digest::Sha256,
    failure::{Failure, FailureClass},
    ids::HostId,
    wire::latest::InstanceProof,
};
use drums_identity::{Certificates, Document, Refused, verify};

use super::ports::{Bound, Launched, Proven, Shown};

pub(super) const NOT_SHOWN: &str = "instance-not-shown";
pub(super) const NOT_KNOWN_YET: &str = "instance-not-known-yet";
pub(super) const NO_CERTIFICATE: &str = "instance-no-certificate";
pub(super) const NOT_SIGNED: &str = "instance-not-signed";
pub(super) const OTHER: &str = "instance-other";
pub(super) const USED: &str = "instance-used";

/// What to do where somebody else than the instance shows a launch's token.
pub(super) const STOLEN: &str = "find out who reads that host's user data; its token still waits for the instance that was launched, and dies with it";

/// What a host shows, if that is enough for its token.
pub(super) fn judge(
    certificates: &Certificates,
    host: &HostId,
    bound: &Bound,
    proof: Option<&InstanceProof>,
) -> Result<Shown, Failure> {
    match (&bound.to, proof) {
        (None, None) => Ok(Shown::Nothing),
        (None, Some(proof)) => Ok(Shown::Claimed(claim(proof))),
        (Some(launched), None) => Err(Failure::refused(
            NOT_SHOWN,
            format!(
                "host {host} was launched ({}), and who shows its token does not show which instance it is",
                launched.launch
            ),
            "a launched host shows it by itself: start it with instance metadata enabled and an agent of this release",
        )),
        (Some(launched), Some(proof)) => {
            prove(certificates, host, launched, bound.shown_by.as_ref(), proof).map(Shown::Proven)
        }
    }
}

fn prove(
    certificates: &Certificates,
    host: &HostId,
    launched: &Launched,
    shown_by: Option<&HostId>,
    proof: &InstanceProof,
) -> Result<Proven, Failure> {
    let launch = launched.launch;
    if let Some(other) = shown_by.filter(|other| *other != host) {
        let message = format!(
            "who shows the token of host {host} shows the identity document of host {other}, which enrolled with it"
        );
        return Err(Failure::refused(USED, message, STOLEN));
    }
    let Some(expected) = launched.expected() else {
        let message = format!(
            "host {host} cannot be enrolled yet: the launch {launch} was not read back, so its instance is not known"
        );
        return Err(Failure::new(
            FailureClass::Transient,
            NOT_KNOWN_YET,
            message,
            "it will be tried again; drumsctl events tells of the launch",
        ));
    };
    let shown = drums_identity::Shown { document: proof.document(), signature: proof.signature() };
    let document = verify(certificates, shown, &expected).map_err(|refused| failure(host, &refused))?;
    Ok(Proven { launch, instance: document.instance_id, document_sha256: Sha256::of(proof.document()) })
}

fn failure(host: &HostId, refused: &Refused) -> Failure {
    let message = format!("host {host} cannot be enrolled: {}", drums_common::telemetry::chain(refused));
    match refused {
        // Ours to put right: the host, which is paid for, goes on asking.
        Refused::NoCertificate(region) => Failure::new(
            FailureClass::Transient,
            NO_CERTIFICATE,
            message,
            format!(
                "name it under [identity.certificates] in coordinator.toml, as {region}, and start the coordinator anew"
            ),
        ),
        Refused::TooLong(_) | Refused::Signature { .. } | Refused::Document(_) => Failure::refused(
            NOT_SIGNED,
            message,
            "is the certificate in coordinator.toml the one that AWS lists for the region as RSA-2048? else find out who reads that host's user data",
        ),
        Refused::Other(_) => Failure::refused(OTHER, message, STOLEN),
    }
}

/// What a host says of itself that has to prove nothing; nobody goes by it.
fn claim(proof: &InstanceProof) -> String {
    match serde_json::from_slice::<Document>(proof.document()) {
        Ok(d) => format!(
            "says that it is {} in {} of account {}, which is not checked",
            d.instance_id,
            d.region,
            // Text of the host's.
            d.account_id.escape_debug().take(40).collect::<String>()
        ),
        Err(_) => "shows an identity document that is none".to_owned(),
    }
}

#[cfg(test)]
#[path = "../../../infra/identity/tests/signer/mod.rs"]
mod signer;

#[cfg(test)]
mod tests {
    use drums_common::clock::Micros;

    use super::{
        super::ports::Started,
        signer::{Message, SIGNER},
        *,
    };

    const DOCUMENT: &str = include_str!("../../../infra/identity/tests/fixtures/document.json");

    fn host() -> HostId {
        "h1".parse().unwrap()
    }

    fn launched() -> Launched {
        Launched {
            launch: "drums1-0a1b2c3d-006b0d1a80-1f2e3d4c5b6a7988-0002".parse().unwrap(),
            account: "123456789012".to_owned(),
            region: "eu-central-1".parse().unwrap(),
            image: "ami-0123456789abcdef0".parse().unwrap(),
            kind: "c8i.2xlarge".parse().unwrap(),
            instance: Some(Started {
                id: "i-0123456789abcdef0".parse().unwrap(),
                // 2026-11-30T19:10:01Z.
                at: Micros(1_796_065_801_000_000),
            }),
        }
    }

    fn judged(bound: Bound, document: &str, signed: &str) -> Result<Shown, Failure> {
        let certificates = Certificates::new([("eu-central-1".parse().unwrap(), SIGNER)]).unwrap();
        let proof = InstanceProof::new(document.as_bytes().to_vec(), Message::of(signed).sign()).unwrap();
        judge(&certificates, &host(), &bound, Some(&proof))
    }

    fn bound(to: Launched) -> Bound {
        Bound { to: Some(to), shown_by: None }
    }

    #[test]
    fn a_token_of_a_launch_is_for_the_instance_that_was_launched() {
        let document_sha256 = Sha256::of(DOCUMENT.as_bytes());
        let proven =
            Proven { launch: launched().launch, instance: "i-0123456789abcdef0".parse().unwrap(), document_sha256 };
        assert_eq!(judged(bound(launched()), DOCUMENT, DOCUMENT), Ok(Shown::Proven(proven.clone())));
        // The same host again, whose answer was lost.
        let again = Bound { shown_by: Some(host()), ..bound(launched()) };
        assert_eq!(judged(again, DOCUMENT, DOCUMENT), Ok(Shown::Proven(proven)));

        let refused = judge(&Certificates::default(), &host(), &bound(launched()), None).unwrap_err();
        assert_eq!((refused.class, refused.code.as_str()), (FailureClass::Refused, NOT_SHOWN), "{refused}");
        let other = |from: &str, to: &str| DOCUMENT.replace(from, to);
        let used = Bound { shown_by: Some("h7".parse().unwrap()), ..bound(launched()) };
        let unknown = Launched { instance: None, ..launched() };
        let elsewhere = Launched { region: "us-east-1".parse().unwrap(), ..launched() };
        let id = "i-0fedcba9876543210";
        for (bound, document, signed, class, code, word) in [
            (used, DOCUMENT, DOCUMENT, FailureClass::Refused, USED, "host h7"),
            (bound(unknown), DOCUMENT, DOCUMENT, FailureClass::Transient, NOT_KNOWN_YET, "not read back"),
            (bound(elsewhere), DOCUMENT, DOCUMENT, FailureClass::Transient, NO_CERTIFICATE, "us-east-1"),
            (bound(launched()), DOCUMENT, "another", FailureClass::Refused, NOT_SIGNED, "another document"),
            (bound(launched()), "{}", "{}", FailureClass::Refused, NOT_SIGNED, "no identity document"),
            (
                bound(launched()),
                &other("i-0123456789abcdef0", id),
                &other("i-0123456789abcdef0", id),
                FailureClass::Refused,
                OTHER,
                id,
            ),
            (
                bound(launched()),
                &other("123456789012", "210987654321"),
                &other("123456789012", "210987654321"),
                FailureClass::Refused,
                OTHER,
                "account 123456789012",
            ),
            (
                bound(launched()),
                &other("19:10:00Z", "19:30:00Z"),
                &other("19:10:00Z", "19:30:00Z"),
                FailureClass::Refused,
                OTHER,
                "start",
            ),
        ] {
            let refused = judged(bound, document, signed).unwrap_err();
            assert_eq!((refused.class, refused.code.as_str()), (class, code), "{refused}");
            assert!(refused.message.contains(word) && !refused.help.is_empty(), "{word}: {refused}");
        }
    }

    /// Whatever it shows: a host that was added by hand is whoever its token says.
    #[test]
    fn a_token_that_is_bound_to_nothing_refuses_nothing() {
        let none = || Bound { to: None, shown_by: Some("h7".parse().unwrap()) };
        assert_eq!(judge(&Certificates::default(), &host(), &none(), None), Ok(Shown::Nothing));
        for (document, signed, words) in [
            (
                DOCUMENT,
                "another",
                "says that it is i-0123456789abcdef0 in eu-central-1 of account 123456789012, which is not checked",
            ),
            ("{}", "{}", "none"),
        ] {
            let Ok(Shown::Claimed(claim)) = judged(none(), document, signed) else { panic!("{document}") };
            assert!(claim.contains(words), "{claim}");
        }
    }
}
