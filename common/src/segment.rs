//! Segments: evidence as agents keep it on disk and in a bucket. A sequence of batches, each valid or not as a whole.
//!
//! ```text
//! batch  magic[4] "DSB1"  payload:u32  first_seq:u64  count:u32  checksum[16]  payload
//! payload  count × (u32 length, encoded record)
//! ```
//! Big endian. The checksum is the first 16 bytes of SHA-256 over the header before it and the payload. Refuses to know
//! files: everything here is of bytes.

use crate::{
    digest::Sha256,
    evidence::Record,
    telemetry::chain,
    wire::{codec, frame::Lane},
};

pub const MAGIC: [u8; 4] = *b"DSB1";
pub const HEADER: usize = 4 + 4 + 8 + 4 + 16;
/// A batch is what one commit writes. Writers cut larger ones.
pub const MAX_PAYLOAD: usize = 8 << 20;

/// Where a batch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    pub offset: u64,
    pub first_seq: u64,
    pub count: u32,
    pub payload: u32,
}

impl Batch {
    pub fn last_seq(&self) -> u64 {
        self.first_seq + u64::from(self.count) - 1
    }
    pub fn end(&self) -> u64 {
        self.offset + HEADER as u64 + u64::from(self.payload)
    }
}

/// Encoded records with their lengths, back to back.
pub fn push_record(payload: &mut Vec<u8>, record: &Record) -> Result<(), codec::CodecError> {
    let bytes = codec::encode(Lane::Evidence, record)?;
    // The lane's cap is far below 4 GiB.
    payload.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
    payload.extend_from_slice(&bytes);
    Ok(())
}

pub fn encode_batch(first_seq: u64, count: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + payload.len());
    out.extend_from_slice(&MAGIC);
    // Writers cut batches at MAX_PAYLOAD.
    out.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    out.extend_from_slice(&first_seq.to_be_bytes());
    out.extend_from_slice(&count.to_be_bytes());
    let sum = checksum(&out, payload);
    out.extend_from_slice(&sum);
    out.extend_from_slice(payload);
    out
}

fn checksum(head: &[u8], payload: &[u8]) -> [u8; 16] {
    let mut all = Vec::with_capacity(head.len() + payload.len());
    all.extend_from_slice(head);
    all.extend_from_slice(payload);
    let mut out = [0; 16];
    out.copy_from_slice(&Sha256::of(&all).0[..16]);
    out
}

/// One valid batch at the start of `bytes`, or why there is none.
fn parse(bytes: &[u8]) -> Result<(Batch, &[u8]), &'static str> {
    let head = bytes.get(..HEADER).ok_or("a header cut short")?;
    if head[..4] != MAGIC {
        return Err("no batch begins here");
    }
    let u32_at = |i: usize| u32::from_be_bytes([head[i], head[i + 1], head[i + 2], head[i + 3]]);
    let mut seq = [0; 8];
    seq.copy_from_slice(&head[8..16]);
    let batch = Batch { offset: 0, first_seq: u64::from_be_bytes(seq), count: u32_at(16), payload: u32_at(4) };
    let counts =
        batch.count > 0 && batch.first_seq > 0 && batch.first_seq.checked_add(u64::from(batch.count)).is_some();
    if batch.payload as usize > MAX_PAYLOAD || !counts {
        return Err("a header that makes no sense");
    }
    let payload = bytes.get(HEADER..HEADER + batch.payload as usize).ok_or("a batch cut short")?;
    if checksum(&head[..20], payload) != head[20..] {
        return Err("a checksum that does not match");
    }
    Ok((batch, payload))
}

/// What a segment holds.
#[derive(Debug, PartialEq, Eq)]
pub struct Scan {
    pub batches: Vec<Batch>,
    /// Bytes of whole batches.
    pub good: u64,
    pub total: u64,
    /// What is wrong at `good`, if anything follows it.
    pub fault: Option<&'static str>,
    /// A valid batch lies behind the fault: not a torn tail but damage.
    pub valid_behind: bool,
}

pub fn scan(bytes: &[u8]) -> Scan {
    let mut out = Scan { batches: Vec::new(), good: 0, total: bytes.len() as u64, fault: None, valid_behind: false };
    let mut at = 0;
    while at < bytes.len() {
        match parse(&bytes[at..]) {
            Ok((batch, _)) => {
                let batch = Batch { offset: at as u64, ..batch };
                at = batch.end() as usize;
                out.batches.push(batch);
            }
            Err(fault) => {
                out.fault = Some(fault);
                out.valid_behind =
                    (at + 1..bytes.len()).any(|i| bytes[i..].starts_with(&MAGIC) && parse(&bytes[i..]).is_ok());
                break;
            }
        }
    }
    out.good = at as u64;
    out
}

/// The records of the batch at the start of `bytes`, everything checked; or what is wrong with it.
pub fn records(bytes: &[u8]) -> Result<Vec<Record>, String> {
    let (found, payload) = parse(bytes)?;
    let mut records = Vec::with_capacity(found.count.min(65_536) as usize);
    let mut rest = payload;
    while let Some((len, tail)) = rest.split_first_chunk::<4>() {
        let len = u32::from_be_bytes(*len) as usize;
        let Some((body, tail)) = tail.split_at_checked(len) else {
            return Err("a record longer than its batch".to_owned());
        };
        records.push(codec::decode::<Record>(Lane::Evidence, body).map_err(|e| chain(&e))?);
        rest = tail;
    }
    let gapless = records.iter().zip(found.first_seq..).all(|(r, seq)| r.seq == seq);
    if records.len() != found.count as usize || !gapless || !rest.is_empty() {
        return Err("sequence numbers that do not match the header".to_owned());
    }
    Ok(records)
}
