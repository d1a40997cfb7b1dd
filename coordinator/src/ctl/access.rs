//! People and their certificates.

use std::{io::Write as _, path::PathBuf, process::ExitCode};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use clap::{Args, Subcommand};
use drums_common::{note, say};
use rcgen::{CertificateParams, KeyPair};

use super::{Client, CtlError, Global, output, place};
use crate::{
    api::views::{AccessView, AddAccess, IssuedView, RevokeAccess, RevokedView},
    pki::Role,
};

#[derive(Debug, Subcommand)]
pub enum AccessCommand {
    /// Make a key here and have it certified; DIR gets operator.pem, operator.key and ca.pem.
    #[command(
        after_help = "Examples: drumsctl access add ada --role viewer --out ada\n          drumsctl --api https://c.example:7443 --cert ada/operator.pem --key ada/operator.key --ca ada/ca.pem fleet"
    )]
    Add(Add),
    /// List certificates.
    #[command(after_help = "Example: drumsctl access list --json")]
    List,
    /// Revoke a person's certificates, or one by its SHA-256. They are of no use from then on.
    #[command(after_help = "Example: drumsctl access revoke ada")]
    Revoke {
        /// A name, or a certificate's SHA-256.
        who: String,
    },
}

#[derive(Debug, Args)]
pub struct Add {
    /// The person's name: letters, digits and . _ - @
    pub name: String,
    /// operator: everything; viewer: look, and change nothing.
    #[arg(long, value_enum, default_value = "viewer")]
    pub role: Role,
    /// The folder to make; it must not exist.
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Revoke the certificates that this name had before.
    #[arg(long)]
    pub replace: bool,
}

pub(super) async fn access(global: &Global, c: AccessCommand) -> Result<ExitCode, CtlError> {
    let client = Client::new(global);
    match c {
        AccessCommand::Add(add) => return self::add(global, &client, add).await,
        AccessCommand::List => {
            let view: AccessView = client.get("/access").await?;
            if global.json {
                output::json(&view)?;
            } else {
                let rows: Vec<Vec<String>> = view
                    .people
                    .iter()
                    .map(|p| {
                        let state = p
                            .revoked
                            .as_deref()
                            .map_or("valid".to_owned(), |at| format!("revoked {}", output::time(at)));
                        vec![
                            p.name.clone(),
                            p.role.to_string(),
                            state,
                            output::time(&p.issued),
                            p.certificate.to_string(),
                        ]
                    })
                    .collect();
                output::table(&["name", "role", "state", "issued", "certificate (SHA-256)"], &rows)?;
            }
        }
        AccessCommand::Revoke { who } => {
            let done: RevokedView = client.post("/access/revoke", &RevokeAccess { who: who.clone() }).await?;
            if global.json {
                output::json(&done)?;
            } else {
                say!("{who}: {} certificate(s) revoked", done.revoked)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn add(global: &Global, client: &Client, add: Add) -> Result<ExitCode, CtlError> {
    // Before anything is recorded.
    place::free(&add.out)?;
    let attempt = || format!("making a key for {}", add.name);
    let fault = "this is a fault of drumsctl";
    let key = KeyPair::generate().map_err(|e| CtlError::failed(attempt(), e, fault))?;
    let request =
        CertificateParams::default().serialize_request(&key).map_err(|e| CtlError::failed(attempt(), e, fault))?;
    let body = AddAccess {
        name: add.name.clone(),
        role: add.role,
        signing_request: STANDARD.encode(request.der()),
        replace: add.replace,
    };
    let issued: IssuedView = client.post("/access", &body).await?;
    place::folder(&add.out, |dir| {
        for (name, text, mode) in [
            ("operator.pem", issued.certificate_pem.as_str(), 0o644),
            ("operator.key", &key.serialize_pem(), 0o600),
            ("ca.pem", &issued.ca_pem, 0o644),
        ] {
            place::file(&dir.join(name), mode, |f| {
                f.write_all(text.as_bytes()).map_err(CtlError::file("write", dir.join(name)))
            })?;
        }
        Ok(())
    })?;
    if global.json {
        output::json(&issued.person)?;
    } else {
        say!("{} {} has a certificate until {}", add.role, add.name, output::time(&issued.person.expires))?;
        note!("it is in {}; hand the folder over, and keep no copy of operator.key", add.out.display());
        if issued.replaced > 0 {
            note!("{} earlier certificate(s) of {} are revoked", issued.replaced, add.name);
        }
    }
    Ok(ExitCode::SUCCESS)
}
