//! Which instance an identity is of: an image that was made of an enrolled host, and is started elsewhere, is no host.
//!
//! Its files are all there, key and certificate among them, and the coordinator sees a second machine with them only once
//! it connects. So the identity keeps the id of the instance that it was made on, and an agent that finds itself on another
//! one does not start. Machines that are not launched have no such file and are not asked.

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use drums_common::wire::latest::InstanceProof;
use serde::{Deserialize, Serialize};

use super::{
    identity::{self, IdentityError},
    imds::{self, ImdsError},
};

const FILE: &str = "instance.json";
/// While a host boots, its network may come up after the agent.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// As the identity document names it; AWS puts more into that.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Instance {
    pub account_id: String,
    pub region: String,
    pub instance_id: String,
}

impl std::fmt::Display for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} in {} of account {}", self.instance_id, self.region, self.account_id)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum InstanceError {
    #[error(
        "the identity in {} was made on {was}, and this is {is}: an image of an enrolled host was started; no machine takes over the name of another, so launch hosts from an image without that folder, or remove it and enrol with a token of this host's own",
        folder.display()
    )]
    Another { folder: PathBuf, was: Box<Instance>, is: Box<Instance> },
    #[error("cannot find out which instance this is, which its identity hangs on")]
    Unknown(#[from] ImdsError),
    #[error("what the instance metadata shows is no identity document")]
    Document(#[source] serde_json::Error),
    #[error("what the instance metadata shows is not sent to the coordinator: {why}")]
    TooLong { why: String },
    #[error("{} is damaged: {why}; remove the identity folder and enrol again with a new token", path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot keep which instance this is")]
    Keep(#[from] IdentityError),
}

/// Holds this machine against the instance that the identity in `state` was made on; notes it on a launched host's first
/// start. `launched`: this host was launched by us, so that there is an instance to ask for. Gives what proves it to a
/// coordinator; nothing on a machine that is not asked.
pub async fn bind(
    state: &Path,
    imds: SocketAddr,
    launched: bool,
    patience: Duration,
) -> Result<Option<InstanceProof>, InstanceError> {
    let folder = identity::dir(state);
    let path = folder.join(FILE);
    let was: Option<Instance> = match fs::read(&path) {
        Ok(bytes) => {
            let read = serde_json::from_slice(&bytes);
            Some(read.map_err(|e| InstanceError::Damaged { path: path.clone(), why: e.to_string() })?)
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(source) => return Err(InstanceError::Read { path, source }),
    };
    if was.is_none() && !launched {
        return Ok(None);
    }
    let shown = imds::shown(imds, patience).await?;
    let is: Instance = serde_json::from_slice(&shown.document).map_err(InstanceError::Document)?;
    match was {
        Some(was) if was != is => {
            return Err(InstanceError::Another { folder, was: Box::new(was), is: Box::new(is) });
        }
        Some(_) => {}
        None => {
            identity::make_private_dir(&folder)?;
            let json = serde_json::to_vec_pretty(&is).expect("strings always serialise");
            identity::write(&path, &json, 0o644)?;
        }
    }
    let proof = InstanceProof::new(shown.document, shown.signature);
    proof.map(Some).map_err(|e| InstanceError::TooLong { why: e.to_string() })
}

#[cfg(test)]
mod tests;
