//! What once was on the wire stays readable, byte for byte. `UPDATE_EXPECT=1` writes the files of a version that is not
//! released yet.

use std::{fmt::Debug, fs, path::PathBuf};

use serde::{Serialize, de::DeserializeOwned};

use super::{
    codec::{CodecError, decode, encode},
    frame::Lane,
};

/// Holds a message against its golden file, and against each cut of it.
pub(super) fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(
    version: &str,
    name: &str,
    lane: Lane,
    value: &T,
) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("goldens/wire/{version}/{name}.bin"));
    let bytes = encode(lane, value).unwrap();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, &bytes).unwrap();
    }
    let golden = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}; refresh with UPDATE_EXPECT=1", path.display()));
    assert_eq!(bytes, golden, "{name}: the bytes of a released message changed");
    let read: T = decode(lane, &golden).unwrap();
    assert_eq!(&read, value, "{name}");
    // Cut anywhere: an error, never a panic or a shorter message. One byte more: an error.
    for cut in 0..bytes.len() {
        assert!(decode::<T>(lane, &bytes[..cut]).is_err(), "{name} cut at {cut}");
    }
    let mut longer = bytes;
    longer.push(0);
    assert!(matches!(decode::<T>(lane, &longer), Err(CodecError::TrailingBytes { left: 1, .. })), "{name} with a tail");
}
