//! Framing: a length, checked against the lane's cap before anything is allocated, then the payload.
//!
//! Owns the caps. Refuses to know what is in a payload and where bytes come from.

/// Bytes of a frame's length prefix (big endian).
pub const PREFIX: usize = 4;

/// What a stream is for. Each has its own cap, so that a peer can never make the other side hold more than its purpose
/// needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// Hello, desired state, goodbye: one stream for a connection's life.
    Control,
    /// Evidence up, acknowledgements down: one stream at a time.
    Evidence,
    /// One artifact request each.
    Artifact,
    /// One enrolment each.
    Enrol,
    /// Unreliable datagrams: beats and their acknowledgements.
    Datagram,
}

impl Lane {
    /// Largest payload, bytes.
    pub const fn cap(self) -> usize {
        match self {
            // Desired carries a registration's canonical form for each run of a host: tens of KiB in practice.
            Self::Control => 4 << 20,
            // Senders cut batches at 256 KiB; one record is at most 64 KiB of log text.
            Self::Evidence => 1 << 20,
            // A digest and an offset, or a head; the artifact's bytes are not framed.
            Self::Artifact => 4 << 10,
            // A signing request, or a certificate chain.
            Self::Enrol => 32 << 10,
            // What fits in a QUIC datagram on any path.
            Self::Datagram => 1_100,
        }
    }

    /// First byte of a stream, telling what it is for.
    pub const fn tag(self) -> u8 {
        match self {
            Self::Control => 1,
            Self::Evidence => 2,
            Self::Artifact => 3,
            Self::Enrol => 4,
            Self::Datagram => 5,
        }
    }

    /// The lane of a stream's first byte. Only lanes that an agent may open after the handshake.
    pub fn of_tag(tag: u8) -> Result<Self, FrameError> {
        match tag {
            2 => Ok(Self::Evidence),
            3 => Ok(Self::Artifact),
            _ => Err(FrameError::UnknownLane(tag)),
        }
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FrameError {
    #[error("a frame of {got} bytes on the {lane:?} lane, whose largest is {cap}")]
    TooLong { lane: Lane, got: usize, cap: usize },
    #[error("an empty frame on the {lane:?} lane")]
    Empty { lane: Lane },
    #[error("a stream began with {0:#04x}, which names no lane")]
    UnknownLane(u8),
}

/// What comes before a payload: its length.
pub fn prefix(lane: Lane, payload: &[u8]) -> Result<[u8; PREFIX], FrameError> {
    check(lane, payload.len())?;
    // The cap is far below 4 GiB, so the length fits.
    Ok((payload.len() as u32).to_be_bytes())
}

/// Puts the length before a payload.
pub fn wrap(lane: Lane, payload: &[u8]) -> Result<Vec<u8>, FrameError> {
    let prefix = prefix(lane, payload)?;
    let mut out = Vec::with_capacity(PREFIX + payload.len());
    out.extend_from_slice(&prefix);
    out.extend_from_slice(payload);
    Ok(out)
}

/// Reads a prefix; the answer is safe to allocate.
pub fn payload_len(lane: Lane, prefix: [u8; PREFIX]) -> Result<usize, FrameError> {
    let len = u32::from_be_bytes(prefix) as usize;
    check(lane, len)?;
    Ok(len)
}

fn check(lane: Lane, len: usize) -> Result<(), FrameError> {
    if len > lane.cap() {
        return Err(FrameError::TooLong { lane, got: len, cap: lane.cap() });
    }
    if len == 0 {
        return Err(FrameError::Empty { lane });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_length_over_the_cap_is_refused_before_allocation() {
        for lane in [Lane::Control, Lane::Evidence, Lane::Artifact, Lane::Enrol] {
            let over = (lane.cap() as u32 + 1).to_be_bytes();
            assert!(matches!(payload_len(lane, over), Err(FrameError::TooLong { .. })));
            assert!(matches!(payload_len(lane, u32::MAX.to_be_bytes()), Err(FrameError::TooLong { .. })));
            assert_eq!(payload_len(lane, (lane.cap() as u32).to_be_bytes()), Ok(lane.cap()));
            assert_eq!(payload_len(lane, [0; 4]), Err(FrameError::Empty { lane }));
        }
    }

    proptest! {
        #[test]
        fn wrapped_frames_read_back(payload in proptest::collection::vec(any::<u8>(), 1..2048)) {
            let frame = wrap(Lane::Enrol, &payload).unwrap();
            let (prefix, rest) = frame.split_at(PREFIX);
            prop_assert_eq!(payload_len(Lane::Enrol, prefix.try_into().unwrap()).unwrap(), rest.len());
            prop_assert_eq!(rest, &payload[..]);
        }

        #[test]
        fn no_prefix_allocates_over_the_cap(prefix in any::<[u8; 4]>()) {
            for lane in [Lane::Control, Lane::Evidence, Lane::Artifact, Lane::Enrol, Lane::Datagram] {
                if let Ok(len) = payload_len(lane, prefix) {
                    prop_assert!(len <= lane.cap());
                }
            }
        }
    }
}
