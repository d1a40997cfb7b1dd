//! The signature of an identity document: a PKCS #7 (CMS) message with one signer, who is AWS of one region.
//!
//! Which certificate signed is not asked of the message: the region's key verifies it or does not.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use cms::{
    cert::x509::der::{Decode as _, Encode as _, asn1::OctetString, oid::ObjectIdentifier},
    content_info::ContentInfo,
    signed_data::{SignedAttributes, SignedData, SignerInfo},
};
use drums_common::digest::Sha256;
use drums_provider::words::Region;
use ring::signature::{RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey};
use x509_cert::{Certificate, der::DecodePem as _};

use crate::ber::{self, BerError};

const DATA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.7.1");
const SIGNED_DATA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.7.2");
const CONTENT_TYPE: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.9.3");
const MESSAGE_DIGEST: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.9.4");
const RSA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");
const RSA_WITH_SHA256: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.11");
const SHA256: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.16.840.1.101.3.4.2.1");
/// Of a modulus, bits: AWS's older certificates have 1,024, which is not enough.
const LEAST_KEY_BYTES: usize = 256;

#[derive(Debug, thiserror::Error)]
pub enum BadCertificate {
    #[error(
        "the certificate for {region} is none in PEM; copy it from AWS's page of regional certificates, with its first and last line"
    )]
    NotPem { region: Region, source: x509_cert::der::Error },
    #[error(
        "the certificate for {region} has no RSA key of 2048 bits or more; take the one that AWS lists as RSA-2048"
    )]
    NotRsa2048 { region: Region },
    #[error("two certificates for {region}; give one")]
    Twice { region: Region },
}

/// AWS's certificates for identity documents, by region: each region signs with its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Certificates(BTreeMap<Region, RegionKey>);

/// RSAPublicKey, DER.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegionKey(Vec<u8>);

impl Certificates {
    /// From pairs of a region and its certificate in PEM.
    pub fn new<'a>(pems: impl IntoIterator<Item = (Region, &'a str)>) -> Result<Self, BadCertificate> {
        let mut found = BTreeMap::new();
        for (region, pem) in pems {
            let certificate = Certificate::from_pem(pem.trim())
                .map_err(|source| BadCertificate::NotPem { region: region.clone(), source })?;
            let info = certificate.tbs_certificate.subject_public_key_info;
            let key = info.subject_public_key.as_bytes().unwrap_or_default();
            // The exponent and some headers come on top of the modulus.
            if info.algorithm.oid != RSA || key.len() <= LEAST_KEY_BYTES {
                return Err(BadCertificate::NotRsa2048 { region });
            }
            if found.insert(region.clone(), RegionKey(key.to_vec())).is_some() {
                return Err(BadCertificate::Twice { region });
            }
        }
        Ok(Self(found))
    }

    pub(crate) fn of(&self, region: &Region) -> Option<&RegionKey> {
        self.0.get(region)
    }
}

/// What is wrong with a signature.
#[derive(Debug, thiserror::Error)]
pub enum SignatureError {
    #[error("it is not base64")]
    NotBase64(#[source] base64::DecodeError),
    #[error("it is no PKCS #7 message")]
    Ber(#[from] BerError),
    #[error("it is no PKCS #7 message with signed data")]
    Cms(#[from] cms::cert::x509::der::Error),
    #[error("it has {0} signers instead of one")]
    Signers(usize),
    #[error("it is made with {0}, and RSA with SHA-256 is expected")]
    Algorithm(ObjectIdentifier),
    #[error("it is of another document than the one beside it")]
    OtherContent,
    #[error("what it signs beside the document is not as PKCS #7 demands: {0}")]
    Attributes(&'static str),
    #[error("another key made it, or it was changed")]
    Key,
}

impl RegionKey {
    /// Whether the key signed exactly these bytes.
    pub(crate) fn signed(&self, document: &[u8], signature: &str) -> Result<(), SignatureError> {
        let text: String = signature.split_ascii_whitespace().collect();
        let der = ber::to_der(&STANDARD.decode(text).map_err(SignatureError::NotBase64)?)?;
        let info = ContentInfo::from_der(&der)?;
        if info.content_type != SIGNED_DATA {
            return Err(SignatureError::Algorithm(info.content_type));
        }
        let signed: SignedData = info.content.decode_as()?;
        let content = &signed.encap_content_info;
        if content.econtent_type != DATA {
            return Err(SignatureError::Algorithm(content.econtent_type));
        }
        // The document may be in the message, or only beside it.
        if let Some(inside) = &content.econtent
            && inside.decode_as::<OctetString>()?.as_bytes() != document
        {
            return Err(SignatureError::OtherContent);
        }
        let [signer] = signed.signer_infos.0.as_slice() else {
            return Err(SignatureError::Signers(signed.signer_infos.0.len()));
        };
        self.signer(signer, document)
    }

    fn signer(&self, signer: &SignerInfo, document: &[u8]) -> Result<(), SignatureError> {
        if signer.digest_alg.oid != SHA256 {
            return Err(SignatureError::Algorithm(signer.digest_alg.oid));
        }
        if ![RSA, RSA_WITH_SHA256].contains(&signer.signature_algorithm.oid) {
            return Err(SignatureError::Algorithm(signer.signature_algorithm.oid));
        }
        let verify = |message: &[u8]| {
            let key = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, &self.0);
            key.verify(message, signer.signature.as_bytes()).map_err(|_| SignatureError::Key)
        };
        match &signer.signed_attrs {
            None => verify(document),
            Some(attributes) => {
                if one::<OctetString>(attributes, MESSAGE_DIGEST)?.as_bytes() != Sha256::of(document).0 {
                    return Err(SignatureError::OtherContent);
                }
                if one::<ObjectIdentifier>(attributes, CONTENT_TYPE)? != DATA {
                    return Err(SignatureError::Attributes("its type is not that of the document"));
                }
                // Signed as a SET, whatever its tag is within the message.
                verify(&attributes.to_der()?)
            }
        }
    }
}

/// The one value of the one attribute of this kind.
fn one<'a, T>(attributes: &'a SignedAttributes, kind: ObjectIdentifier) -> Result<T, SignatureError>
where
    T: cms::cert::x509::der::Choice<'a> + cms::cert::x509::der::DecodeValue<'a>,
{
    let mut of_kind = attributes.iter().filter(|a| a.oid == kind);
    let (Some(attribute), None) = (of_kind.next(), of_kind.next()) else {
        return Err(SignatureError::Attributes("an attribute is missing or there twice"));
    };
    let [value] = attribute.values.as_slice() else {
        return Err(SignatureError::Attributes("an attribute has no value or several"));
    };
    Ok(value.decode_as::<T>()?)
}
