//! People and their certificates, and the server's own.

use std::{io::Write as _, path::PathBuf, process::ExitCode};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use clap::{Args, Subcommand};
use drums_common::{clock::Clock as _, note, say, telemetry::chain};
use rcgen::{CertificateParams, KeyPair};
use serde_json::json;

use super::{Client, CtlError, Global, output, place};
use crate::{
    api::views::{AccessView, AddAccess, IssuedView, RevokeAccess, RevokedView, utc},
    clock::SystemClock,
    config::Home,
    pki::{self, Pki, Role, ServerCertificate},
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
    /// Give the coordinator of the home on this machine a new server key and certificate, also while it runs.
    #[command(after_help = "Example: drumsctl --home /var/lib/drums access rotate-server")]
    RotateServer,
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
        AccessCommand::RotateServer => return rotate_server(global),
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

/// On the home's files, as `init`: a coordinator that is down or stands by can be given a key like one that serves.
fn rotate_server(global: &Global) -> Result<ExitCode, CtlError> {
    if global.api.is_some() {
        let message = "a server's key is made in its home, not over the network";
        return Err(CtlError::bad(
            message,
            "on the coordinator's machine, without --api or DRUMS_API: give its --home",
        ));
    }
    let home = Home::new(&global.home);
    if !Pki::is_there(&home.pki()) {
        let message = format!("{} is no coordinator's home: it has no keys in pki", home.dir().display());
        return Err(CtlError::bad(message, "is --home right? drumsctl init makes a home"));
    }
    let rotated = pki::rotate_server(&home.pki(), SystemClock.now()).map_err(|e| {
        let attempt = format!("making another server key for {}", home.dir().display());
        CtlError::failed(attempt, e, "the server's key is what it was; lost and damaged files come from a backup")
    })?;
    let view = |c: &ServerCertificate| json!({ "certificate": c.sha256, "expires": utc(c.expires) });
    let until = |c: &ServerCertificate| output::time(&utc(c.expires));
    if global.json {
        let mut all = view(&rotated.made);
        all["file"] = json!(rotated.path);
        all["before"] = rotated.before.as_ref().map_or(serde_json::Value::Null, view);
        output::json(&all)?;
    } else {
        say!("the server has certificate {} until {}", rotated.made.sha256, until(&rotated.made))?;
        note!("its key is in {}; a coordinator that runs shows it from the next connection on", rotated.path.display());
        match &rotated.before {
            Ok(before) => note!(
                "certificate {} is not shown any more; whoever has its key can pass for this server until {}",
                before.sha256,
                until(before)
            ),
            Err(e) => note!("the one before could not be used: {}", chain(e)),
        }
    }
    Ok(ExitCode::SUCCESS)
}
