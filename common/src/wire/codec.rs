//! The only file that names the codec (bincode, pinned; docs/decisions/0001-codec.md). Swapping it touches nothing else.
//!
//! Only the serde path with a byte limit is used: the native one allocates what a hostile length says. Left-over bytes
//! are an error, which the codec by itself does not make them.

use std::any::type_name;

use bincode::config::{Configuration, Limit, standard};
use serde::{Serialize, de::DeserializeOwned};

use super::frame::Lane;

#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    #[error("cannot encode {what}")]
    Encode { what: &'static str, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{bytes} bytes are not {what}")]
    Decode { what: &'static str, bytes: usize, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("{left} bytes are left over after {what}")]
    TrailingBytes { what: &'static str, left: usize },
    #[error("{what} takes {bytes} bytes, over the {cap} of its lane")]
    TooLong { what: &'static str, bytes: usize, cap: usize },
}

/// Type name without its path.
fn name<T>() -> &'static str {
    let full = type_name::<T>();
    full.rsplit("::").next().unwrap_or(full)
}

pub fn encode<T: Serialize>(lane: Lane, value: &T) -> Result<Vec<u8>, CodecError> {
    let bytes = bincode::serde::encode_to_vec(value, standard())
        .map_err(|e| CodecError::Encode { what: name::<T>(), source: Box::new(e) })?;
    if bytes.len() > lane.cap() {
        return Err(CodecError::TooLong { what: name::<T>(), bytes: bytes.len(), cap: lane.cap() });
    }
    Ok(bytes)
}

pub fn decode<T: DeserializeOwned>(lane: Lane, bytes: &[u8]) -> Result<T, CodecError> {
    if bytes.len() > lane.cap() {
        return Err(CodecError::TooLong { what: name::<T>(), bytes: bytes.len(), cap: lane.cap() });
    }
    // The limit is a const parameter of the codec's, hence one call for each lane.
    match lane {
        Lane::Control => with(bytes, standard().with_limit::<{ Lane::Control.cap() }>()),
        Lane::Evidence => with(bytes, standard().with_limit::<{ Lane::Evidence.cap() }>()),
        Lane::Artifact => with(bytes, standard().with_limit::<{ Lane::Artifact.cap() }>()),
        Lane::Enrol => with(bytes, standard().with_limit::<{ Lane::Enrol.cap() }>()),
        Lane::Datagram => with(bytes, standard().with_limit::<{ Lane::Datagram.cap() }>()),
    }
}

fn with<T: DeserializeOwned, const N: usize>(
    bytes: &[u8],
    config: Configuration<bincode::config::LittleEndian, bincode::config::Varint, Limit<N>>,
) -> Result<T, CodecError> {
    let (value, used) = bincode::serde::decode_from_slice(bytes, config).map_err(|e| CodecError::Decode {
        what: name::<T>(),
        bytes: bytes.len(),
        source: Box::new(e),
    })?;
    match bytes.len() - used {
        0 => Ok(value),
        left => Err(CodecError::TrailingBytes { what: name::<T>(), left }),
    }
}
