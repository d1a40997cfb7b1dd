//! AWS, for the commands that ask it themselves. Its SDK is there only with the feature `ec2`.

use drums_provider::{cloud::Shows, words::Region};

use super::CtlError;

/// With the credentials that the environment names. `home`: where is asked what is of no region. Asks nothing yet.
#[cfg(feature = "ec2")]
pub(super) async fn connect(home: &Region) -> Result<Box<dyn Shows>, CtlError> {
    Ok(Box::new(drums_ec2::Ec2::new(drums_ec2::Settings::of(home.clone())).await))
}

#[cfg(not(feature = "ec2"))]
pub(super) async fn connect(_: &Region) -> Result<Box<dyn Shows>, CtlError> {
    Err(CtlError::bad(
        "this drumsctl was built without the feature ec2 and cannot ask AWS anything; nothing was looked at or ended",
        "build one that can: cargo build --release -p drums-coordinator --features ec2, \
         or cargo install --path coordinator --features ec2",
    ))
}
