//! Whether a host that enrols is the instance that was launched (docs/decisions/0027-the-identity-document.md).
//!
//! ```text
//! agent ── IMDSv2 ──▶ document, PKCS #7 ── with its one-time token ──▶ signature by the region's certificate
//!                                                                         ──▶ account, region, instance, image, type, time
//! ```
//! A token alone says that whoever shows it has read the user data; the document, signed by AWS, says which instance shows
//! it. Pure: certificates come from the operator's configuration, what was launched from the store. Refuses to know how
//! either got here.
//!
//! **Invariant:** nothing of a document is looked at before its signature was found to be by the certificate of the region
//! that *we* launched in.

mod ber;
mod document;
mod signature;

pub use document::{Difference, Document, Expected};
pub use signature::{BadCertificate, Certificates, SignatureError};

use drums_provider::words::Region;

/// A document has half a kilobyte and its signature one and a half; more than this is something else.
const MAX_BYTES: usize = 16 << 10;

/// What an instance shows of itself, as IMDS gave it.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a> {
    /// `/latest/dynamic/instance-identity/document`, to the byte.
    pub document: &'a [u8],
    /// `/latest/dynamic/instance-identity/rsa2048`: base64 of a PKCS #7 message, in lines.
    pub signature: &'a str,
}

/// Why a host is not taken for the instance that was launched.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("the identity document or its signature has {0} bytes, and {MAX_BYTES} are far more than any has")]
    TooLong(usize),
    #[error(
        "there is no certificate to check identity documents of {0} with; add AWS's RSA-2048 certificate of that region to the configuration"
    )]
    NoCertificate(Region),
    #[error(
        "the identity document is not signed by AWS's certificate of {region}; whoever sent it is not taken for the instance"
    )]
    Signature { region: Region, source: SignatureError },
    #[error("what was signed is no identity document; AWS may have changed its form, or another thing was signed")]
    Document(#[source] serde_json::Error),
    #[error("another machine shows the token of this launch: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Other(Vec<Difference>),
}

/// The document of the instance that was launched, or why it is not.
pub fn verify(certificates: &Certificates, shown: Shown<'_>, expected: &Expected) -> Result<Document, Refused> {
    let bytes = shown.document.len().max(shown.signature.len());
    if bytes > MAX_BYTES {
        return Err(Refused::TooLong(bytes));
    }
    let region = &expected.region;
    let certificate = certificates.of(region).ok_or_else(|| Refused::NoCertificate(region.clone()))?;
    certificate
        .signed(shown.document, shown.signature)
        .map_err(|source| Refused::Signature { region: region.clone(), source })?;
    let document: Document = serde_json::from_slice(shown.document).map_err(Refused::Document)?;
    let differences = expected.differences(&document);
    if differences.is_empty() { Ok(document) } else { Err(Refused::Other(differences)) }
}
