//! AWS of the tests: signs identity documents with a key of its own, by a message that is made here byte by byte.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use drums_common::digest::Sha256;
use ring::{rand::SystemRandom, signature};

/// Its certificate.
pub const SIGNER: &str = include_str!("../fixtures/signer.pem");
/// Made for these tests; it opens nothing.
const KEY: &[u8] = include_bytes!("../fixtures/signer.pk8");

fn tlv(tag: u8, content: &[u8]) -> Vec<u8> {
    let length = u16::try_from(content.len()).unwrap().to_be_bytes();
    [&[tag, 0x82][..], &length, content].concat()
}

const SHA256: &[u8] = &[0x06, 9, 0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2, 1];
const RSA: &[u8] = &[0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 1];
const DATA: &[u8] = &[0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 7, 1];
const SIGNED_DATA: &[u8] = &[0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 7, 2];

/// How a message is made; as AWS makes it, unless it is said otherwise.
#[derive(Clone)]
pub struct Message {
    pub document: Vec<u8>,
    /// What is in the message; `None`: nothing is.
    pub inside: Option<Vec<u8>>,
    /// What the attributes say the digest of the document is; `None`: there are no attributes.
    pub digest: Option<Vec<u8>>,
    pub digest_algorithm: Vec<u8>,
    pub signers: usize,
}

impl Message {
    pub fn of(document: &str) -> Self {
        let document = document.as_bytes().to_vec();
        Self {
            inside: Some(document.clone()),
            digest: Some(Sha256::of(&document).0.to_vec()),
            document,
            digest_algorithm: SHA256.to_vec(),
            signers: 1,
        }
    }

    pub fn sign(&self) -> String {
        let key = signature::RsaKeyPair::from_pkcs8(KEY).unwrap();
        // What is signed is in canonical form, with the shortest lengths there are.
        let minimal = |tag: u8, c: &[u8]| [&[tag, u8::try_from(c.len()).unwrap()][..], c].concat();
        let attribute = |last, value: &[u8]| {
            let kind = [0x06, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, last];
            minimal(0x30, &[&kind[..], &minimal(0x31, value)].concat())
        };
        let attributes = self.digest.as_ref().map(|d| [attribute(3, DATA), attribute(4, &minimal(0x04, d))].concat());
        let message = attributes.as_ref().map_or_else(|| self.document.clone(), |a| minimal(0x31, a));
        let mut made = vec![0; key.public().modulus_len()];
        key.sign(&signature::RSA_PKCS1_SHA256, &SystemRandom::new(), &message, &mut made).unwrap();

        let null = [0x05, 0x00];
        let digest_algorithm = tlv(0x30, &[&self.digest_algorithm[..], &null].concat());
        let name = tlv(0x30, &[]);
        let signer = [
            vec![0x02, 1, 1],
            tlv(0x30, &[name, vec![0x02, 1, 7]].concat()),
            digest_algorithm.clone(),
            attributes.map_or_else(Vec::new, |a| tlv(0xa0, &a)),
            tlv(0x30, &[RSA, &null].concat()),
            tlv(0x04, &made),
        ]
        .concat();
        // In pieces and without lengths, as IMDS streams it.
        let inside = self.inside.as_ref().map_or_else(Vec::new, |inside| {
            let (one, two) = inside.split_at(inside.len() / 2);
            [&[0xa0, 0x80, 0x24, 0x80][..], &tlv(0x04, one), &tlv(0x04, two), &[0; 4]].concat()
        });
        let signers: Vec<u8> = std::iter::repeat_n(tlv(0x30, &signer), self.signers).flatten().collect();
        let data = [
            vec![0x30, 0x80, 0x02, 1, 1],
            tlv(0x31, &digest_algorithm),
            [&[0x30, 0x80][..], DATA, &inside, &[0; 2]].concat(),
            tlv(0x31, &signers),
            vec![0; 2],
        ]
        .concat();
        let whole = [&[0x30, 0x80][..], SIGNED_DATA, &[0xa0, 0x80], &data, &[0; 4]].concat();
        let text = STANDARD.encode(whole);
        text.as_bytes().chunks(64).map(|line| String::from_utf8_lossy(line) + "\n").collect()
    }
}
