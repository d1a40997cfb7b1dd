//! Segment files, on disk.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

pub(super) use drums_common::segment::{Batch, MAX_PAYLOAD, encode_batch, push_record};
use drums_common::{
    evidence::Record,
    segment::{self, HEADER, Scan},
};

use super::{SpoolError, io_error};

pub(super) fn scan(path: &Path) -> Result<Scan, SpoolError> {
    Ok(segment::scan(&std::fs::read(path).map_err(io_error("read", path))?))
}

/// Reads a batch's records again, checking everything again.
pub(super) fn read_batch(path: &Path, batch: &Batch) -> Result<Vec<Record>, SpoolError> {
    let mut bytes = vec![0; HEADER + batch.payload as usize];
    let mut read = || -> io::Result<()> {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(batch.offset))?;
        file.read_exact(&mut bytes)
    };
    read().map_err(io_error("read", path))?;
    segment::records(&bytes).map_err(|what| SpoolError::Corrupt { path: path.to_owned(), at: batch.offset, what })
}

#[cfg(test)]
mod tests {
    use drums_common::wire::{codec, frame::Lane, latest::EvidenceBatch};

    use super::*;

    /// Whatever a segment holds: whole batches, then the place and the kind of the fault.
    #[test]
    fn fuzz_spool_segments() {
        // What a run writes, record by record.
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../common/goldens/wire/v1/evidence-batch.bin");
        let golden: EvidenceBatch = codec::decode(Lane::Evidence, &std::fs::read(golden).unwrap()).unwrap();
        let mut payload = Vec::new();
        for (record, seq) in golden.records.into_iter().zip(1..) {
            push_record(&mut payload, &Record { seq, ..record }).unwrap();
        }
        let batch = encode_batch(1, 3, &payload);
        let two = [batch.clone(), encode_batch(4, 1, &payload)].concat();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("segment");
        drums_fuzz::decoder!(300, vec![batch, two, payload], |bytes: &[u8]| {
            // As the file, and as the payload of a batch whose checksum is right.
            for bytes in [bytes.to_vec(), encode_batch(1, 3, bytes)] {
                std::fs::write(&path, &bytes).unwrap();
                let found = scan(&path).unwrap();
                assert_eq!(found.total, bytes.len() as u64);
                assert_eq!(found.fault.is_none(), found.good == found.total);
                for batch in &found.batches {
                    if let Ok(records) = read_batch(&path, batch) {
                        assert_eq!(records.len(), batch.count as usize);
                    }
                }
            }
        });
    }
}
