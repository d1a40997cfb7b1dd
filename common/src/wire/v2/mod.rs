//! Version 2: a host that enrols may prove which instance it is. All other messages are those of version 1. A later version
//! adds a sibling module; this one never changes.

use serde::{Deserialize, Serialize};

use super::v1;
use crate::ids::{HostId, InstallationId};

/// EC2's document has half a kilobyte.
pub const MAX_DOCUMENT_BYTES: usize = 4 << 10;
/// Its signature with the certificates that may be in it has one and a half to three.
pub const MAX_SIGNATURE_BYTES: usize = 8 << 10;

/// Enrolment (ALPN `drums-enrol/1`), agent → coordinator: one request on one bidirectional stream.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EnrolRequest {
    /// The token's secret.
    pub secret: Vec<u8>,
    pub host: HostId,
    /// PKCS#10, DER; the key never leaves the agent.
    pub csr_der: Vec<u8>,
    pub installation: InstallationId,
    /// Which instance this is, on a host that the cloud shows it to.
    pub instance: Option<InstanceProof>,
}

// The secret must not reach a log through a Debug print.
impl std::fmt::Debug for EnrolRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("EnrolRequest");
        shown.field("host", &self.host).field("instance", &self.instance).finish_non_exhaustive()
    }
}

/// What an agent of version 1 asks: it proves no instance.
impl From<v1::EnrolRequest> for EnrolRequest {
    fn from(old: v1::EnrolRequest) -> Self {
        let v1::EnrolRequest { secret, host, csr_der, installation } = old;
        Self { secret, host, csr_der, installation, instance: None }
    }
}

/// What is asked of a coordinator of version 1: it can take no proof, and so demands none.
impl From<EnrolRequest> for v1::EnrolRequest {
    fn from(new: EnrolRequest) -> Self {
        let EnrolRequest { secret, host, csr_der, installation, instance: _ } = new;
        Self { secret, host, csr_der, installation }
    }
}

/// EC2's identity document and the signature of it, as the instance metadata gave them; neither is longer than its bound,
/// however it was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RawProof")]
pub struct InstanceProof {
    document: Vec<u8>,
    signature: String,
}

#[derive(Deserialize)]
struct RawProof {
    document: Vec<u8>,
    signature: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the instance's {what} has {bytes} bytes, and {max} are the most that is taken")]
pub struct BadProof {
    pub what: &'static str,
    pub bytes: usize,
    pub max: usize,
}

impl InstanceProof {
    pub fn new(document: Vec<u8>, signature: String) -> Result<Self, BadProof> {
        for (what, bytes, max) in [
            ("identity document", document.len(), MAX_DOCUMENT_BYTES),
            ("signature", signature.len(), MAX_SIGNATURE_BYTES),
        ] {
            if bytes == 0 || bytes > max {
                return Err(BadProof { what, bytes, max });
            }
        }
        Ok(Self { document, signature })
    }

    /// To the byte: it is signed.
    pub fn document(&self) -> &[u8] {
        &self.document
    }

    /// PKCS #7 in base64.
    pub fn signature(&self) -> &str {
        &self.signature
    }
}

impl TryFrom<RawProof> for InstanceProof {
    type Error = BadProof;
    fn try_from(raw: RawProof) -> Result<Self, BadProof> {
        Self::new(raw.document, raw.signature)
    }
}

#[cfg(test)]
mod goldens;
